"""Run: contiguous pages of one text in a safetensors file, see docs/store-format.md. Invalid bytes raise.

Shapes: N pages, S tokens in a page, R heads that can be read one by one (or 1 for all heads together).
"""

import json
import struct
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Final, NoReturn

from kvloom.core.entries import Part
from kvloom.errors import ConfigError, KVError
from kvloom.store.digests import DIGEST_BYTES, TextDigests
from kvloom.store.fingerprint import Fingerprint
from kvloom.store.names import run_name
from kvloom.store.sums import PLAIN, SUM_BYTES, Sums

MAX_HEADER: Final = 1 << 20
"""Maximum bytes of a file's JSON: enough for some thousand layers that all differ."""
MAX_HEAD: Final = 64 << 20
"""Maximum bytes of a head: enough for two million pages."""
_ALIGNMENT: Final = 8


_read_fingerprint: Final = lru_cache(maxsize=16)(Fingerprint.from_json)
"""Cached parser: all runs of a pool have one fingerprint."""


class DamagedRun(KVError, ValueError):
    """Error for bytes that are no complete run; nothing was read from them."""


class OtherFormat(DamagedRun):
    """Error for a run of a format that this release does not support."""


@dataclass(frozen=True, slots=True)
class Run:
    """Head of a file: its tokens, model and checksums.

    Attributes:
        fingerprint: Model and format of the keys and values.
        salt: ``salt_digest`` of their salt.
        first: Position of the first token.
        page_size: S.
        before: Digest of all tokens before the first, as of ``TextDigests``.
        digests: Digest of all tokens up to the end of each page; N of 32 bytes.
        tokens: N * S token ids as little-endian int64; ``None`` if no text is kept.
        checksums: Checksums of each page of each head, R rows of N, 16 bytes each.
        sums: Method of the checksums and of the head's seal.
    """

    fingerprint: Fingerprint
    salt: bytes
    first: int
    page_size: int
    before: bytes
    digests: tuple[bytes, ...]
    tokens: bytes | None
    checksums: bytes = field(repr=False, default=b"")
    sums: Sums = PLAIN

    @property
    def num_pages(self) -> int:
        """N."""
        return len(self.digests)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first + self.num_pages * self.page_size

    @property
    def name(self) -> str:
        """Name of its file, in the folder of its fingerprint; equal for equal runs."""
        folder = self.sums.folder(self.fingerprint.digest)
        return run_name(folder, self.digests[-1], self.first, self.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one of the R heads."""
        return page_bytes(self.fingerprint, self.page_size)

    @property
    def data_bytes(self) -> int:
        """Bytes after the head."""
        return self.fingerprint.num_heads * self.num_pages * self.page_bytes

    def head(self) -> bytes:
        """Bytes of the file before the pages."""
        place = self.before, self.first, self.page_size, self.num_pages
        header = _Header(self.fingerprint, self.salt, *place, self.tokens is not None, self.sums)
        sealed = b"".join((header.to_bytes(), self.tokens or b"", *self.digests, self.checksums))
        return sealed + self.sums.checksum(sealed)

    def part(self, pages: range) -> "Run":
        """Run of some of the pages, without checksums."""
        size, digests = 8 * self.page_size, (self.before, *self.digests)
        return replace(
            self,
            first=self.first + pages.start * self.page_size,
            before=digests[pages.start],
            digests=digests[pages.start + 1 : pages.stop + 1],
            tokens=None if self.tokens is None else self.tokens[pages.start * size : pages.stop * size],
            checksums=b"",
        )

    def with_checksums(self, data: memoryview) -> "Run":
        """Copy of this run with the checksums of its pages.

        Args:
            data: R * N pages, heads outermost.
        """
        return replace(self, checksums=self.sums.checksums(data, self.page_bytes))

    def expect_whole(self, data: memoryview, pages: range, heads: range) -> None:
        """Check pages that were read, heads outermost.

        Raises:
            DamagedRun: a checksum differs.
        """
        size = self.page_bytes
        if len(data) != len(pages) * len(heads) * size:
            raise DamagedRun(f"{len(pages) * len(heads) * size} bytes of pages expected, got {len(data)}")
        got, row = self.sums.checksums(data, size), len(pages) * SUM_BYTES
        for i, head in enumerate(heads):
            first = (head * self.num_pages + pages.start) * SUM_BYTES
            mine, theirs = got[i * row : (i + 1) * row], self.checksums[first : first + row]
            if mine != theirs:
                starts = range(0, row, SUM_BYTES)
                page = next(at for at in starts if mine[at : at + SUM_BYTES] != theirs[at : at + SUM_BYTES])
                number = pages.start + page // SUM_BYTES
                raise DamagedRun(f"page {number} of head {head} does not have its checksum")

    def expect_prefix(self, prefixes: TextDigests, end: int) -> None:
        """Check that the run has a text from its first token to ``end``, which ends a page.

        Args:
            prefixes: Digests of the text, under the fingerprint and salt of the reader.
            end: Position after the first token of the run.

        Raises:
            DamagedRun: it has another text.
        """
        (before,) = prefixes.digests([self.first])
        digests = prefixes.pages(self.page_size, self.first, end)
        if before != self.before or digests != self.digests[: (end - self.first) // self.page_size]:
            raise DamagedRun("the digests are of another text")
        if self.tokens is not None:
            wanted = prefixes.token_bytes(self.first, end)
            if self.tokens[: len(wanted)] != wanted:
                raise DamagedRun("the tokens are of another text")


def ranges_of(pages: range, heads: range, num_pages: int, nbytes: int, start: int) -> list[tuple[int, int]]:
    """Byte ranges of some pages of some heads.

    Args:
        pages: Pages of the run.
        heads: Heads among the R.
        num_pages: N, number of all pages of the run.
        nbytes: Bytes of a page.
        start: Start of the pages in the file.
    """
    row = num_pages * nbytes
    if len(pages) == num_pages:
        return [(start + heads.start * row, start + heads.stop * row)]
    return [
        (start + head * row + pages.start * nbytes, start + head * row + pages.stop * nbytes)
        for head in heads
    ]


@lru_cache(maxsize=64)
def page_bytes(fingerprint: Fingerprint, page_size: int) -> int:
    """Bytes of a page of one of the R heads.

    Order of the bytes: layers, in each keys before values, in each codes before scales.
    """
    return sum(
        part_bytes(part, layer.heads // fingerprint.num_heads * page_size)
        for layer in fingerprint.layers
        for side in layer.sides
        for part in side.parts
    )


def part_bytes(part: Part, num_vectors: int) -> int:
    """Bytes of ``num_vectors`` head vectors of a tensor in a page, padded to a multiple of 8."""
    return -(-num_vectors * part.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Header:
    """JSON of a file: the fields of a run, of which the sizes of its tensors follow."""

    fingerprint: Fingerprint
    salt: bytes
    before: bytes
    first: int
    page_size: int
    num_pages: int
    has_text: bool
    sums: Sums

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shape of each tensor, in order; token ids have 8 bytes each, all others are bytes."""
        heads, num_pages = self.fingerprint.num_heads, self.num_pages
        return {
            **({"tokens": [num_pages, self.page_size]} if self.has_text else {}),
            "digests": [num_pages, DIGEST_BYTES],
            "checksums": [heads, num_pages, SUM_BYTES],
            "seal": [SUM_BYTES],
            "pages": [heads, num_pages, page_bytes(self.fingerprint, self.page_size)],
        }

    @property
    def lengths(self) -> dict[str, int]:
        """Bytes of each tensor, in order."""
        return {name: prod(shape) * (8 if name == "tokens" else 1) for name, shape in self.shapes.items()}

    def to_bytes(self) -> bytes:
        """Length and JSON, padded with spaces."""
        header: dict[str, Any] = {
            "__metadata__": {
                "before": self.before.hex(),
                "fingerprint": self.fingerprint.to_json(),
                "first": str(self.first),
                "format": self.sums.format,
                "num_pages": str(self.num_pages),
                "page_size": str(self.page_size),
                "salt": self.salt.hex(),
                "text": "tokens" if self.has_text else "digests",
            }
        }
        at, lengths = 0, self.lengths
        for name, shape in self.shapes.items():
            end = at + lengths[name]
            dtype = "I64" if name == "tokens" else "U8"
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        spelled = json.dumps(header, separators=(",", ":")).encode()
        spelled += b" " * (-len(spelled) % _ALIGNMENT)
        return struct.pack("<Q", len(spelled)) + spelled


def read_head(data: bytes, file_size: int, sums: Sums = PLAIN) -> tuple[Run, int]:
    """Parse the head of a file: its run, and the start of its pages.

    Args:
        data: The first bytes of the file, the head or more.
        file_size: Bytes of the whole file.
        sums: Method of its checksums.

        Raises:
            DamagedRun: the bytes are no run.
    """
    header, end = _read_header(data, file_size, sums)
    start, lengths = _header_end(data), header.lengths
    if len(data) < end:
        raise DamagedRun(f"the head ends at byte {end}, got {len(data)}")
    if sums.checksum(memoryview(data)[: end - SUM_BYTES]) != data[end - SUM_BYTES : end]:
        raise DamagedRun("the head does not have its checksum")
    digests_at = start + lengths.get("tokens", 0)
    sums_at = digests_at + lengths["digests"]
    digests = tuple(data[i : i + DIGEST_BYTES] for i in range(digests_at, sums_at, DIGEST_BYTES))
    if len(set(digests)) < len(digests):
        raise DamagedRun("a digest occurs twice")
    tokens = data[start:digests_at] if "tokens" in lengths else None
    run = Run(
        header.fingerprint,
        header.salt,
        header.first,
        header.page_size,
        header.before,
        digests,
        tokens,
        data[sums_at : end - SUM_BYTES],
        sums,
    )
    return run, end


def head_size(data: bytes, file_size: int, sums: Sums = PLAIN) -> int:
    """Number of bytes of a file's head, or of its JSON if ``data`` ends within that.

    Args:
        data: The first bytes of the file.
        file_size: Bytes of the whole file.
        sums: Method of its checksums.

        Raises:
            DamagedRun: no run begins with ``data``.
    """
    end = _header_end(data)
    return end if end > len(data) else _read_header(data, file_size, sums)[1]


def _header_end(data: bytes) -> int:
    if len(data) < 8:
        raise DamagedRun(f"a file has at least 8 bytes, got {len(data)}")
    size = 8 + int(struct.unpack_from("<Q", data)[0])
    if size > MAX_HEADER:
        raise DamagedRun(f"a header has at most {MAX_HEADER} bytes, got {size}")
    return size


def _read_header(data: bytes, file_size: int, sums: Sums) -> tuple[_Header, int]:
    """The header of a file, and the end of its head."""
    try:
        return _checked_header(data, file_size, sums)
    except (ArithmeticError, ConfigError, LookupError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, DamagedRun):
            raise
        raise DamagedRun(f"the header cannot be read: {error}") from None


def _checked_header(data: bytes, file_size: int, sums: Sums) -> tuple[_Header, int]:
    start = _header_end(data)
    if start > len(data):
        raise DamagedRun(f"the header ends at byte {start}, the file at {len(data)}")
    header = json.loads(data[8:start], object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    saved = header["__metadata__"]
    if saved["format"] != sums.format:
        raise OtherFormat(f"the format must be {sums.format}, got {str(saved['format'])[:40]!r}")
    first, page_size, num_pages = (int(saved[name]) for name in ("first", "page_size", "num_pages"))
    if first < 0 or page_size < 1 or num_pages < 1 or num_pages * page_size > file_size:
        raise DamagedRun(f"{num_pages} pages of {page_size} tokens from {first} are not in {file_size} bytes")
    salt, before = (_digest_of(saved[name]) for name in ("salt", "before"))
    place = before, first, page_size, num_pages
    fingerprint = _read_fingerprint(saved["fingerprint"])
    found = _Header(fingerprint, salt, *place, saved["text"] == "tokens", sums)
    lengths = found.lengths
    if start + sum(lengths.values()) != file_size:
        raise DamagedRun(f"the file must have {start + sum(lengths.values())} bytes, got {file_size}")
    if found.to_bytes() != data[:start]:
        raise DamagedRun("the header is not written as this format writes it")
    if (end := file_size - lengths["pages"]) > MAX_HEAD:
        raise DamagedRun(f"a head has at most {MAX_HEAD} bytes, got {end}")
    return found, end


def _digest_of(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != DIGEST_BYTES or digest.hex() != text:
        raise DamagedRun(f"a digest has {DIGEST_BYTES} bytes in lower case, got {text[:80]!r}")
    return digest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise DamagedRun("a name occurs twice in the header")
    return dict(pairs)


def _no_constant(text: str) -> NoReturn:
    raise DamagedRun(f"the header has a {text}")
