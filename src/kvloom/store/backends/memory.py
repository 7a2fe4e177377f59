"""Backend in this process's memory, shared by name: ``memory://name``."""

import threading
import time
from collections.abc import Sequence
from typing import ClassVar

from kvloom.store.backends import Stored


class MemoryBackend:
    """``Backend`` in a dict, without copies: parts are kept, and ranges are views that cannot be written."""

    _shared: ClassVar[dict[str, "MemoryBackend"]] = {}

    def __init__(self) -> None:
        self._objects: dict[str, tuple[list[bytes | bytearray], float]] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_url(cls, url: str) -> "MemoryBackend":
        """Backend with this name; a new one for ``memory://``."""
        return cls() if url == "memory://" else cls._shared.setdefault(url, cls())

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        try:
            parts, _ = self._objects[name]
        except KeyError:
            raise FileNotFoundError(name) from None
        return [_between(parts, start, end) for start, end in ranges]

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        kept = [bytearray(x) if isinstance(x, memoryview) else x for x in parts]  # a view has more behind it
        with self._lock:
            if name in self._objects:
                return False
            self._objects[name] = kept, time.time()
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
        return [
            Stored(name, sum(map(len, parts)), used)
            for name, (parts, used) in found
            if name.startswith(prefix)
        ]

    def version(self, prefix: str) -> float | None:
        """``None``: changes are not recorded."""


def _between(parts: Sequence[bytes | bytearray], start: int, end: int) -> memoryview:
    """Bytes of an object: a view if one part has all of them, else a copy."""
    found, at = list[memoryview](), 0
    for part in parts:
        found.append(memoryview(part).toreadonly()[max(start - at, 0) : max(end - at, 0)])
        at += len(part)
    found = [x for x in found if x]
    return found[0] if len(found) == 1 else memoryview(bytearray().join(found))
