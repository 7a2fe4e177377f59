"""Reading of requests: JSON objects, and their fields with checks of types and limits."""

import gc
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.serving import Refused

_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escaped surrogate, which may be unpaired, so that the text cannot be encoded."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Context without garbage collection, which takes ten times as long as reading a million lists."""
    was_enabled = gc.isenabled()  # with several threads, the one that found it enabled enables it again
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_object(body: bytes) -> dict[str, Any]:
    """A JSON object whose texts can be encoded; raises ArgumentError for anything else."""
    try:
        with _no_collection():
            value = json.loads(body.decode("utf-8-sig"))
        if _HALF_PAIR.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ArgumentError("the request must be JSON in UTF-8") from error
    if not isinstance(value, dict):
        raise ArgumentError(f"the request must be a JSON object, got {type(value).__name__}")
    return value


def expect_model(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise Refused unless a request names the model with these names, or no model."""
    if body.get("model") not in (None, *names):
        told = f"model must be {names[0]!r}, got {str(body['model'])[:100]!r}"
        raise Refused(404, told, "model_not_found")


def shown(value: Any) -> str:
    """Text of a value in an error, at most 60 characters."""
    try:
        text = repr(value)
    except RecursionError:  # JSON nests deeper than what it becomes can be written
        return f"a {type(value).__name__} that nests too deep"
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_fields(
    body: Any, known: Collection[str], neutral: Mapping[str, tuple[Any, ...]] | None = None
) -> dict[str, Any]:
    """The fields of a request that are not null.

    Args:
        body: JSON of the request.
        known: Names of the fields that are supported.
        neutral: Names of others, with the values that change nothing.

    Raises:
        ArgumentError: it is no object, or a field is unknown or not supported.
    """
    if not isinstance(body, dict):
        raise ArgumentError(f"the request must be a JSON object, got {type(body).__name__}")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if neutral is not None and name in neutral:
            if value not in neutral[name]:
                raise ArgumentError(f"{name} must be left out, as it is not supported, got {shown(value)}")
        elif name not in known:
            raise ArgumentError(f"{shown(name)} is no field that is supported")
    return given


def number(body: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    """A number from ``low`` to ``high``; raises ArgumentError for anything else."""
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ArgumentError(f"{name} must be a number from {low} to {high}, got {shown(value)}")
    return float(value)


def whole(
    body: Mapping[str, Any], name: str, low: int, high: float = math.inf, default: int | None = None
) -> int | None:
    """An integer from ``low`` to ``high``; raises ArgumentError for anything else."""
    value = body.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        most = "" if high == math.inf else f" and at most {high}"
        raise ArgumentError(f"{name} must be an integer of at least {low}{most}, got {shown(value)}")
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false; raises ArgumentError for anything else."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be true or false, got {shown(value)}")
    return value


def text(body: Mapping[str, Any], name: str, default: str = "") -> str:
    """A string; raises ArgumentError for anything else."""
    value = body.get(name, default)
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a string, got {shown(value)}")
    return value
