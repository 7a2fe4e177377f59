"""Checks of the arguments of pools, trees and tables."""

from typing import Final

from kvloom.errors import ArgumentError

POLICIES: Final = ("lru", "ours")
"""Names of eviction policies."""


def expect_policy(policy: str) -> None:
    """Raise ArgumentError if there is no such policy."""
    if policy not in POLICIES:
        raise ArgumentError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")


def expect_page_size(page_size: int) -> None:
    """Check a page size.

    Raises:
        ArgumentError: it is no positive int.
    """
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
        raise ArgumentError(f"page_size must be an int of at least 1, got {page_size!r}")
