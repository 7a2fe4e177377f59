"""Checksums: XXH3-128 by xxhash, or BLAKE2b with a key, which cannot be forged without it."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from kvloom.errors import ArgumentError

SUM_BYTES: Final = 16
_KEY_BYTES: Final = range(16, 65)
"""Allowed numbers of bytes of a key."""


def checksum(data: Any) -> bytes:
    """XXH3-128 of a buffer, big-endian, as in the hash's canonical form."""
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True)
class Sums:
    """Method of checksums of files.

    Attributes:
        key: Secret that users of a store share, 16 to 64 bytes, to detect forgeries; ``None`` to detect
            accidents only.

    Raises:
        ArgumentError: the key is no bytes, or has another length.
    """

    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.key is not None and not (isinstance(self.key, bytes) and len(self.key) in _KEY_BYTES):
            got = f"{len(self.key)} bytes" if isinstance(self.key, bytes) else type(self.key).__name__
            raise ArgumentError(f"key must be {_KEY_BYTES[0]} to {_KEY_BYTES[-1]} bytes, got {got}")

    @property
    def format(self) -> str:
        """Format name of a run with these checksums."""
        return "kvloom-run/1" if self.key is None else "kvloom-run/1+blake2b"

    def checksum(self, data: Any) -> bytes:
        """Checksum of a buffer, 16 bytes: XXH3-128, or BLAKE2b with a key."""
        if self.key is None:
            return checksum(data)
        return hashlib.blake2b(data, digest_size=SUM_BYTES, key=self.key).digest()

    def checksums(self, data: memoryview, size: int) -> bytes:
        """Concatenated checksums of every ``size`` bytes; the last part may be shorter."""
        digest = xxhash.xxh3_128_digest if self.key is None else self.checksum  # called once for each page
        return b"".join([digest(data[i : i + size]) for i in range(0, len(data), size)])

    def folder(self, fingerprint: bytes) -> str:
        """Folder of the runs of a fingerprint, by its digest; each key has its own."""
        if self.key is None:
            return fingerprint.hex()[:16]
        return hashlib.blake2b(b"kvloom folder\0" + fingerprint, digest_size=8, key=self.key).hexdigest()


def read_sums(path: str | None) -> Sums:
    """Method of a store whose key is the content of a file; ``None`` for a store without a key.

    Raises:
        ArgumentError: the file cannot be read, or does not have the length of a key.
    """
    if path is None:
        return PLAIN
    try:
        return Sums(Path(path).read_bytes())
    except OSError as error:
        raise ArgumentError(f"key file must be one that can be read, got {error}") from None


PLAIN: Final = Sums()
"""Method of stores without a key."""
