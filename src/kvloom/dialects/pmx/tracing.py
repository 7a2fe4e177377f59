"""Hook for an exporter, which sees whole calls instead of their stores and loads."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Tracer: TypeAlias = Callable[[str, dict[str, Any]], Any]

_tracer: Tracer | None = None


def traceable(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate an operator, ``name`` in its document, so that a tracer, if there is one, gets its calls."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if _tracer is None:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            result: R = _tracer(name, dict(bound.arguments))
            return result

        return call

    return decorate


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """Context in which ``tracer(name, arguments)`` replaces every PMX operator, in all threads."""
    global _tracer  # noqa: PLW0603
    before, _tracer = _tracer, tracer
    try:
        yield
    finally:
        _tracer = before
