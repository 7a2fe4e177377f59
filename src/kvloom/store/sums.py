"""Checksums: XXH3-128 of pieces of memory, by xxhash."""

from typing import Any, Final

import xxhash

SUM_BYTES: Final = 16


def checksum(data: Any) -> bytes:
    """XXH3-128 of a buffer, big-endian as the hash's canonical form is."""
    return xxhash.xxh3_128_digest(data)


def checksums(data: memoryview, size: int) -> bytes:
    """Of each ``size`` bytes, the last of which may be fewer, ``checksum``, one behind the other."""
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(data[i : i + size]) for i in range(0, len(data), size)])
