"""Threads of a store, which do not keep the process alive, and calls in them that may never return."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

_LOG: Final = logging.getLogger("kvloom.store")
_IDLE_SECONDS: Final = 1.0
"""Seconds after which an idle thread ends."""
_Result = TypeVar("_Result")


def started(run: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread that runs a function; ``None`` if the system has none left."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _LOG.warning("%s did not start: %s", name, error)
        return None
    return thread


class Readers:
    """Pool of daemon threads, started when needed, which do not keep the process alive.

    Args:
        most: Maximum number of threads.
    """

    def __init__(self, most: int = 8) -> None:
        self.most = most
        self._calls: queue.SimpleQueue[tuple[Future[object], Callable[[], object]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_open = 0

    @property
    def is_busy(self) -> bool:
        """Whether all threads are busy, so that the next call must wait."""
        return self._num_open >= self.most

    def submit(self, call: Callable[[], _Result]) -> "Future[_Result]":
        """Run a call in a thread, or at once if the system has none left.

        A call that has not begun can be cancelled.
        """
        future: Future[_Result] = Future()
        with self._lock:
            self._num_open += 1
            self._calls.put((future, call))  # type: ignore[arg-type]
            is_short = self._num_threads < min(self.most, self._num_open)
            self._num_threads += is_short
        if is_short and started(self._run, "kvloom-read") is None:
            with self._lock:
                self._num_threads -= 1
                is_alone = not self._num_threads
            if is_alone:
                self._next(0.0)
        return future

    def _run(self) -> None:
        while True:
            if not self._next(_IDLE_SECONDS):
                with self._lock:
                    if self._calls.empty():
                        self._num_threads -= 1
                        return

    def _next(self, timeout: float) -> bool:
        """Make the next call; returns whether there was one within ``timeout`` seconds."""
        try:
            future, call = self._calls.get(timeout=timeout)
        except queue.Empty:
            return False
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:  # raised in the waiting thread
                future.set_exception(error)
        with self._lock:
            self._num_open -= 1
        return True
