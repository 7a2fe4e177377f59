"""Backend in this process's memory, shared by name: ``memory://name``. For tests, and as an example."""

import threading
import time
from typing import ClassVar

from kvloom.store.backends import Stored


class MemoryBackend:
    """``Backend`` in a dict."""

    _shared: ClassVar[dict[str, "MemoryBackend"]] = {}

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_url(cls, url: str) -> "MemoryBackend":
        """Backend with this name; a new one for ``memory://``."""
        return cls() if url == "memory://" else cls._shared.setdefault(url, cls())

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> memoryview:
        try:
            data, _ = self._objects[name]
        except KeyError:
            raise FileNotFoundError(name) from None
        return memoryview(bytearray().join(data[start:end] for start, end in ranges))

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        data = b"".join(parts)
        with self._lock:
            if name in self._objects:
                return False
            self._objects[name] = data, time.time()
        return True

    def touch(self, name: str) -> None:
        with self._lock:
            if name in self._objects:
                self._objects[name] = self._objects[name][0], time.time()

    def delete(self, name: str) -> None:
        self._objects.pop(name, None)

    def rename(self, name: str, to: str) -> None:
        with self._lock:
            if name not in self._objects:
                raise FileNotFoundError(name)
            self._objects[to] = self._objects.pop(name)

    def list_stored(self, prefix: str = "") -> list[Stored]:
        with self._lock:
            found = list(self._objects.items())
        return [Stored(name, len(data), used) for name, (data, used) in found if name.startswith(prefix)]

    def version(self, prefix: str) -> float | None:
        """``None``: changes are not recorded."""
