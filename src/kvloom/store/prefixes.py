"""Digests that name a text up to a token: of all tokens before it, under one fingerprint and one salt."""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from kvloom.errors import ArgumentError

DIGEST_BYTES: Final = 32
"""Of SHA-256."""


def salt_digest(salt: str) -> bytes:
    """32 bytes that stand for a salt on disk."""
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


class Prefixes:
    """The digests of the prefixes of one text.

    Args:
        fingerprint: Digest of the fingerprint of whoever computes the keys and values.
        salt: ``salt_digest`` of who may use them.
        tokens: Token ids from the start, signed 64-bit.
    """

    def __init__(self, fingerprint: bytes, salt: bytes, tokens: Sequence[int]) -> None:
        self._root = hashlib.sha256(b"kvloom prefix\0" + fingerprint + salt)
        self._tokens = token_bytes(tokens)
        self._known = {0: self._root.digest()}  # finding, checking and saving ask for the same ends

    def digests(self, ends: Iterable[int]) -> list[bytes]:
        """Of the first ``end`` tokens, for each of ``ends``, which ascend; 32 bytes each."""
        wanted = list(ends)
        if not self._known.keys() >= set(wanted):
            state, done = self._root.copy(), 0
            for end in wanted:
                state.update(memoryview(self._tokens)[8 * done : 8 * end])
                done = end
                self._known[end] = state.digest()
        return [self._known[end] for end in wanted]
