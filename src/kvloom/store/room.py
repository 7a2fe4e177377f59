"""Limits of a store: the objects of least worth are evicted before something is written."""

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
"""Part of a limit that a process writes before it looks what others wrote."""
_AGE_SECONDS: Final = 10.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Whether a store has no room left."""
    return error.errno in _FULL


class Room:
    """The limits of one store.

    Args:
        connected: Where its objects lie.
        max_bytes: That they may have in all.
        max_age: Seconds after which an unused one is evicted.
        sums: How runs are summed.
        on_evicted: Is told the name of each object before it is evicted.
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
        self._lasting: set[tuple[str, int]] = set()  # names and sizes of what are no runs that could go
        self._lock = threading.RLock()
        self._num_bytes = self._num_written = 0
        self._listed = float("-inf")
        self._took = 0.0

    def make(self, nbytes: int) -> bool:
        """Let the limits hold when so many bytes more are written, unless these alone are beyond them.

        Raises:
            OSError: the store does not do what that takes.
        """
        limit = self._max_bytes
        if limit is not None and nbytes > limit:
            return False
        if not self.is_limited:
            return True
        with self._lock:
            self._learn(nbytes)
            if limit is not None and self._num_bytes + nbytes <= limit:
                limit = None
            elif limit is not None:
                slack = limit // 16  # so that not each write looks through all objects
                limit = max(limit - nbytes - (slack if slack > 4 * nbytes else 0), 0)
            self._evict(limit, self._max_age)
        return True

    def free(self, nbytes: int) -> None:
        """Remove what is least worth, as many bytes, because there is no room for them."""
        with self._lock:
            self._learn(nbytes)
            self._evict(max(self._num_bytes - 2 * nbytes, 0), None)

    def wrote(self, name: str, nbytes: int) -> None:
        """Note an object that was written."""
        if self.is_limited:
            with self._lock:
                self._num_written += nbytes
                self._add(Stored(name, nbytes, time.time()))

    def used(self, name: str) -> None:
        """Note that an object was used now."""
        with self._lock:
            if name in self._objects:
                self._objects[name] = self._objects[name]._replace(used=time.time())

    def remove(self, name: str) -> None:
        """Forget an object."""
        with self._lock:
            known = self._objects.pop(name, None)
            self._num_bytes -= 0 if known is None else known.size

    def after_fork(self) -> None:
        """Go on in a child process, where nobody holds the lock."""
        self._lock = threading.RLock()

    def _add(self, x: Stored) -> None:
        self.remove(x.name)
        if (x.name, x.size) not in self._lasting:
            self._objects[x.name] = x
            self._num_bytes += x.size

    def _learn(self, nbytes: int) -> None:
        """See what others wrote, if that may be much."""
        unseen = self._num_written + nbytes
        is_much = self._max_bytes is not None and unseen * _UNSEEN > self._max_bytes
        if not is_much and time.monotonic() - self._listed < max(_AGE_SECONDS, 20 * self._took):
            return
        began = time.monotonic()
        objects, known = list(self._connected().list_stored()), self._objects
        self._objects = {}
        self._num_bytes = self._num_written = 0
        for x in objects:
            if kind_of(x.name) is not None:
                used = known[x.name].used if x.name in known else x.used  # which the store may not know yet
                self._add(x._replace(used=max(x.used, used)))
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
