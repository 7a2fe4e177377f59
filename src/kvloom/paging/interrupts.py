"""Ctrl-C waits while pages change hands. Imports no torch."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

is_traced: Callable[[], bool] = bool
"""Whether a compiler traces the code, which knows no signals; a package that has a compiler sets it."""


class _Waiting:
    """Handler of Ctrl-C that only notes it.

    Args:
        handler: The handler in whose place it is.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.noted: list[FrameType | None] = []

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        self.noted.append(frame)

    def give_way(self) -> None:
        """Set the handler again, and pass on what was noted."""
        signal.signal(signal.SIGINT, self.handler)
        if self.noted:
            frame = self.noted.pop()
            self.noted.clear()
            self.handler(signal.SIGINT, frame)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context in which Ctrl-C waits for the end, because within it pages may be without a holder.

    Does nothing in other threads, which Ctrl-C does not reach, and where it raises nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or isinstance(handler, _Waiting):
        yield
        return
    waiting = _Waiting(handler)
    signal.signal(signal.SIGINT, waiting)
    try:
        yield
    finally:
        waiting.give_way()


@contextmanager
def interruptible() -> Iterator[None]:
    """Context within ``uninterrupted`` where Ctrl-C raises at once: for what may take long."""
    waiting = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not isinstance(waiting, _Waiting):
        yield
        return
    try:
        waiting.give_way()
        yield
    finally:
        signal.signal(signal.SIGINT, waiting)


def whole(call: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorate a function that Ctrl-C does not interrupt halfway, as in ``uninterrupted``."""

    @wraps(call)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if is_traced():
            return call(*args, **kwargs)
        with uninterrupted():
            return call(*args, **kwargs)

    return run
