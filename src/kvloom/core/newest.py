"""Dictionaries that keep what was set last."""

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def keep_newest(known: dict[_Key, _Value], key: _Key, value: _Value, most: int) -> None:
    """Set ``known[key]``, as the newest of at most ``most`` entries; the oldest go."""
    known.pop(key, None)
    known[key] = value
    while len(known) > most:
        del known[next(iter(known))]
