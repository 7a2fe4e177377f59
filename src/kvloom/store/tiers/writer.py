"""Thread that writes runs in the background."""

import logging
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from kvloom.store.format import Run
from kvloom.store.tiers.readers import started
from kvloom.store.tiers.tier import Tier

_LOG: Final = logging.getLogger("kvloom.store")
_LOWEST_PRIORITY: Final = 19
EXIT_SECONDS: Final = 30.0
"""Maximum seconds that the end of a process waits."""


class Write(NamedTuple):
    """Run to write.

    Attributes:
        run: The run.
        data: Its pages.
        tiers: Stores to write it to.
        before: Runs of the text before it in each store with limits, which count as used when it is written.
    """

    run: Run
    data: bytearray | memoryview
    tiers: Sequence[Tier]
    before: Sequence[tuple[Tier, Sequence[str]]] = ()


class Writer:
    """Thread that writes runs in order; it starts with the first."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued, self._is_closed = max_queued, False
        self.after_fork()

    def after_fork(self) -> None:
        """Continue in a child process without the thread; the parent writes the queue."""
        self._queue: deque[Write] = deque()
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._digests: Counter[bytes] = Counter()
        self._thread: threading.Thread | None = None

    @property
    def num_queued(self) -> int:
        """Number of runs that are not written yet."""
        return len(self._queue)

    def has(self, digest: bytes) -> bool:
        """Whether a page that ends with this digest is in the queue."""
        return digest in self._digests

    def has_room(self, nbytes: int) -> bool:
        return not self._is_closed and self._num_bytes + nbytes <= self._max_queued

    def put(self, write: Write) -> bool:
        """Queue a run; returns false if there is no room, or no thread to write it."""
        with self._changed:
            if not self.has_room(len(write.data)):
                return False
            self._thread = self._thread or started(self._run, "kvloom-store")
            if self._thread is None:
                return False
            self._queue.append(write)
            self._num_bytes += len(write.data)
            self._digests.update(write.run.digests)
            self._changed.notify_all()
        return True

    def flush(self, timeout: float | None) -> bool:
        """Wait until the queue is empty."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: not self._queue, timeout))

    def close(self, timeout: float | None = EXIT_SECONDS) -> bool:
        """Accept no more runs, and wait for the queue; returns whether all is written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is threading.current_thread():  # it collected the store, and writes all before it ends
            return False
        if thread is not None:
            thread.join(timeout)
        if self._queue:
            _LOG.warning("%d runs were not written in %s seconds", len(self._queue), timeout)
        return not self._queue

    def _run(self) -> None:
        _give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                write = self._queue[0]
            try:
                for tier in write.tiers:
                    tier.put(write.run, write.data)
                for tier, names in write.before:
                    tier.used(names)
            except Exception:  # without the thread the queue would fill up
                _LOG.exception("a run was not written")
            with self._changed:
                self._queue.popleft()
                self._num_bytes -= len(write.data)
                self._digests -= Counter(write.run.digests)
                self._changed.notify_all()


def _give_way() -> None:
    """Lower this thread's priority, so that it uses only idle processors."""
    if sys.platform == "linux":  # elsewhere priorities are per process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
