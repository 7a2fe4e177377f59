"""Checks of the arguments of pools, trees and tables."""

import operator
import struct
from collections.abc import Iterable
from typing import Any, Final

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


def refused_tokens(tokens: Iterable[object]) -> ArgumentError:
    """Error that names the first token that is no signed 64-bit integer."""
    wrong = next((token for token in tokens if not _is_int64(token)), tokens)
    return ArgumentError(f"tokens must be signed 64-bit integers, got {wrong!r:.60}")


def token_ids(tokens: Any) -> list[int]:
    """Ids of tokens as ints, of a list or of a tensor or array of one axis.

    Raises:
        ArgumentError: one is no integer, or ``tokens`` are no sequence.
    """
    if not isinstance(tokens, Iterable):
        raise ArgumentError(f"tokens must be a list of integers, got {tokens!r:.60}")
    try:
        return [*map(operator.index, tokens)]
    except TypeError:
        raise refused_tokens(tokens) from None


def _is_int64(x: object) -> bool:
    try:
        struct.pack("=q", x)
    except (struct.error, TypeError):  # the latter of tensors of floats
        return False
    return True
