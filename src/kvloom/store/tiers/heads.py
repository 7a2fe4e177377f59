"""Heads of a store's runs: reading and caching."""

import threading
from collections import OrderedDict
from typing import Final

from kvloom.store.backends import Backend, Stored
from kvloom.store.format import DamagedRun, Run, head_size, read_head
from kvloom.store.sums import PLAIN, Sums

FIRST_READ: Final = 64 << 10
"""Number of first bytes that contain the heads of most runs."""
_KEPT: Final = 16 << 20
"""Bytes of cached heads: those of 4 GB of runs, if pages have half a megabyte."""


class Heads:
    """Cache of checked heads: one with the same bytes needs no second check. Thread-safe."""

    def __init__(self, max_bytes: int = _KEPT, sums: Sums = PLAIN) -> None:
        self._max_bytes, self._sums = max_bytes, sums
        self._num_bytes = 0
        self._kept: OrderedDict[str, tuple[bytes, Run]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, head: bytes, run: Run) -> None:
        """Cache a run that ``read_head`` parsed from ``head``, which has nothing after it."""
        with self._lock:
            self._remove(run.name)
            self._kept[run.name] = head, run
            self._num_bytes += len(head)
            while self._num_bytes > self._max_bytes:
                self._remove(next(iter(self._kept)))

    def read(self, name: str, head: bytes, file_size: int) -> Run:
        """Run of a file with this name, from its ``head``, which has nothing after it.

        Raises:
            DamagedRun: it is no run, or one of another name.
        """
        with self._lock:
            kept, run = self._kept.get(name, (b"", None))
            if run is not None and kept == head and len(head) + run.data_bytes == file_size:
                self._kept.move_to_end(name)
                return run
        run, start = read_head(head, file_size, self._sums)
        if start != len(head) or run.name != name:
            raise DamagedRun("the head is not the one of this name")
        self.keep(head, run)
        return run

    def _remove(self, name: str) -> None:
        head, _ = self._kept.pop(name, (b"", None))
        self._num_bytes -= len(head)


def head_of(backend: Backend, x: Stored, sums: Sums = PLAIN) -> tuple[Run, int]:
    """Read the head of an object with as few bytes as possible: its run, and the start of its pages.

    Raises:
        DamagedRun: the object is no run.
        FileNotFoundError: it was removed.
    """
    (first,) = backend.get_ranges(x.name, [(0, min(x.size, FIRST_READ))])
    return head_from(bytes(first), backend, x, sums)


def head_from(data: bytes, backend: Backend, x: Stored, sums: Sums) -> tuple[Run, int]:
    """``head_of``, given the first bytes of a file.

    Raises:
        DamagedRun: as ``head_of``.
        FileNotFoundError: the same.
    """
    while (size := head_size(data, x.size, sums)) > len(data):
        rest = bytes(backend.get_ranges(x.name, [(len(data), size)])[0]) if size <= x.size else b""
        if not rest:
            raise DamagedRun(f"the head ends at byte {size}, the file at {min(x.size, len(data))}")
        data += rest
    return read_head(data, x.size, sums)
