"""Limits of a store: objects are evicted before something is written."""

import errno
import threading
import time
from collections.abc import Callable
from typing import Final

from kvloom.store.backends import Backend, Stored
from kvloom.store.limits import evict, too_many
from kvloom.store.names import kind_of
from kvloom.store.sums import Sums

_UNSEEN: Final = 64
"""Divisor of a limit: a process lists the store again after writing that part of it."""
_MOST_OTHERS: Final = 16
"""Largest number of processes that are expected to write as much as this one."""
_AGE_SECONDS: Final = 10.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Whether an error says that a store has no room."""
    return error.errno in _FULL


class Room:
    """The limits of one store.

    Args:
        connected: Function that returns the backend.
        max_bytes: Maximum bytes of all objects.
        max_age: Seconds after which an unused object is evicted.
        sums: Method of the runs' checksums.
        on_evicted: Called with the name of each object before it is evicted.
    """

    def __init__(
        self,
        connected: Callable[[], Backend],
        max_bytes: int | None,
        max_age: float | None,
        sums: Sums,
        on_evicted: Callable[[str], None],
    ) -> None:
        self.is_limited = max_bytes is not None or max_age is not None
        self._connected, self._sums, self._on_evicted = connected, sums, on_evicted
        self._max_bytes, self._max_age = max_bytes, max_age
        self._objects: dict[str, Stored] = {}
        self._lasting: set[tuple[str, int]] = set()  # names and sizes of objects that cannot be evicted
        self._lock = threading.RLock()
        self._num_bytes = self._num_written = 0
        self._rate = 0.0  # bytes that others wrote for each byte of this process, between the last listings
        self._listed = float("-inf")
        self._took = 0.0

    def make(self, nbytes: int) -> bool:
        """Evict until the limits hold with ``nbytes`` more, unless these alone exceed them.

        Raises:
            OSError: the store fails.
        """
        limit = self._max_bytes
        if limit is not None and nbytes > limit:
            return False
        if not self.is_limited:
            return True
        with self._lock:
            self._learn(nbytes)
            unseen = round(self._rate * (self._num_written + nbytes))
            if limit is not None and self._num_bytes + nbytes + unseen <= limit:
                limit = None
            elif limit is not None:
                slack = limit // 16  # so that not every write scans all objects
                limit = max(limit - nbytes - unseen - (slack if slack > 4 * nbytes else 0), 0)
            self._evict(limit, self._max_age)
        return True

    def free(self, nbytes: int) -> None:
        """Evict ``nbytes`` bytes, because the store is full."""
        with self._lock:
            self._learn(nbytes)
            self._evict(max(self._num_bytes - 2 * nbytes, 0), None)

    def wrote(self, name: str, nbytes: int) -> None:
        """Record an object that was written."""
        if self.is_limited:
            with self._lock:
                self._num_written += nbytes
                self._add(Stored(name, nbytes, time.time()))

    def used(self, name: str) -> None:
        """Record that an object was used now."""
        with self._lock:
            if name in self._objects:
                self._objects[name] = self._objects[name]._replace(used=time.time())

    def remove(self, name: str) -> None:
        """Forget an object."""
        with self._lock:
            known = self._objects.pop(name, None)
            self._num_bytes -= 0 if known is None else known.size

    def after_fork(self) -> None:
        """Continue in a child process, with a new lock."""
        self._lock = threading.RLock()

    def _add(self, x: Stored) -> None:
        self.remove(x.name)
        if (x.name, x.size) not in self._lasting:
            self._objects[x.name] = x
            self._num_bytes += x.size

    def _learn(self, nbytes: int) -> None:
        """List what other processes wrote, if it may be much."""
        unseen = self._num_written + nbytes
        is_much = self._max_bytes is not None and unseen * _UNSEEN > self._max_bytes
        if not is_much and time.monotonic() - self._listed < max(_AGE_SECONDS, 20 * self._took):
            return
        began = time.monotonic()
        objects, known = list(self._connected().list_stored()), self._objects
        own, unseen = self._num_written, 0
        self._objects = {}
        self._num_bytes = self._num_written = 0
        for x in objects:
            if kind_of(x.name) is not None:
                unseen += 0 if x.name in known else x.size
                used = known[x.name].used if x.name in known else x.used  # maybe not yet recorded
                self._add(x._replace(used=max(x.used, used)))
        self._rate = min(unseen / own, _MOST_OTHERS) if own else self._rate
        self._listed = time.monotonic()
        self._took = self._listed - began

    def _evict(self, max_bytes: int | None, max_age: float | None) -> None:
        while victims := too_many(self._objects.values(), time.time(), max_bytes, max_age):
            for x in victims:
                self._on_evicted(x.name)
                is_gone, mark = evict(self._connected(), x, time.time(), self._sums)
                self.remove(x.name)
                if not is_gone:
                    self._lasting.add((x.name, x.size))
                if mark is not None:
                    self._add(mark)
