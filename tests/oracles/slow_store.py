"""Stores that take long, and prompts that take as long as a model of some size would."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvloom.store.backends import Stored
from kvloom.store.backends.memory import MemoryBackend

_AGES = 20.0


class Slow(MemoryBackend):
    """A store in memory each of whose requests takes ``seconds``, and waits until ``is_free`` is set.

    Not for ever, so that whoever waits for it is told from whoever does not, and no test hangs.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.num_requests = seconds, 0
        self.is_free = threading.Event()
        self.is_free.set()

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        self._wait()
        return super().get_ranges(name, ranges)

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        self._wait()
        return super().put_if_absent(name, parts)

    def list_stored(self, prefix: str = "") -> list[Stored]:
        self._wait()
        return super().list_stored(prefix)

    def touch(self, name: str) -> None:
        self._wait()
        super().touch(name)

    def _wait(self) -> None:
        self.num_requests += 1
        time.sleep(self.seconds)
        self.is_free.wait(_AGES)


@contextmanager
def slow_store(name: str, seconds: float = 0.0) -> Iterator[tuple[str, Slow]]:
    """The URL of a slow store, and itself."""
    url = f"memory://{name}"
    MemoryBackend._shared[url] = made = Slow(seconds)
    try:
        yield url, made
    finally:
        made.is_free.set()
        del MemoryBackend._shared[url]
