"""Keys and values of one attention layer in pages that are taken as a batch grows.

Letters: B sequences, Q new tokens of each, N columns of stored ones, H heads, Dk and Dv head dims.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.batch import PagedBatch
from kvloom.caches.storage import PagedFormat, PagedStorage
from kvloom.caches.stored import Placement, StoredTokens
from kvloom.core.checks import FLOAT_DTYPES, expect
from kvloom.core.indexing import CacheIndex
from kvloom.errors import StateError


class PagedLayer:
    """Keys and values of B sequences, in pages.

    Nothing is allocated before the first ``append``, which fixes B, H, both head dims and the device. Storage
    grows by a quarter, so that appending n tokens moves O(n) bytes in all.

    Args:
        format: How tokens are kept.
        batch: The sequences, shared with the other layers of a cache; sequences of its own if ``None``.
        index: Number of this layer among those that share ``batch``.
    """

    def __init__(self, format: PagedFormat, batch: PagedBatch | None = None, index: int = 0) -> None:
        self.batch = PagedBatch(format) if batch is None else batch
        self.index = index
        self.num_tokens = 0

    @property
    def size(self) -> int:
        """B; 0 before the first ``append``."""
        return self.batch.size

    @property
    def storage(self) -> PagedStorage | None:
        """The tensors of this layer; ``None`` before the first ``append``."""
        return self.batch.storages.get(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales included."""
        return 0 if self.storage is None else self.storage.nbytes

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that one token of one sequence takes, scales included; 0 before the first ``append``."""
        return 0.0 if self.storage is None else self.storage.nbytes_per_token

    def append(self, key: Tensor, value: Tensor) -> StoredTokens:
        """Store new tokens behind the ones that are there.

        Args:
            key: ``[B, H, Q, Dk]`` float32, float16 or bfloat16.
            value: ``[B, H, Q, Dv]``, dtype and device of ``key``.

        Returns:
            The columns that the new tokens' attention reads, themselves included. Valid until the next
            ``append`` or ``truncate``.

        Raises:
            ShapeError: B, H, a head dim or the device differs from the first ``append``; nothing was written.
            OutOfPages: ``max_tokens`` is reached; nothing was written.
        """
        with self.appending(key, value) as tokens:
            return tokens

    @contextmanager
    def appending(self, key: Tensor, value: Tensor) -> Iterator[StoredTokens]:
        """``append``, of which nothing remains if the block raises."""
        rows, heads, num_new, _ = expect("key", key, "B H Q Dk", dtype=FLOAT_DTYPES).values()
        expect("value", value, "B H Q Dv", dtype=key.dtype, device=key.device, B=rows, H=heads, Q=num_new)
        storage = self._storage_for(key, value)
        start, end = self.num_tokens, self.num_tokens + num_new
        self.batch.memory.num_writes += 1
        with self.batch.reserving(rows, end):
            storage.grow(self.batch.num_pages)
            if self.batch.passed is not None and num_new:
                tokens = self._store_beyond_window(key, value, storage, self.batch.passed)
            else:
                storage.store(key, value, self.batch.place(start, end, key.device).slots)
                visible = self.batch.place(start - self.num_columns, end, key.device)
                tokens = StoredTokens(storage.view, visible, self.batch.window)
            yield tokens
        self.batch.storages[self.index] = storage
        self.num_tokens = end

    @property
    def num_columns(self) -> int:
        """N of ``stored``: the tokens that the next one will see."""
        window = self.batch.window
        return self.num_tokens if window is None else min(self.num_tokens, window - 1)

    def replace(self, new: Mapping[int, Tensor]) -> None:
        """Hold these keys (0), values (1) or both, ``[B, H, N, D]``, instead of the columns of ``stored``.

        Without a window N may be another number; then both must be given. Other layers of the batch keep
        theirs.

        Raises:
            OutOfPages: ``max_tokens`` is reached; no token was lost.
            StateError: others have tokens of a step that takes this one's out of the window.
        """
        if self._sequences() is not self.batch:
            raise StateError("keys and values cannot be assigned within a step that other layers have made")
        num_new = next(iter(new.values())).shape[2]
        if self.storage is None:
            self.append(new[0], new[1])
            return
        storage, device = self.storage, self.storage.view.device
        start = self.num_tokens - self.num_columns
        end = start + num_new
        self.batch.memory.num_writes += 1
        self.batch.own_pages()
        with self.batch.reserving(self.batch.size, end):
            storage.grow(self.batch.num_pages)
            storage.replace(new, self.batch.place(start, end, device).own_slots())
        self.num_tokens = end

    def stored(self) -> StoredTokens:
        """The columns that the next token will see.

        Raises:
            StateError: nothing was appended yet.
        """
        storage = self.storage
        if storage is None:
            raise StateError("gather needs a cache to which tokens were appended")
        start = self.num_tokens - self.num_columns
        placement = self._sequences().place(start, self.num_tokens, storage.view.device)
        return StoredTokens(storage.view, placement, self.batch.window)

    def gather(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``stored``, dequantized: keys ``[B, H, N, Dk]`` and values ``[B, H, N, Dv]``."""
        return self.stored().gather(dtype)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of each sequence.

        Raises:
            StateError: there are fewer, or a window has passed what later tokens would see.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise StateError(f"num_tokens must be in [0, {self.num_tokens}], got {num_tokens}")
        if self.batch.size and self.batch.num_columns > num_tokens:
            self.batch.remove([self.batch.num_columns - num_tokens] * self.batch.size)
        self.num_tokens = num_tokens

    def reset(self) -> None:
        """Forget all tokens, the batch and its shapes; the memory is given back."""
        self.num_tokens = 0
        self.batch.clear()

    def _sequences(self) -> PagedBatch:
        """What holds the tokens of this layer: the batch, as it was before a step that others have made."""
        passed = self.batch.passed
        is_behind = passed is not None and passed.size and self.num_tokens <= passed.num_columns
        return passed if passed is not None and is_behind else self.batch

    def _store_beyond_window(
        self, key: Tensor, value: Tensor, storage: PagedStorage, passed: PagedBatch
    ) -> StoredTokens:
        """New tokens fill the window alone: all lie in a storage of this step, the last ones in pages too."""
        rows, num_new, device = key.shape[0], key.shape[2], key.device
        start, end = self.num_tokens, self.num_tokens + num_new
        first = max(start - (self.batch.window or 0) + 1, 0)
        size = end - first
        step = storage.like(size)
        step.grow(rows)
        slots = torch.arange(rows * size, device=device).view(rows, size)
        begin = [first] * rows
        if start > first:
            old, begin = passed.place(first, start, device).slots, passed.first_held(first)
            ops.copy(storage.view, old.flatten(), step.view, slots[:, : start - first].flatten())
        step.store(key, value, slots[:, start - first :])
        for b, column in enumerate(self.batch.first_held(first)):
            target = self.batch.place(column, end, device).slots[b]
            ops.copy(step.view, slots[b, column - first :].contiguous(), storage.view, target)
        empty = torch.tensor(begin, device=device) - first
        index = CacheIndex.offset(slots[:, 0] + empty)
        origins = -empty if any(column > first for column in begin) else None
        return StoredTokens(step.view, Placement(index, size - empty, size, origins), self.batch.window)

    def _storage_for(self, key: Tensor, value: Tensor) -> PagedStorage:
        """The storage of this layer, of the shapes and on the device of new tokens."""
        storage = self.storage
        if storage is None:
            return PagedStorage.of(self.batch.format, key, value, self.batch.format.page_size)
        storage.expect_fits(key, value, self.batch.size or key.shape[0])
        return storage
