"""Salts: only those who know a salt find what was computed under it."""

from kvloom.errors import ArgumentError


def expect_salt(salt: object, name: str = "salt") -> None:
    """Raise ArgumentError for a salt that is no string: 1, ``True`` and ``"1"`` must not be one salt."""
    if not isinstance(salt, str):
        raise ArgumentError(f"{name} must be a string, got {salt!r}")
