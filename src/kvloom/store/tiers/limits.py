"""Limits of a store: eviction before something is written, and marks of evicted runs."""

import errno
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from kvloom.store.backends import Backend, Stored
from kvloom.store.digests import DIGEST_BYTES
from kvloom.store.format import DamagedRun
from kvloom.store.names import ObjectKind, kind_of, mark_name, position_of, quarantine_name
from kvloom.store.sums import PLAIN, Sums
from kvloom.store.tiers.heads import head_of

_LAST: Final = {ObjectKind.PROBE: 2, ObjectKind.INDEX: 1, ObjectKind.QUARANTINED: -1}
"""Order of eviction of kinds, where runs and marks have 0."""
_UNSEEN: Final = 64
"""Divisor of a limit: a process lists the store again after writing that part of it."""
_MOST_OTHERS: Final = 16
"""Largest number of processes that are expected to write as much as this one."""
_AGE_SECONDS: Final = 10.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Eviction(NamedTuple):
    """Mark of an evicted run.

    Attributes:
        time: Time of the eviction, in seconds since 1970.
        digests: Digests of all tokens up to the end of each page.
    """

    time: float
    digests: tuple[bytes, ...]


def too_many(
    objects: Collection[Stored], now: float, max_bytes: int | None, max_age: float | None
) -> list[Stored]:
    """Objects to remove so that limits hold; only objects with names by kvloom count.

    Args:
        objects: All objects of a store.
        now: Seconds since 1970.
        max_bytes: Maximum bytes of all; the least recently used are evicted first.
        max_age: Maximum seconds since the last use.
    """
    kinds = {x: kind for x in objects if (kind := kind_of(x.name)) is not None}
    total = sum(x.size for x in kinds)
    is_full = max_bytes is not None and total > max_bytes
    if not is_full and (max_age is None or all(now - x.used <= max_age for x in kinds)):
        return []
    victims = []
    for x in sorted(kinds, key=lambda x: _worth(x, kinds[x])):
        is_old = max_age is not None and now - x.used > max_age and kinds[x] is not ObjectKind.PROBE
        if is_old or (max_bytes is not None and total > max_bytes):
            total -= x.size
            victims.append(x)
    return victims


def evict(backend: Backend, x: Stored, now: float, sums: Sums = PLAIN) -> tuple[bool, Stored | None]:
    """Remove an object, unless it has the name of a run but cannot be read as one.

    Returns:
        Whether it was removed, and the mark of a run, which is itself an object that can be evicted.
    """
    run = None
    if kind_of(x.name) is ObjectKind.RUN:
        try:
            run, _ = head_of(backend, x, sums)
        except FileNotFoundError:
            return True, None
        except (DamagedRun, PermissionError):  # of another format, or of another user
            return False, None
    try:
        backend.delete(x.name)
    except PermissionError:
        return False, None
    if run is None:
        return True, None
    name = mark_name(x.name)
    try:
        backend.delete(name)  # the mark of an earlier eviction
        backend.put_if_absent(name, [*run.digests])
    except PermissionError:  # marks of another user
        return True, None
    return True, Stored(name, len(run.digests) * DIGEST_BYTES, now)


def quarantine(backend: Backend, name: str) -> None:
    """Move a damaged object to the quarantine, where it is not found but can be examined."""
    with suppress(FileNotFoundError):  # another process moved it
        backend.rename(name, quarantine_name(name))


def evictions(backend: Backend, objects: Iterable[Stored], folder: str) -> list[Eviction]:
    """Marks of the evicted runs of one fingerprint.

    Args:
        backend: Backend of the store.
        objects: All objects of the store.
        folder: Folder of the fingerprint.
    """
    found = []
    for x in objects:
        if kind_of(x.name) is ObjectKind.MARK and x.name.startswith(mark_name(f"{folder}/")):
            with suppress(FileNotFoundError, PermissionError):
                data = bytes(backend.get_ranges(x.name, [(0, x.size)])[0])
                digests = (data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES))
                found.append(Eviction(x.used, tuple(digests)))
    return found


def _worth(x: Stored, kind: ObjectKind) -> tuple[int, float, int]:
    """Sort key of eviction: quarantined objects, then the least recently used, later pages of a text first.

    Indexes, which only save time, are evicted after all runs and marks; probes, which identify models, last.
    """
    first = position_of(x.name) if kind in (ObjectKind.RUN, ObjectKind.MARK) else 0
    return _LAST.get(kind, 0), x.used, -first


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

    def holds(self, nbytes: int) -> bool:
        """Whether the limits allow one object of ``nbytes``."""
        return self._max_bytes is None or nbytes <= self._max_bytes

    def make(self, nbytes: int) -> bool:
        """Evict until the limits hold with ``nbytes`` more, unless these alone exceed them.

        Raises:
            OSError: the store fails.
        """
        limit = self._max_bytes
        if not self.holds(nbytes):
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
