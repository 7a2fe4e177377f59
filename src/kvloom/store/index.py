"""Index of a folder's runs by the digests of their pages, to find those that continue a text.

An index object has the heads of many runs of a folder, which saves a request for each. Index objects are not
trusted: each run is checked by its own head when it is read. Bytes: docs/store-format.md.
"""

import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

from kvloom.store.backends import Backend, Stored
from kvloom.store.digests import DIGEST_BYTES, TextDigests
from kvloom.store.fingerprint import Fingerprint
from kvloom.store.format import MAX_HEAD, DamagedRun, OtherFormat, Run, page_bytes
from kvloom.store.names import index_name, run_name
from kvloom.store.sums import SUM_BYTES, Sums

MAX_RUNS: Final = 4096
"""Maximum number of runs of one index object."""
_MAX_BYTES: Final = 256 << 20
_FEW: Final = 128
"""Number of runs without an index object from which on one is written."""
_MOST_SMALL: Final = 8
"""Number of less than half full index objects from which on they are merged."""
_ANY_FORMAT: Final = b"kvloom-index/"
_FORMAT: Final = _ANY_FORMAT + b"1\n\0"
_COUNT: Final = struct.Struct("<I")
_RUN: Final = struct.Struct("<QIIQI")
"""Record of a run: first token, page size, pages, bytes of the run, bytes of its head."""


class IndexEntry(NamedTuple):
    """A run that can be read.

    Attributes:
        name: Name of its object.
        size: Bytes of the object.
        head_size: Bytes of its head.
        first: Position of the first token.
        page_size: Tokens in a page.
        digests: Digests of the text up to the end of each page.
    """

    name: str
    size: int
    head_size: int
    first: int
    page_size: int
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, run: Run, head_size: int) -> "IndexEntry":
        """Entry of a run."""
        size = head_size + run.data_bytes
        return cls(run.name, size, head_size, run.first, run.page_size, run.digests)

    def may_be_of(self, fingerprint: Fingerprint) -> bool:
        """Whether these sizes are possible for a run of a fingerprint."""
        pages = fingerprint.num_heads * len(self.digests) * page_bytes(fingerprint, self.page_size)
        return self.head_size <= MAX_HEAD and self.head_size + pages == self.size


Entry = IndexEntry
"""Its name in earlier releases."""


class Segment(NamedTuple):
    """Pages of one run that continue a text, from the page with token ``start`` to token ``end``."""

    entry: IndexEntry
    start: int
    end: int

    @property
    def pages(self) -> range:
        """Numbers of the pages in the run."""
        first, size = self.entry.first, self.entry.page_size
        return range((self.start - first) // size, (self.end - first) // size)


class Index:
    """Runs of one fingerprint, by the digest at the end of each page. Not thread-safe."""

    def __init__(self) -> None:
        self.entries: dict[str, IndexEntry] = {}
        self._ends: dict[bytes, tuple[tuple[str, int], ...]] = {}  # runs with each digest, and its page
        self._page_sizes: dict[int, int] = {}
        self._single = Counter[int]()  # ends of pages of one token, which are few and at the end of texts

    def __contains__(self, digest: bytes) -> bool:
        """Whether a page ends with this digest."""
        return digest in self._ends

    def add(self, entry: IndexEntry) -> None:
        """Add a run."""
        if entry.name in self.entries:
            return
        self.entries[entry.name] = entry
        self._page_sizes[entry.page_size] = self._page_sizes.get(entry.page_size, 0) + 1
        self._single.update(_single_ends(entry))
        for i, digest in enumerate(entry.digests, 1):
            place = (entry.name, entry.first + i * entry.page_size)
            self._ends[digest] = (*self._ends.get(digest, ()), place)

    def remove(self, name: str) -> None:
        """Remove a run, if it is known."""
        entry = self.entries.pop(name, None)
        if entry is None:
            return
        self._page_sizes[entry.page_size] -= 1
        self._single -= Counter(_single_ends(entry))
        for digest in entry.digests:
            others = tuple(place for place in self._ends.pop(digest, ()) if place[0] != name)
            if others:
                self._ends[digest] = others

    def find(self, prefixes: TextDigests, start: int, num_tokens: int) -> list[Segment]:
        """Fewest consecutive segments that reach furthest from ``start``.

        Args:
            prefixes: Digests of the text.
            start: Number of tokens that are available already.
            num_tokens: Number of tokens of the text.
        """
        sizes = [size for size, count in self._page_sizes.items() if count and size != 1]
        reached: dict[str, int] = {}  # end reached by each run that has a page of this text
        digests, i = _digests(prefixes, sizes, start, num_tokens), 0
        while i < len(digests):
            runs = self._ends.get(digests[i], ())
            if not runs and len(sizes) == 1:
                break  # no run has this page, so none reaches beyond it
            reached.update(runs)
            i += 1
            if len(runs) == len(sizes) == 1:
                i += self._follow(reached, runs[0][0], digests, i)
        for digest in prefixes.digests(sorted(end for end in self._single if start < end <= num_tokens)):
            reached.update(self._ends.get(digest, ()))
        return self._chain(reached, start)

    def _chain(self, reached: dict[str, int], start: int) -> list[Segment]:
        """Fewest segments of runs, given the end that each reaches, without a gap from ``start`` on."""
        found, entries = list[Segment](), self.entries
        at, best, end = start, None, start
        for entry in sorted(map(entries.__getitem__, reached), key=attrgetter("first")):
            if entry.first > at and best is not None:
                found.append(Segment(best, at, end))
                at, best = end, None
            if entry.first > at:
                return found
            if reached[entry.name] > end:
                best, end = entry, reached[entry.name]
        return found if best is None else [*found, Segment(best, at, end)]

    def _follow(self, reached: dict[str, int], name: str, digests: Sequence[bytes], i: int) -> int:
        """Reach the end of a run that alone has the page before ``i``, if the text continues with all of it.

        Returns:
            Number of pages. Runs that begin within these and end before the last reach no further.
        """
        entry = self.entries[name]
        rest = entry.digests[(reached[name] - entry.first) // entry.page_size :]
        if not rest or digests[i : i + len(rest)] != rest:
            return 0
        reached[name] = entry.first + len(entry.digests) * entry.page_size
        return len(rest)


def _single_ends(entry: IndexEntry) -> range:
    """Ends of the pages of a run whose pages have one token; else empty."""
    return range(entry.first + 1, entry.first + len(entry.digests) + 1 if entry.page_size == 1 else 0)


def _digests(prefixes: TextDigests, sizes: list[int], start: int, num_tokens: int) -> Sequence[bytes]:
    """Digests of prefixes that end after ``start`` with a page of one of these sizes, ascending."""
    if len(sizes) == 1:
        return prefixes.pages(sizes[0], start // sizes[0] * sizes[0], num_tokens)
    ends = {end for size in sizes for end in range(size, num_tokens + 1, size) if end > start}
    return prefixes.digests(sorted(ends))


class IndexedStore(Protocol):
    """The part of a store that its index objects need."""

    sums: Sums

    def connected(self) -> Backend:
        """Backend with the store's objects."""

    def write(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool | None:
        """Write an object within the store's limits."""

    def damaged(self, name: str, why: str) -> None:
        """Quarantine an object."""

    def left_out(self, name: str, why: Exception) -> None:
        """Record an object that has another format or may not be read."""


class IndexObjects:
    """Index objects of one folder, each of which is read once.

    Args:
        folder: Name of the folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._runs: dict[str, frozenset[str]] = {}  # runs of each object

    def read(
        self, store: IndexedStore, objects: Sequence[Stored], rest: Callable[[], None]
    ) -> Iterator[IndexEntry]:
        """Read the runs of new index objects; forget removed ones."""
        for gone in self._runs.keys() - {x.name for x in objects}:
            del self._runs[gone]
        for x in objects:
            if x.name in self._runs:
                continue
            try:
                if x.size > _MAX_BYTES:
                    raise DamagedRun(f"an index has at most {_MAX_BYTES} bytes, got {x.size}")
                data = bytes(store.connected().get_ranges(x.name, [(0, x.size)])[0])
                entries = read_index(data, self._folder, store.sums, rest)
            except FileNotFoundError:
                continue
            except (OtherFormat, PermissionError) as error:
                store.left_out(x.name, error)
                continue
            except DamagedRun as error:
                store.damaged(x.name, str(error))
                continue
            self._runs[x.name] = frozenset(entry.name for entry in entries)
            yield from entries

    def tidy(self, store: IndexedStore, entries: Mapping[str, IndexEntry], rest: Callable[[], None]) -> None:
        """Write index objects for runs without one, and merge small ones.

        Args:
            store: The store.
            entries: All runs of the folder, by name.
            rest: Called between pieces of work.

        Raises:
            OSError: the store cannot be written.
        """
        backend = store.connected()
        live = {name: len(runs & entries.keys()) for name, runs in self._runs.items()}
        stale = [name for name, count in live.items() if count < MAX_RUNS // 2]
        if len(stale) <= _MOST_SMALL:
            stale = [name for name in stale if not live[name]]
        covered = {run for name, runs in self._runs.items() if name not in stale for run in runs}
        new = [entry for run, entry in entries.items() if run not in covered]
        written: set[str] = set()
        if len(new) >= _FEW or len(stale) > _MOST_SMALL:
            for at in range(0, len(new), MAX_RUNS):
                some = new[at : at + MAX_RUNS]
                data = write_index(some, store.sums, rest)
                name = index_name(self._folder, store.sums.checksum(data))
                if store.write(name, [data]) is None:
                    return
                self._runs[name] = frozenset(entry.name for entry in some)
                written.add(name)
        for name in set(stale) - written:  # the merged object may equal one of them
            backend.delete(name)
            del self._runs[name]


def write_index(entries: Sequence[IndexEntry], sums: Sums, rest: Callable[[], None]) -> bytes:
    """Bytes of an index of at most ``MAX_RUNS`` runs of one folder."""
    parts = [_FORMAT, _COUNT.pack(len(entries))]
    for x in entries:
        parts.append(_RUN.pack(x.first, x.page_size, len(x.digests), x.size, x.head_size))
    for x in entries:
        parts.append(b"".join(x.digests))
        rest()
    data = b"".join(parts)
    return data + sums.checksum(data)


def read_index(data: bytes, folder: str, sums: Sums, rest: Callable[[], None]) -> list[IndexEntry]:
    """Parse an index of a folder.

    Raises:
        OtherFormat: the index has a format that this release does not support.
        DamagedRun: the bytes are no index.
    """
    if data.startswith(_ANY_FORMAT) and not data.startswith(_FORMAT):
        raise OtherFormat(f"the format must be {_FORMAT!r}, got {data[:40]!r}")
    at = len(_FORMAT) + _COUNT.size
    if len(data) < at + SUM_BYTES or not data.startswith(_FORMAT):
        raise DamagedRun(f"an index begins with {_FORMAT!r}, got {data[: len(_FORMAT)]!r}")
    if sums.checksum(memoryview(data)[:-SUM_BYTES]) != data[-SUM_BYTES:]:
        raise DamagedRun("the index does not have its checksum")
    (count,) = _COUNT.unpack_from(data, len(_FORMAT))
    digests_at = at + count * _RUN.size
    if digests_at > len(data):
        raise DamagedRun(f"{count} runs are not in {len(data)} bytes")
    runs = [_RUN.unpack_from(data, at + i * _RUN.size) for i in range(count)]
    if digests_at + sum(run[2] for run in runs) * DIGEST_BYTES + SUM_BYTES != len(data):
        raise DamagedRun(f"the digests of {count} runs do not end with {len(data)} bytes")
    entries, at = [], digests_at
    for first, page_size, num_pages, size, head_size in runs:
        end = at + num_pages * DIGEST_BYTES
        digests = tuple(data[i : i + DIGEST_BYTES] for i in range(at, end, DIGEST_BYTES))
        if not digests or page_size < 1:
            raise DamagedRun("a run has no pages")
        name = run_name(folder, digests[-1], first, page_size)
        entries.append(IndexEntry(name, size, head_size, first, page_size, digests))
        at = end
        rest()
    return entries


class Folder:
    """The runs of one fingerprint."""

    def __init__(self, fingerprint: Fingerprint, name: str) -> None:
        self.fingerprint, self.name = fingerprint, name
        self.index, self.objects = Index(), IndexObjects(name)
        self.ignored: set[str] = set()
        self.doubted: set[str] = set()  # runs for which index objects are not trusted
        self.written: set[str] = set()  # runs written since the last listing began, which may miss them
        self.version: float | None = None
        self.must_list = False  # despite an unchanged version
        self.began = self.ended = float("-inf")  # of the last listing, monotonic
        self.num_listed = 0

    @property
    def took(self) -> float:
        """Seconds of the last listing."""
        return self.ended - self.began if self.num_listed else 0.0

    def end(self, began: float) -> None:
        """Record that a listing ended now."""
        self.began, self.ended = began, time.monotonic()
        self.num_listed += 1
