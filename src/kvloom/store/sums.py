"""Checksums of pieces of memory: XXH3-128 by xxhash, or under a key BLAKE2b, which nobody else can make."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from kvloom.errors import ArgumentError

SUM_BYTES: Final = 16
_KEY_BYTES: Final = range(16, 65)
"""That a key may have."""


def checksum(data: Any) -> bytes:
    """XXH3-128 of a buffer, big-endian as the hash's canonical form is."""
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True)
class Sums:
    """How files are summed.

    Attributes:
        key: Secret of those who share a store, 16 to 64 bytes. A key finds forgeries, ``None`` accidents.

    Raises:
        ArgumentError: the key is no bytes, or has fewer or more.
    """

    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.key is not None and not (isinstance(self.key, bytes) and len(self.key) in _KEY_BYTES):
            got = f"{len(self.key)} bytes" if isinstance(self.key, bytes) else type(self.key).__name__
            raise ArgumentError(f"key must be {_KEY_BYTES[0]} to {_KEY_BYTES[-1]} bytes, got {got}")

    @property
    def format(self) -> str:
        """The format of a run with these checksums."""
        return "kvloom-run/1" if self.key is None else "kvloom-run/1+blake2b"

    def checksum(self, data: Any) -> bytes:
        """The checksum of a buffer: XXH3-128, or with a key BLAKE2b of 16 bytes."""
        if self.key is None:
            return checksum(data)
        return hashlib.blake2b(data, digest_size=SUM_BYTES, key=self.key).digest()

    def checksums(self, data: memoryview, size: int) -> bytes:
        """The ``checksum`` of each ``size`` bytes, the last of which may be fewer, one after the other."""
        digest = xxhash.xxh3_128_digest if self.key is None else self.checksum  # called once a page
        return b"".join([digest(data[i : i + size]) for i in range(0, len(data), size)])

    def folder(self, fingerprint: bytes) -> str:
        """The folder of the runs of a fingerprint, by its digest; each key has a folder of its own."""
        if self.key is None:
            return fingerprint.hex()[:16]
        return hashlib.blake2b(b"kvloom folder\0" + fingerprint, digest_size=8, key=self.key).hexdigest()


def read_sums(path: str | None) -> Sums:
    """Those of a store whose key is in a file, all bytes of it; ``None`` for a store without one.

    Raises:
        ArgumentError: the file cannot be read, or has fewer or more bytes than a key.
    """
    if path is None:
        return PLAIN
    try:
        return Sums(Path(path).read_bytes())
    except OSError as error:
        raise ArgumentError(f"key file must be one that can be read, got {error}") from None


PLAIN: Final = Sums()
"""Those of stores without a key."""
