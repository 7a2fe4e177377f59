"""Index objects: the heads of many runs of a folder, in one object. Bytes: docs/store-format.md.

They save a request for each run, but are not trusted: each run is checked by its own head when it is read.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from kvloom.store.backends import Backend, Stored
from kvloom.store.digests import DIGEST_BYTES
from kvloom.store.format import DamagedRun, OtherFormat
from kvloom.store.index import IndexEntry
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


class IndexedStore(Protocol):
    """The part of a store that its index objects need."""

    sums: Sums

    def connected(self) -> Backend:
        """Backend with the store's objects."""

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
                data = bytes(store.connected().get_ranges(x.name, [(0, x.size)]))
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
                backend.put_if_absent(name, [data])
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
