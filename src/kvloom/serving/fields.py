"""Readers of the fields of a request's JSON, with checks of types and limits."""

import math
from collections.abc import Mapping
from typing import Any

from kvloom.errors import ArgumentError


def shown(value: Any) -> str:
    """Text of a value in an error, at most 60 characters."""
    try:
        text = repr(value)
    except RecursionError:  # JSON nests deeper than what it becomes can be written
        return f"a {type(value).__name__} that nests too deep"
    return text if len(text) <= 60 else f"{text[:57]}..."


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
