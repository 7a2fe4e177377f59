"""Consecutive tokens in storage that grows: what layers that keep tokens as they came are made of.

Letters: B sequences, H key/value heads, n columns, Q new ones, Dk and Dv head dims.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvloom.caches.memory import outside_inference_mode
from kvloom.errors import StateError

_MIN_COLUMNS = 16


@dataclass(frozen=True)
class Columns:
    """Keys ``[B, H, n, Dk]`` and values ``[B, H, n, Dv]``; what changes them returns others.

    Those returned share the storage where they can. Tokens are written behind the last column only, so what
    an append that failed has written is nobody's, and a view stays as it was until ``truncate``. Storage
    grows by half, so that appending n tokens one by one moves O(n) columns and allocates O(log n) times.

    Attributes:
        limit: Columns of storage that are not exceeded while fewer tokens are held; ``None`` for no limit.
        tensors: The storage.
        start: First column.
        end: Behind the last one.
    """

    limit: int | None = None
    tensors: tuple[Tensor, Tensor] | None = None
    start: int = 0
    end: int = 0

    def __len__(self) -> int:
        return self.end - self.start

    def __getstate__(self) -> dict[str, Any]:
        """To be saved: what is held and no more."""
        held = None if self.tensors is None else tuple(x.clone() for x in self.view(len(self)))
        return {"limit": self.limit, "tensors": held, "start": 0, "end": len(self)}

    @property
    def capacity(self) -> int:
        """Columns allocated."""
        return 0 if self.tensors is None else self.tensors[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self.tensors is None else sum(x.nbytes for x in self.tensors)

    def append(self, key: Tensor, value: Tensor) -> "Columns":
        """With ``[B, H, Q, D]`` behind the last column."""
        end, held = self.end + key.shape[2], self
        if self.tensors is None or end > self.capacity:
            capacity = max(self.capacity + self.capacity // 2, _MIN_COLUMNS)
            if self.limit is not None:
                capacity = min(capacity, self.limit)
            held = self._moved(key, value, max(len(self) + key.shape[2], capacity))
        start, end = held.end, held.end + key.shape[2]
        for target, new in zip(held.tensors or (), (key, value), strict=True):
            target[:, :, start:end] = new
        return replace(held, end=end)

    def view(self, count: int) -> tuple[Tensor, Tensor]:
        """The last ``count`` columns, views of the storage."""
        if self.tensors is None:
            raise StateError("no tokens were stored yet")
        key, value = (x[:, :, self.end - count : self.end] for x in self.tensors)
        return key, value

    def drop_front(self, count: int) -> "Columns":
        """Without the first ``count`` columns."""
        return replace(self, start=self.start + count)

    def truncate(self, count: int) -> "Columns":
        """The first ``count`` columns; those appended next overwrite the others."""
        return replace(self, end=self.start + count)

    def take(self, rows: Tensor) -> "Columns":
        """Row i is what row ``rows[i]`` was, in a new storage."""
        if self.tensors is None:
            return self
        key, value = (x.index_select(0, rows) for x in self.view(len(self)))
        return Columns(self.limit)._moved(key, value, self.capacity).append(key, value)

    def _moved(self, key: Tensor, value: Tensor, capacity: int) -> "Columns":
        """In the front of a new storage of the shapes of ``key`` and ``value``."""
        count = len(self)
        with outside_inference_mode():
            new = tuple(x.new_empty((*x.shape[:2], capacity, x.shape[3])) for x in (key, value))
        if count:
            for target, source in zip(new, self.view(count), strict=True):
                target[:, :, :count] = source
        return Columns(self.limit, (new[0], new[1]), 0, count)
