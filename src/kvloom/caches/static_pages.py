"""A layer of fixed storage in any format, for which a decode step compiles once: its length is a tensor.

Letters: B sequences, Q new tokens of each, H heads, Dk and Dv head dims.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat
from kvloom.caches.memory import free_bytes, is_exhausted, outside_inference_mode, too_long
from kvloom.caches.saving import SavedStorage
from kvloom.caches.sequences import ROLLBACK
from kvloom.caches.storage import Storage
from kvloom.caches.tokens import TokenIndex, Tokens
from kvloom.caches.words import counted
from kvloom.core.checks import FLOAT_DTYPES, expect
from kvloom.core.indexing import CacheIndex
from kvloom.errors import ConfigError, OutOfPages, StateError, UnsupportedError

_Result = TypeVar("_Result")


class StaticPagedLayer:
    """Keys and values of B sequences of at most ``format.max_tokens`` tokens each, in one page of each.

    ``append`` and ``stored`` tell of all columns; those behind the stored tokens, and those that a window has
    passed, hold finite values, and attention in place does not see them. Outside ``torch.compile`` each
    append reads the length, which waits for an accelerator.

    Args:
        format: How tokens are kept.
        window: Tokens that a token sees, itself included. As many are kept, and ``ROLLBACK`` more: token t
            lies in slot t modulo that number, so that it takes the place of one that nobody sees any more.
    """

    def __init__(self, format: CacheFormat, window: int | None = None) -> None:
        if format.max_tokens is None:
            raise ConfigError("max_tokens must be given for fixed storage, got None")
        self.format = format
        self.window = window
        self.max_tokens = format.max_tokens
        self.storage: Storage | None = None
        with outside_inference_mode():
            self._ring = _Ring(0, self.num_slots, self.max_tokens, torch.device("cpu"))
            self.length = torch.zeros((), dtype=torch.int64)
            self._reach = torch.zeros((), dtype=torch.int64)  # the largest length since it was empty

    def __getstate__(self) -> dict[str, Any]:
        """To be saved: the tokens, and no free slots."""
        state: dict[str, Any] = {"format": self.format, "window": self.window, "saved": None}
        if self.storage is not None:
            num_slots = max(min(int(self._reach), self.num_slots), 1)
            held = self.storage.like(num_slots)
            held.reserve(self.size, 1)
            ring = _Ring(self.size, num_slots, num_slots, self.length.device)
            column = torch.arange(num_slots, device=self.length.device)
            slots = (x.slots(column).flatten() for x in (self._ring, ring))
            ops.copy(self.storage.view, next(slots), held.view, next(slots))
            state["saved"] = SavedStorage.of(held, torch.arange(self.size * num_slots))
            state |= {"length": self.num_tokens, "reach": int(self._reach)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        StaticPagedLayer.__init__(self, state["format"], state["window"])
        saved: SavedStorage | None = state["saved"]
        if saved is not None:
            rows, column = saved.view.num_slots // saved.page_size, torch.arange(saved.page_size)
            self._hold(saved.storage(self.num_slots), rows)
            device = self.length.device
            slots = self._ring.slots(column.to(device)).flatten()
            ops.copy(saved.view, torch.arange(len(slots), device=device), self._allocated().view, slots)
            self.length.fill_(state["length"])
            self._reach.fill_(state["reach"])

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence; reads the tensor."""
        return int(self.length)

    @property
    def num_slots(self) -> int:
        """Tokens of each sequence that are kept."""
        kept = self.max_tokens if self.window is None else self.window - 1 + ROLLBACK
        return min(kept, self.max_tokens)

    @property
    def size(self) -> int:
        """B; 0 before ``allocate``."""
        return 0 if self.storage is None else self.storage.num_pages

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales included."""
        return 0 if self.storage is None else self.storage.nbytes

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that one token of one sequence takes, scales included; 0 before ``allocate``."""
        return 0.0 if self.storage is None else self.storage.nbytes_per_token

    def nbytes_for(self, key: Tensor, value: Tensor) -> int:
        """Bytes that ``allocate`` takes."""
        storage = Storage.of(self.format, key, value, self.num_slots)
        return int(storage.nbytes_per_token * self.num_slots * key.shape[0])

    def allocate(self, key: Tensor, value: Tensor, *, is_gathered: bool = False) -> None:
        """Take the memory, zeroed, for keys and values such as these, ``[B, H, any, D]``.

        Call it before the first compiled ``append`` or, with ``is_gathered``, ``update``.

        Raises:
            OutOfPages: there is too little memory; what was there stays.
        """
        rows, heads, *_ = expect("key", key, "B H Q Dk", dtype=FLOAT_DTYPES).values()
        expect("value", value, "B H Q Dv", dtype=key.dtype, device=key.device, B=rows, H=heads)
        try:
            storage = Storage.of(self.format, key, value, self.num_slots, is_gathered=is_gathered)
            self._hold(storage, rows)
        except (MemoryError, RuntimeError) as error:
            if is_exhausted(error):
                raise too_long_for([self], key, value) from error
            raise

    def append(self, key: Tensor, value: Tensor) -> Tokens:
        """Store new tokens ``[B, H, Q, D]`` behind the ones that are there, and return all columns.

        Raises:
            ShapeError: B, H, a head dim or the device is not as allocated; nothing was written.
            StateError: they do not fit (compiled: ArgumentError of ``store``); nothing was written.
        """
        return self._extend(key, value, lambda tokens: tokens, is_gathered=False)

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """``append``, and all columns as tensors ``[B, H, N, D]`` of the dtype of ``key``.

        Unquantized columns without a window are views of the cache.
        """
        return self._extend(key, value, lambda tokens: tokens.gather(key.dtype), is_gathered=True)

    def _extend(
        self, key: Tensor, value: Tensor, read: Callable[[Tokens], _Result], *, is_gathered: bool
    ) -> _Result:
        """What ``read`` makes of all columns; if it raises, nothing remains of the new ones."""
        compiling = torch.compiler.is_compiling()
        if self.storage is None or (not compiling and key.shape[0] != self.size and self.num_tokens == 0):
            self.allocate(key, value, is_gathered=is_gathered)
        storage, num_new = self._allocated(), key.shape[2]
        storage.expect_fits(key, value, self.size)
        if not compiling and (length := self.num_tokens) + num_new > self.max_tokens:
            raise StateError(
                f"max_tokens must hold {counted(num_new, 'more token')}, got {self.max_tokens} with {length} "
                "taken"
            )
        end, position = self.length + num_new, self.length + torch.arange(num_new, device=key.device)
        reach = torch.maximum(self._reach, end)
        # What is written counts from the moment on when the length says so. A few new tokens take slots that
        # no token sees any more; many would take those of tokens that the first of them see.
        if self.num_slots == self.max_tokens or num_new <= ROLLBACK:
            self._reach.copy_(reach)
            storage.store(key, value, self._ring.slots(position))
            result = read(self._tokens(storage, self._ring, end))
        else:
            step, ring = self._step(key, value, storage, position)
            result = read(self._tokens(step, ring, end))
            last = position[-self.num_slots :]
            slots = (x.slots(last).flatten() for x in (ring, self._ring))
            ops.copy(step.view, next(slots), storage.view, next(slots))
            self._reach.copy_(reach)
        self.length.copy_(end)
        return result

    @property
    def num_columns(self) -> int:
        """N of ``stored``: all."""
        return self.max_tokens

    def replace(self, new: Mapping[int, Tensor]) -> None:
        """Hold these keys (0), values (1) or both, ``[B, H, max_tokens, D]``, in the place of all columns.

        Raises:
            UnsupportedError: a window has passed some of them.
        """
        if self.num_slots < self.max_tokens:
            raise UnsupportedError("keys and values of fixed storage with a window cannot be assigned")
        storage = self._allocated()
        column = torch.arange(self.max_tokens, device=storage.view.device)
        storage.replace(new, self._ring.slots(column))

    def stored(self) -> Tokens:
        """All columns.

        Raises:
            StateError: nothing is allocated yet.
        """
        return self._tokens(self._allocated(), self._ring, self.length)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of each sequence.

        Raises:
            StateError: as ``expect_truncatable``.
        """
        self.expect_truncatable(num_tokens)
        self.length.fill_(num_tokens)
        if not num_tokens:
            self._reach.zero_()

    def expect_truncatable(self, num_tokens: int) -> None:
        """Raise StateError if there are fewer tokens, or a window has passed what the next one would see."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise StateError(f"num_tokens must be in [0, {self.num_tokens}], got {num_tokens}")
        passed = int(self._reach) - self.num_slots
        fewest = passed + (self.window or 1) - 1
        if passed > 0 and 0 < num_tokens < fewest:
            raise StateError(
                f"num_tokens must be at least {fewest}, or 0, since what a window of {self.window} behind "
                f"fewer would show is gone, got {num_tokens}"
            )

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.length.zero_()
        self._reach.zero_()

    def select(self, rows: Sequence[int]) -> None:
        """Make sequence i what sequence ``rows[i]`` was; as many as before keep their memory."""
        if self.storage is None:
            return
        if len(rows) == self.size:
            self._take(self, rows)
        else:
            vars(self).update(vars(self._selected(rows)))

    def fork(self) -> "StaticPagedLayer":
        """A copy of the layer, in memory of its own."""
        return self._selected(range(self.size))

    def _selected(self, rows: Sequence[int]) -> "StaticPagedLayer":
        other = StaticPagedLayer(self.format, self.window)
        if self.storage is not None:
            other._hold(self.storage.like(self.num_slots), len(rows))
            other._take(self, rows)
        return other

    def _allocated(self) -> Storage:
        if self.storage is None:
            raise StateError("gather needs a cache to which tokens were appended")
        return self.storage

    def _tokens(self, storage: Storage, ring: "_Ring", length: Tensor) -> Tokens:
        placement = TokenIndex(ring.index, length.repeat(self.size), self.max_tokens)
        rows = None if self.num_slots < self.max_tokens else storage.rows()
        return Tokens(storage.view, placement, self.window, rows)

    def _step(
        self, key: Tensor, value: Tensor, storage: Storage, position: Tensor
    ) -> tuple[Storage, "_Ring"]:
        """New tokens and those that they see, in a storage of this step."""
        before = (self.window or 1) - 1
        num_slots = min(before + key.shape[2], self.max_tokens)
        step, ring = storage.like(num_slots), _Ring(self.size, num_slots, self.max_tokens, key.device)
        step.reserve(self.size, 1)
        # Where there are fewer tokens than a window, slots are copied that stand for none.
        old = self.length + torch.arange(-before, 0, device=key.device)
        ops.copy(storage.view, self._ring.slots(old).flatten(), step.view, ring.slots(old).flatten())
        step.store(key, value, ring.slots(position))
        return step, ring

    def _take(self, source: "StaticPagedLayer", rows: Sequence[int]) -> None:
        """Copy some sequences of another layer of this size, or of this one."""
        view, count = source._allocated().view, min(int(source._reach), self.num_slots)
        column = torch.arange(count, device=view.device)
        first = torch.tensor(rows, device=view.device).unsqueeze(1) * self.num_slots
        slots = self._ring.slots(column).flatten()
        ops.copy(view, (first + column).flatten(), self._allocated().view, slots)
        self.length.copy_(source.length)
        self._reach.copy_(source._reach)

    def _hold(self, storage: Storage, rows: int) -> None:
        storage.reserve(rows, 1)
        device = storage.view.device
        with outside_inference_mode():
            ring = _Ring(rows, self.num_slots, self.max_tokens, device)
            length, reach = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.storage, self._ring, self.length, self._reach = storage, ring, length, reach
        for x in (*storage.tensors, ring.index.table, length, reach):
            if x is not None:
                torch._dynamo.mark_static_address(x)


class _Ring:
    """``num_slots`` slots for each of B sequences: token t lies in slot t modulo their number.

    Attributes:
        index: The same as pages, all of one place.
    """

    def __init__(self, rows: int, num_slots: int, max_tokens: int, device: torch.device) -> None:
        starts = torch.arange(rows, device=device).unsqueeze(1) * num_slots
        self.index = CacheIndex.pages(starts.repeat(1, -(-max_tokens // num_slots)), num_slots)
        self._max_tokens = max_tokens

    def slots(self, position: Tensor) -> Tensor:
        """Slots ``[B, Q]`` of the tokens at ``position`` ``[Q]``; no slot for those that do not fit."""
        table, size = self.index.table, self.index.page_size
        return torch.where(position < self._max_tokens, table[:, :1] + position % size, len(table) * size)


def too_long_for(layers: Sequence[StaticPagedLayer], key: Tensor, value: Tensor) -> OutOfPages:
    """What to say where there is too little memory for layers of one cache, ``[B, H, any, D]`` in each."""
    nbytes = [layer.nbytes_for(key, value) for layer in layers]
    fixed = sum(n for n, x in zip(nbytes, layers, strict=True) if x.num_slots < x.max_tokens)
    free = free_bytes(key.device)
    if free is not None:
        free += sum(layer.nbytes for layer in layers)
    what = f"{counted(key.shape[0], 'sequence')} in {counted(len(layers), 'layer')}"
    return too_long("max_tokens", layers[0].max_tokens, sum(nbytes), fixed, free, what)
