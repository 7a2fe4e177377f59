"""Digests of the prefixes of a text, under one fingerprint and one salt."""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from typing import Final

from kvloom.core.text import Text
from kvloom.paging import expect_salt
from kvloom.paging.arguments import refused_tokens

DIGEST_BYTES: Final = 32
"""Bytes of a SHA-256 digest."""


def salt_digest(salt: str) -> bytes:
    """Digest of a salt on disk, 32 bytes; raises ArgumentError for a salt that is no string."""
    expect_salt(salt)
    return hashlib.sha256(b"kvloom salt\0" + salt.encode("utf-8", "surrogatepass")).digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int64.

    Raises:
        ArgumentError: one is no signed 64-bit integer.
    """
    try:
        return struct.pack(f"<{len(tokens)}q", *tokens)
    except struct.error:
        raise refused_tokens(tokens) from None


class TextDigests:
    """Digests of the prefixes of one text.

    Args:
        fingerprint: Digest of the fingerprint of the keys and values.
        salt: ``salt_digest`` of their salt.
        tokens: Token ids from the start, signed 64-bit.
    """

    def __init__(self, fingerprint: bytes, salt: bytes, tokens: Sequence[int]) -> None:
        self._root = hashlib.sha256(b"kvloom prefix\0" + fingerprint + salt)
        self._tokens: bytes | bytearray = token_bytes(tokens)
        self._known = {0: self._root.digest()}  # finding, checking and saving need the same ends
        self._pages: dict[int, tuple[bytes, ...]] = {}
        self._last = 0, self._root  # state of the hash at the furthest end so far

    def digests(self, ends: Iterable[int]) -> list[bytes]:
        """Digests of the first ``end`` tokens for each of ``ends``, which ascend; 32 bytes each."""
        known, wanted = self._known, list(ends)
        with suppress(KeyError):
            return [known[end] for end in wanted]
        done, last = self._last
        done, state = (done, last.copy()) if done <= wanted[0] else (0, self._root.copy())
        for end in wanted:
            state.update(self._tokens[8 * done : 8 * end])
            done = end
            known[end] = state.digest()
        if done > self._last[0]:
            self._last = done, state
        return [known[end] for end in wanted]

    def pages(self, size: int, first: int, end: int) -> tuple[bytes, ...]:
        """Digests up to the end of each page of ``size`` tokens from token ``first`` to ``end``."""
        if first % size or (first and size not in self._pages):
            return tuple(self.digests(range(first + size, end + 1, size)))
        if size not in self._pages:
            self._pages[size] = tuple(self.digests(range(size, len(self._tokens) // 8 + 1, size)))
        return self._pages[size][first // size : end // size]

    def copy(self, num_tokens: int) -> "TextDigests":
        """Another object of the first ``num_tokens`` of this text, which can be extended."""
        other = copy(self)
        other._tokens, other._pages = bytearray(self._tokens[: 8 * num_tokens]), {}
        other._known = {end: x for end, x in list(self._known.items()) if end <= num_tokens}
        if self._last[0] > num_tokens:
            other._last = 0, self._root
        return other

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the text; only of a ``copy``, since others may use the original.

        Raises:
            ArgumentError: as ``token_bytes``.
        """
        self._tokens += token_bytes(tokens)
        self._pages.clear()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text."""
        return len(self._tokens) // 8

    def token_bytes(self, start: int, end: int) -> bytes:
        """``token_bytes`` of the tokens from ``start`` to ``end``."""
        return bytes(self._tokens[8 * start : 8 * end])


def digests_of(fingerprint: bytes, salt: bytes, tokens: Sequence[int]) -> TextDigests:
    """``TextDigests`` of these arguments, possibly of more tokens; a ``Text`` keeps them in ``known``.

    Raises:
        ArgumentError: as ``token_bytes``.
    """
    if not isinstance(tokens, Text):
        return TextDigests(fingerprint, salt, tokens)
    key = TextDigests, fingerprint, salt
    found: TextDigests | None = tokens.known.get(key)
    if found is None:
        found = TextDigests(fingerprint, salt, tokens)
    elif (num_known := found.num_tokens) < len(tokens):
        found = found.copy(num_known)
        found.extend(tokens[num_known:])
    tokens.known[key] = found
    return found
