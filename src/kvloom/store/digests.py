"""Digests of the prefixes of a text, under one fingerprint and one salt."""

import hashlib
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from typing import Final

from kvloom.errors import ArgumentError
from kvloom.paging import expect_salt

DIGEST_BYTES: Final = 32
"""Bytes of a SHA-256 digest."""
_MAX_TEXTS: Final = 4
"""Texts whose digests are kept."""


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
    except struct.error as problem:
        raise ArgumentError(f"tokens must be signed 64-bit integers: {problem}") from None


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

    def copy(self) -> "TextDigests":
        """Another object of this text, which can be extended."""
        other = copy(self)
        other._tokens, other._known, other._pages = bytearray(self._tokens), self._known.copy(), {}
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

    def is_of(self, other: "TextDigests") -> bool:
        """Whether ``other`` has the same text, fingerprint and salt."""
        return self._known[0] == other._known[0] and self._tokens == other._tokens

    def learn(self, other: "TextDigests") -> bool:
        """Copy the digests of another text, if one of the two texts continues the other.

        Returns:
            Whether the other text continues this one.
        """
        mine, theirs = self._tokens, other._tokens
        if self._known[0] == other._known[0] and (mine.startswith(theirs) or theirs.startswith(mine)):
            shared = min(len(mine), len(theirs)) // 8
            self._known.update({end: x for end, x in list(other._known.items()) if end <= shared})
            return len(theirs) > len(mine)
        return False

    def token_bytes(self, start: int, end: int) -> bytes:
        """``token_bytes`` of the tokens from ``start`` to ``end``."""
        return bytes(self._tokens[8 * start : 8 * end])


class LastTexts:
    """Cache of the ``TextDigests`` of the last texts, so that no digest is computed twice. Thread-safe."""

    def __init__(self) -> None:
        self._kept: deque[TextDigests] = deque(maxlen=_MAX_TEXTS)

    def prefixes(self, fingerprint: bytes, salt: bytes, tokens: Sequence[int]) -> TextDigests:
        """``TextDigests`` of a text, cached.

        Raises:
            ArgumentError: as ``token_bytes``.
        """
        found = TextDigests(fingerprint, salt, tokens)
        is_part = False
        for kept in list(self._kept):
            if kept.is_of(found):
                return kept
            is_part |= found.learn(kept)
        if not is_part:
            self._kept.append(found)
        return found
