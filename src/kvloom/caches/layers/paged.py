"""Keys and values of one attention layer, in pages that are allocated as sequences grow.

Shapes: B sequences, Q new tokens of each, N columns of stored ones, H heads, Dk and Dv head dims.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvloom.caches.format import CacheFormat, first_seen
from kvloom.caches.layers.changing import Forks
from kvloom.caches.layers.groups import Groups
from kvloom.caches.layers.layer import Layer
from kvloom.caches.layers.paged_steps import (
    held_newest,
    holding,
    store_beyond_window,
    store_exact,
    store_newest,
)
from kvloom.caches.layers.read_only import ReadOnly
from kvloom.caches.rows.pages import Span
from kvloom.caches.rows.placement import advance
from kvloom.caches.rows.sequences import Sequences, reserving
from kvloom.caches.tensors.storage import Storage
from kvloom.caches.tensors.tokens import Tokens
from kvloom.errors import StateError
from kvloom.ops.fast import steps
from kvloom.ops.fast.plain import store_plain
from kvloom.ops.fast.steps import store_step
from kvloom.ops.smoothing import transform_arguments


class PagedLayer(Layer):
    """Keys and values of B sequences, in pages that are allocated as they grow.

    Nothing is allocated before the first update. Storage doubles at first and then grows by a quarter: n
    tokens move O(n) bytes in all. Rows and forks share pages, copy-on-write.

    Args:
        format: Format of the tokens.
        sequences: Sequences that the layers of a cache share; ``None`` for new ones of this layer alone.
        index: Number of this layer among those that share ``sequences``.
        residual: Sequences of its residual window, which the same layers share; ``None`` for new ones, if the
            format has one.

    Attributes:
        residual: The same rows in their residual window, where tokens are unquantized beside their codes;
            ``None`` without one.
        num_removed: Difference between tokens seen and tokens held, after ``keys`` and ``values`` of another
            length were assigned; negative if longer ones were.
        groups: Groups of the layers of its cache: layers with the same number of tokens share sequences.
        is_indexed: Whether its tokens have index keys; then the number of tokens cannot change by assignment.
    """

    sequences: Sequences
    num_tokens: int = 0
    num_removed: int = 0
    is_indexed: bool = False

    def __init__(
        self,
        format: CacheFormat,
        sequences: Sequences | None = None,
        index: int = 0,
        residual: Sequences | None = None,
    ) -> None:
        super().__init__()
        self.sequences = Sequences(format) if sequences is None else sequences
        self.index = index
        self.residual: Sequences | None = None
        if self.format.recent:
            self.residual = self.sequences.of_residual() if residual is None else residual
        self.groups = Groups()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "residual" not in state:  # in files of earlier releases the sequences had it
            self.residual = self.sequences.loaded_residual if self.format.recent else None

    @property
    def all_sequences(self) -> list[Sequences]:
        """The sequences, and those of the residual window."""
        return [self.sequences] if self.residual is None else [self.sequences, self.residual]

    @property
    def size(self) -> int:
        """B; 0 before the first update."""
        return self.sequences.size

    @property
    def format(self) -> CacheFormat:
        """Format of this layer's tokens."""
        return self.sequences.format.of_layer(self.index)

    @property
    def storage(self) -> Storage | None:
        """The tensors of this layer; ``None`` before the first update."""
        return self.sequences.storages.get(self.index)

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens, as ``Layer.update``."""
        num_positions = self.sequences.num_positions
        tokens = self._append_at_once(key, value)
        if tokens is None:
            return super().update(key, value)
        try:
            result = tokens.gather(key.dtype)
        except BaseException:
            _take_back(self.all_sequences, self.size, num_positions)
            raise
        self.num_tokens += key.shape[2]
        return result

    def append(self, key: Tensor, value: Tensor) -> Tokens:
        """Store new tokens, as ``Layer.append``."""
        tokens = self._append_at_once(key, value)
        if tokens is None:
            return super().append(key, value)
        self.num_tokens += key.shape[2]
        return tokens

    @property
    def residual_storage(self) -> Storage | None:
        """The tensors of the residual window of this layer; ``None`` without one."""
        return None if self.residual is None else self.residual.storages.get(self.index)

    def _append_at_once(self, key: Tensor, value: Tensor) -> Tokens | None:
        """Fast path: store new tokens of a step that another layer began, and return what attention reads.

        Only the kernel checks its arguments. For what it refuses, or does not support, nothing is written and
        the result is ``None``; the caller then takes the general path.
        """
        sequences = self.sequences
        step, storage = sequences.step, sequences.pages.storages.get(self.index)
        if step is None or storage is None or self.assignment.waiting is not None:
            return None
        if step.stride != storage.stride or not isinstance(key, Tensor) or key.dtype != self.dtype:
            return None
        if step.start != self.num_tokens:
            return self._advance(key, value) if step.end == self.num_tokens else None
        residual, newest, exact = self.residual, None, None
        if residual is not None:
            newest, exact = residual.step, residual.pages.storages.get(self.index)
            if newest is None or exact is None or newest.stride != exact.stride or newest[:2] != step[:2]:
                return None
        transform, how = storage.transform, ()
        if transform is not None:
            how = transform_arguments(transform[:2], transform.smoothing, step.positions)
        sequences.pages.num_writes += 1
        kept = value if storage.has_values else None
        store = store_step if key.device.type in steps.DEVICES else store_plain
        if not store(key, kept, step.slots, storage.view, storage.full_range, how):
            return None
        read = None
        if newest is not None and exact is not None:
            read = store_exact(exact, key, value, newest, sequences.pages.format.recent)
        return Tokens(storage.view, step.visible, sequences.window, None, transform, read)

    def _advance(self, key: Tensor, value: Tensor) -> Tokens | None:
        """Begin a step of one token that follows from the last step, and store it; ``None`` as above."""
        if key.ndim != 4 or key.shape[2] != 1 or not advance(self.all_sequences):
            return None
        tokens = None
        try:
            tokens = self._append_at_once(key, value)
        finally:
            if tokens is None:
                _take_back(self.all_sequences, self.size, self.num_tokens)
        return tokens

    def _add(self, key: Tensor, value: Tensor, *, is_gathered: bool) -> Any:
        """Make room and store new tokens; if it raises, the room is released."""
        storage, sequences = self.storage, self.sequences
        if storage is None:
            storage = Storage.of(self.format, key, value, self.format.page_size, is_gathered=is_gathered)
        residual, exact = self.residual, self.residual_storage
        if residual is not None and exact is None:
            exact = Storage.of(residual.format, key, value, residual.format.page_size)
        end = self.num_tokens + key.shape[2]
        with reserving(dict.fromkeys(self.all_sequences, end), key.shape[0]):
            sequences.pages.num_writes += 1
            sequences.pages.fit(storage)
            if residual is not None and exact is not None:
                if (residual.begins, residual.num_positions) != (sequences.begins, sequences.num_positions):
                    raise StateError(
                        f"rows of a residual window must end where those of the codes do, after "
                        f"{sequences.num_positions} tokens, got {residual.num_positions}: change both"
                    )
                residual.pages.fit(exact)
            result: Any = self._gather_in_place(storage, key, value) if is_gathered else None
            if result is None:
                tokens = self._store(storage, exact, key, value)
                result = tokens.gather(key.dtype) if is_gathered else tokens
        sequences.storages[self.index] = storage
        if residual is not None and exact is not None:
            residual.storages[self.index] = exact
        self.num_tokens = end
        return result

    def _store(self, storage: Storage, exact: Storage | None, key: Tensor, value: Tensor) -> Tokens:
        """Store new tokens, unquantized in ``exact``, too; return the tokens that attention reads."""
        sequences, start, end = self.sequences, self.num_tokens, self.num_tokens + key.shape[2]
        if sequences.previous is not None and end > start:
            source, visible = store_beyond_window(key, value, storage, sequences, start)
        else:
            first = first_seen(start, sequences.window)
            source, visible = storage, sequences.place(first, end, storage, end - start)
            step = sequences.begin(start, end, storage, visible)
            storage.store(key, value, step.slots, step.positions)
        read, residual = None, self.residual
        if residual is not None and exact is not None:
            read = store_newest(residual, exact, key, value, start, sequences.format.recent)
        return Tokens(source.view, visible, sequences.window, None, storage.transform, read)

    def _gather_in_place(self, storage: Storage, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Store new tokens in rows that attention can read as they are; ``None`` if there are no such."""
        run = self.sequences.run()
        rows = None if run is None else _rows(storage, run, key.dtype)
        if run is None or rows is None:
            return None
        start, end = self.num_tokens, self.num_tokens + key.shape[2]
        for target, new in zip(rows, (key, value), strict=True):
            target.narrow(2, start - run.first, end - start).copy_(new)
        first = first_seen(start, self.window)
        key, value = (x.narrow(2, first - run.first, end - first) for x in rows)
        return key, value

    @property
    def num_columns(self) -> int:
        """n of ``keys``: number of stored tokens that the next one will see."""
        return self.num_tokens - first_seen(self.num_tokens, self.window)

    def replace(self, new: Mapping[int, Tensor]) -> None:
        """Replace all keys (0), values (1) or both by ``[B, H, n, D]``.

        Without a window n may change. Then both must be given, and the layer moves to sequences of the new
        length with pages of their own; the other layers keep theirs.

        Raises:
            OutOfPages: ``max_tokens`` is reached; no token was lost.
            StateError: other layers are a step ahead, which evicted tokens of this layer from the window.
        """
        if holding(self.sequences, self.num_tokens) is not self.sequences:
            raise StateError("keys and values cannot be assigned within a step that other layers have made")
        storage = self.storage
        if storage is None:
            self._add(new[0], new[1], is_gathered=False)
        elif next(iter(new.values())).shape[2] != self.num_columns:
            self._move(new[0], new[1], storage.like(storage.page_size))
        else:
            start = self.num_tokens - self.num_columns
            self.sequences.pages.num_writes += 1
            self.sequences.own_pages()
            index = self.sequences.place(start, self.num_tokens, storage)
            storage.replace(new, index.own_slots(), index.positions())
            if self.residual is not None:
                self.residual.forget()

    def _move(self, key: Tensor, value: Tensor, storage: Storage) -> None:
        """Replace all tokens by these, in an empty storage and in the sequences of their length."""
        old, end = self.sequences, key.shape[2]
        num_removed = self.num_removed + self.num_tokens - end
        new = self.groups.find(old, self.index, end, num_removed)
        residual = None if self.residual is None else self.groups.residual_of(new)
        with reserving(dict.fromkeys([new] if residual is None else [new, residual], end), old.size):
            new.pages.num_writes += 1
            new.pages.fit(storage)
            index = new.place(0, end, storage)
            storage.store(key, value, index.slots, index.positions())
        new.storages[self.index] = storage
        self.groups.move(self.all_sequences, new, self.index, end, num_removed)
        self.sequences, self.num_tokens, self.num_removed = new, end, num_removed
        self.residual = residual
        if residual is not None:
            residual.forget()

    def stored(self) -> Tokens:
        """Tokens of ``keys`` and ``values``, not gathered.

        Raises:
            StateError: before the first update.
        """
        storage = self.storage
        if storage is None:
            raise StateError("gather needs a cache to which tokens were appended")
        start, end = self.num_tokens - self.num_columns, self.num_tokens
        index = holding(self.sequences, end).place(start, end, storage)
        found, residual, exact = storage.tokens(index, self.window), self.residual, self.residual_storage
        if residual is None or exact is None:
            return found
        return replace(found, exact=held_newest(residual, exact, end, self.sequences.format.recent))

    @property
    def _dtypes(self) -> torch.dtype | tuple[torch.dtype, ...]:
        """Accepted dtypes; if other sequences share the storage, the dtype of their tokens."""
        storage = self.storage
        if self.dtype is None and storage and self.format.dtype is None:
            return storage.specs[0].dtype
        return super()._dtypes

    def _held(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        run = self.sequences.run()
        if run is not None and self.storage is not None and self.sequences.has_own_pages:
            rows = _rows(self.storage, run, dtype)
            if rows is not None:
                first = self.num_tokens - self.num_columns - run.first
                key, value = (x.narrow(2, first, self.num_columns) for x in rows)
                return key, value
        key, value = self.gather(dtype)
        return ReadOnly.of(key), ReadOnly.of(value)

    @property
    def _num_fixed(self) -> str | None:
        return "those that have index keys" if self.is_indexed else super()._num_fixed

    def _truncate(self, num_tokens: int) -> None:
        for x in self.all_sequences:
            if x.size and x.num_positions > num_tokens:
                x.remove([x.num_positions - num_tokens] * x.size)
        self.num_tokens = num_tokens

    def _select(self, rows: list[int]) -> None:
        for sequences in self.all_sequences:
            sequences.select(rows)

    def _reset(self) -> None:
        """Free the memory; the next tokens may have other shapes."""
        self.dtype = None
        self.num_tokens = self.num_removed = 0
        self.sequences.is_recording = False
        for sequences in self.all_sequences:
            sequences.clear()

    def _hold_alone(self, forks: Forks | None) -> None:
        forks = {x: x.fork() for x in self.all_sequences} if forks is None else forks
        self.sequences, self.groups = forks[self.sequences], Groups()
        self.residual = None if self.residual is None else forks[self.residual]


def _rows(storage: Storage, run: Span, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Views ``[B, H, slots, D]`` of the sequences and the free slots after them, if there can be such."""
    rows = storage.rows_of(run.extents, run.start)
    return None if rows is None or not rows[0].dtype == rows[1].dtype == dtype else rows


def _take_back(groups: list[Sequences], size: int, num_positions: int) -> None:
    """``Sequences.take_back`` in each group."""
    for sequences in groups:
        sequences.take_back(size, num_positions)
