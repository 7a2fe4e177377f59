"""A store in memory that knows the most bytes that it ever had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvloom.store.backends.memory import MemoryBackend


class Watched(MemoryBackend):
    """Looks at all that it has whenever something was put."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    @property
    def nbytes(self) -> int:
        return sum(x.size for x in self.list_stored())

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        is_new = super().put_if_absent(name, parts)
        self.most = max(self.most, self.nbytes)
        return is_new


@contextmanager
def watched_store(name: str) -> Iterator[tuple[str, Watched]]:
    """The URL of such a store, and itself."""
    url = f"memory://{name}"
    MemoryBackend._shared[url] = made = Watched()
    try:
        yield url, made
    finally:
        del MemoryBackend._shared[url]
