"""Layer of fixed storage in any format. Its length is a tensor, so a decode step compiles only once.

Shapes: B sequences, Q new tokens of each, H heads, Dk and Dv head dims.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat
from kvloom.caches.layers.fixed_recent import FixedRecent, ring_nbytes, with_recent
from kvloom.caches.layers.layer import Forks, Layer
from kvloom.caches.layers.read_only import ReadOnly
from kvloom.caches.layers.ring import Ring
from kvloom.caches.rows.saving import SavedStorage
from kvloom.caches.rows.sequences import ROLLBACK
from kvloom.caches.tensors.memory import counted, free_bytes, outside_inference_mode
from kvloom.caches.tensors.storage import Storage
from kvloom.caches.tensors.token_index import BLOCK
from kvloom.caches.tensors.tokens import Tokens
from kvloom.core.checks import expect_range
from kvloom.core.memory import expect_memory
from kvloom.errors import ConfigError, OutOfMemory, OutOfPages, StateError, UnsupportedError

_Result = TypeVar("_Result")
_LARGEST: Final = 1 << 62
"""A number of bytes larger than any memory."""


class FixedLayer(Layer):
    """Keys and values of B sequences in one page of each, which never moves.

    With ``format.max_tokens`` each sequence has at most that many tokens, and ``update`` returns all
    positions. Those after the stored tokens, and evicted ones, hold finite values that the mask must hide;
    attention in place does not read them. Without ``format.max_tokens`` a window is required, sequences have
    any length, and ``update`` returns ``window - 1 + Q`` positions, 0 after the tokens.

    The length is a tensor, so that a decode step compiles once: call ``allocate`` before the first compiled
    step. Outside ``torch.compile`` each update reads it, which waits for an accelerator.

    Args:
        format: Format of the tokens.
        window: Tokens that a token sees, itself included. ``window + rollback`` tokens are kept; token t is
            in slot t modulo that number, where it replaces one that no token sees any more. Without
            ``format.max_tokens`` the number of slots is a multiple of 16.
        rollback: Number of last tokens that can be removed, if there is a window.
    """

    length_name = "max_tokens"
    """Name of the argument that decides the size of the memory, for errors."""

    def __init__(self, format: CacheFormat, window: int | None = None, rollback: int = ROLLBACK) -> None:
        super().__init__()
        if format.max_tokens is None and window is None:
            raise ConfigError("max_tokens must be given for fixed storage, got None")
        self.format, self.max_tokens = format, format.max_tokens
        self._window = window
        counts = [self.max_tokens, None if window is None else window + rollback]
        self._num_kept = min(count for count in counts if count is not None)
        self.num_slots = self._num_kept if self.max_tokens else -(-self._num_kept // BLOCK) * BLOCK
        self.num_recent = min(x for x in (format.recent, window, self.max_tokens) if x is not None)
        self._free()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the tokens, without free slots."""
        state = vars(self) | {"_storage": None, "_ring": None, "length": 0, "_reach": 0}
        if self.storage is not None:
            num_slots = max(min(int(self._reach), self.num_slots), 1)
            slots = self._ring.slots(torch.arange(num_slots, device=self.length.device)).flatten()
            state["_storage"] = SavedStorage.of(self.storage, slots, num_slots)
            state |= {"length": self.num_tokens, "_reach": int(self._reach)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved: SavedStorage | None = state["_storage"]
        vars(self).update(state)
        self._free()
        if saved is not None:
            rows, position = saved.num_pages, torch.arange(saved.page_size)
            storage = saved.storage(self.num_slots)
            storage.reserve(rows, 1)
            self._hold(storage, state["length"], state["_reach"], state["_recent"])
            saved.write(storage, self._ring.slots(position.to(storage.device)).flatten())

    @property
    def storage(self) -> Storage | None:
        """The tensors; ``None`` before ``allocate`` or the first update."""
        return self._storage

    @property
    def size(self) -> int:
        """B; 0 before ``allocate`` or the first update."""
        return 0 if self._storage is None else self._storage.num_pages

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; ``None`` for all before it."""
        return self._window

    @property
    def is_sliding(self) -> bool:
        """Whether ``update`` returns the tokens within a window, and not all positions."""
        return self.max_tokens is None

    @property
    def num_tokens(self) -> int:
        """Number of tokens seen of each sequence; reads the tensor."""
        return int(self.length)

    @property
    def num_columns(self) -> int:
        """n of ``keys``: number of all positions, or of those that a window keeps."""
        return self._most_held if self.max_tokens is None else self.max_tokens

    @property
    def _most_held(self) -> int:
        """Number of tokens held of a long sequence; a window has one more slot, for the next token."""
        return self._num_kept if self._num_kept == self.max_tokens else max(self._num_kept - 1, 1)

    def get_seq_length(self) -> Tensor:
        """``num_tokens``, a new 0-d int64 tensor."""
        return self.length.clone()

    def get_max_length(self) -> int:
        """Maximum number of tokens of each sequence; the window if there is none."""
        return self.max_tokens or self.window or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | Tensor]:
        """All positions from 0 on, or ``(window - 1 + Q, max(seen - window + 1, 0))``, a 0-d tensor."""
        if self.max_tokens is not None:
            return self.max_tokens, 0
        before = (self.window or 1) - 1
        return before + query_length, (self.length - before).clamp(min=0)

    @property
    def nbytes_recent(self) -> int:
        """Bytes of the residual window."""
        return 0 if self._recent is None else self._recent.ring.nbytes

    def nbytes_for(self, key: Tensor, value: Tensor) -> int:
        """Bytes that ``allocate_for`` takes."""
        nbytes = self.format.nbytes(key, value, self.num_slots * key.shape[0])
        return nbytes + ring_nbytes(self.num_recent, key, value)

    def allocate(
        self,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate the memory now, zeroed, instead of in the first ``update``.

        Raises:
            StateError: it was allocated before.
            ArgumentError: a size is not at least 1.
            OutOfPages: there is too little memory.
        """
        if self._storage is not None:
            raise StateError("allocate must come before the first update and only once")
        sizes = {"batch": batch, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        for name, size in sizes.items():
            expect_range(name, size, 1)
        like = [torch.empty(batch, heads, 0, dim, dtype=dtype, device=device) for dim in (key_dim, value_dim)]
        self.allocate_for(like[0], like[1], is_gathered=True)

    def allocate_for(self, key: Tensor, value: Tensor, *, is_gathered: bool = False) -> None:
        """Allocate the memory, zeroed, for keys and values such as these, ``[B, H, any, D]``.

        Call it before the first compiled ``append`` or, with ``is_gathered``, ``update``.

        Raises:
            OutOfPages: there is too little memory; the old memory is kept.
        """
        self._expect_tokens(key, value)
        try:
            expect_memory(self.length_name, min(self.nbytes_for(key, value), _LARGEST), key.device)
        except OutOfMemory as error:
            raise too_long_for([self], key, value) from error
        storage = Storage.of(self.format, key, value, self.num_slots, is_gathered=is_gathered)
        storage.reserve(key.shape[0], 1)
        sizes = self.format.recent, self.num_recent, self.max_tokens
        self._hold(storage, 0, 0, FixedRecent.of(*sizes, key, value) if self.num_recent else None)
        self.dtype = key.dtype

    def stored(self) -> Tokens:
        """Tokens of ``keys`` and ``values``, not gathered.

        Raises:
            StateError: before ``allocate`` or the first update.
        """
        first = (self._reach - self._most_held).clamp(min=0)
        tokens = self._tokens(self._allocated(), self._ring, first, self.length, self.num_columns)
        return self._with_recent(tokens, first)

    def gather(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``stored`` as tensors; with a window, 0 after the tokens."""
        return self._gathered(self.stored(), dtype)

    def replace(self, new: Mapping[int, Tensor]) -> None:
        """Replace all keys (0), values (1) or both.

        Raises:
            UnsupportedError: ``keys`` has positions that a window has evicted.
        """
        if self.max_tokens is not None and self.num_slots < self.max_tokens:
            raise UnsupportedError("keys and values of fixed storage with a window cannot be assigned")
        storage = self._allocated()
        first = (self._reach - self._most_held).clamp(min=0)
        position = first + torch.arange(self.num_columns, device=storage.device)
        storage.replace(new, self._ring.slots(position), position.expand(self.size, -1))
        if self._recent is not None:
            self._recent.forget(self.length)

    def _update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._extend(key, value, lambda x: self._gathered(x, key.dtype), is_gathered=True)

    def _append(self, key: Tensor, value: Tensor) -> Tokens:
        return self._extend(key, value, lambda tokens: tokens, is_gathered=False)

    def _extend(
        self, key: Tensor, value: Tensor, read: Callable[[Tokens], _Result], *, is_gathered: bool
    ) -> _Result:
        """Store new tokens and return ``read`` of the tokens that attention reads; if it raises, undo that.

        If these are the first tokens, the memory is freed, too: the next ones may have other shapes.
        """
        num_new, is_first = key.shape[2], self._storage is None
        if not torch.compiler.is_compiling() and self.max_tokens is not None:
            if (length := self.num_tokens) + num_new > self.max_tokens:
                raise StateError(
                    f"{self.length_name} must hold {counted(num_new, 'more token')}, got {self.max_tokens} "
                    f"with {length} taken"
                )
        if is_first or key.shape[0] != self.size:
            self.allocate_for(key, value, is_gathered=is_gathered)
        if not is_first:
            return self._store(key, value, read)
        try:
            return self._store(key, value, read)
        except BaseException:
            self._free()
            self.dtype = None
            raise

    def _store(self, key: Tensor, value: Tensor, read: Callable[[Tokens], _Result]) -> _Result:
        storage, num_new, before = self._allocated(), key.shape[2], (self.window or 1) - 1
        end, position = self.length + num_new, self.length + torch.arange(num_new, device=key.device)
        reach = torch.maximum(self._reach, end)
        first, count = (self.length - before).clamp(min=0), before + num_new
        # Tokens count as stored once the length includes them. A new token overwrites one that is no longer
        # held. Many would overwrite tokens that the first of them see. A compiled step may also overwrite
        # tokens that would be visible again only after a crop.
        needed = before if torch.compiler.is_compiling() else self._most_held
        if self.num_slots == self.max_tokens or num_new <= self.num_slots - needed:
            tokens = self._tokens(storage, self._ring, first, end, count)
            storage.store(key, value, self._ring.slots(position), position.expand(self.size, -1))
            result = read(self._with_recent(tokens, first, (key, value)))
        else:
            step, ring = self._step(key, value, storage, position)
            tokens = self._tokens(step, ring, first, end, count)
            result = read(self._with_recent(tokens, first, (key, value)))
            last = position[-self.num_slots :]
            slots = (x.slots(last).flatten() for x in (ring, self._ring))
            ops.copy(step.view, next(slots), storage.view, next(slots))
        self._reach.copy_(reach)
        self.length.copy_(end)
        return result

    def _tokens(self, storage: Storage, ring: Ring, first: Tensor, end: Tensor, count: int) -> Tokens:
        """Tokens before ``end``: all positions up to ``max_tokens``, or ``count`` from ``first`` on."""
        is_whole = self.num_slots == self.max_tokens
        rows = storage.rows_of(slice(None), 0) if is_whole else None
        return storage.tokens(ring.place(first, end, count), self.window, rows)

    def _with_recent(self, tokens: Tokens, first: Tensor, new: tuple[Tensor, Tensor] | None = None) -> Tokens:
        return with_recent(self._recent, tokens, self.length, first if self.max_tokens is None else 0, new)

    def _gathered(self, tokens: Tokens, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key, value = tokens.gather(dtype)
        index = tokens.index
        if index.origins is None:
            return key, value
        position = torch.arange(index.num_columns, device=key.device) + index.origins[0]
        is_stored = (position < index.lengths[0]).unsqueeze(1)
        return torch.where(is_stored, key, 0), torch.where(is_stored, value, 0)

    def _held(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        tokens = self.stored()
        key, value = self._gathered(tokens, dtype)
        return (key, value) if tokens.rows is not None else (ReadOnly.of(key), ReadOnly.of(value))

    @property
    def _num_fixed(self) -> str | None:
        return super()._num_fixed if self.max_tokens is None else "all that fit"

    def _num_evicted(self) -> int:
        return max(int(self._reach) - self._most_held, 0)

    def _truncate(self, num_tokens: int) -> None:
        self._reach.clamp_(max=num_tokens + self._most_held if num_tokens else 0)
        self.length.fill_(num_tokens)
        rows = None if self._storage is None or self.window is not None else self._storage.rows()
        for x in rows or ():
            x[:, :, num_tokens:] = 0

    def _reset(self) -> None:
        """Remove all tokens. Memory and shapes stay, but the number of sequences may change."""
        self._truncate(0)

    def _select(self, rows: Sequence[int]) -> None:
        """Select sequences; the memory is kept if their number does not change."""
        if len(rows) != self.size:
            self._hold_rows(rows)
            return
        self._copy_rows(rows, self._allocated())
        if self._recent is not None:
            self._recent.select(rows)

    def _hold_alone(self, forks: Forks | None) -> None:
        if self._storage is None:
            self._free()
        else:
            self._hold_rows(range(self.size))

    def _hold_rows(self, rows: Sequence[int]) -> None:
        """Copy these sequences to new memory."""
        copied = self._allocated().like(self.num_slots)
        copied.reserve(len(rows), 1)
        self._copy_rows(rows, copied)
        recent = None if self._recent is None else self._recent.selected(rows)
        self._hold(copied, self.num_tokens, int(self._reach), recent)

    def _known_sizes(self) -> dict[str, int]:
        known = super()._known_sizes()
        if not torch.compiler.is_compiling() and not self.num_tokens:
            known.pop("B", None)  # memory is allocated again
        return known

    def _allocated(self) -> Storage:
        if self._storage is None:
            raise StateError("gather needs a cache to which tokens were appended")
        return self._storage

    def _step(self, key: Tensor, value: Tensor, storage: Storage, position: Tensor) -> tuple[Storage, Ring]:
        """Copy new tokens and those that they see to a storage of this step."""
        before = (self.window or 1) - 1
        num_slots = before + key.shape[2]
        num_slots = min(num_slots, self.max_tokens) if self.max_tokens else -(-num_slots // BLOCK) * BLOCK
        step, ring = storage.like(num_slots), Ring(self.size, num_slots, self.max_tokens, key.device)
        step.reserve(self.size, 1)
        # With fewer tokens than a window, some copied slots are empty.
        old = self.length + torch.arange(-before, 0, device=key.device)
        ops.copy(storage.view, self._ring.slots(old).flatten(), step.view, ring.slots(old).flatten())
        step.store(key, value, ring.slots(position), position.expand(self.size, -1))
        return step, ring

    def _copy_rows(self, rows: Sequence[int], target: Storage) -> None:
        """Copy some sequences to a storage of the same length, which may be this one."""
        view, count = self._allocated().view, min(int(self._reach), self.num_slots)
        position = torch.arange(count, device=view.device)
        sources, targets = (
            (torch.tensor(x, device=view.device).unsqueeze(1) * self.num_slots + position).flatten()
            for x in (rows, range(len(rows)))
        )
        ops.copy(view, sources, target.view, targets)

    def _free(self) -> None:
        self._storage: Storage | None = None
        self._recent: FixedRecent | None = None
        with outside_inference_mode():
            self._ring = Ring(0, 1, 1, torch.device("cpu"))
            self.length = torch.zeros((), dtype=torch.int64)
            self._reach = torch.zeros((), dtype=torch.int64)  # the largest length since it was empty

    def _hold(self, storage: Storage, num_tokens: int, reach: int, recent: FixedRecent | None) -> None:
        device = storage.device
        with outside_inference_mode():
            ring = Ring(storage.num_pages, self.num_slots, self.max_tokens, device)
            length, longest = (
                torch.full((), n, dtype=torch.int64, device=device) for n in (num_tokens, reach)
            )
        self._storage, self._ring, self.length, self._reach = storage, ring, length, longest
        self._recent = recent
        for x in (*storage.tensors, ring.starts, length, longest):
            if x is not None:
                torch._dynamo.mark_static_address(x)


def too_long_for(layers: Sequence[FixedLayer], key: Tensor, value: Tensor) -> OutOfPages:
    """Error for fixed layers of one cache that have too little memory for ``[B, H, any, D]`` in each."""
    nbytes = [layer.nbytes_for(key, value) for layer in layers]
    asked = sum(nbytes)
    # The bytes of short windows do not depend on the length.
    fixed = sum(n for n, x in zip(nbytes, layers, strict=True) if x.num_slots < (x.max_tokens or 0))
    length = layers[0].max_tokens or layers[0].window or 0
    free, bound = free_bytes(key.device), "smaller"
    if free is not None:
        free += sum(layer.nbytes for layer in layers)
        fits = max(free - fixed, 0) * length // max(asked - fixed, 1)
        bound = "smaller" if fits >= length else f"at most {fits} for {free} free bytes"
    return OutOfPages(
        f"{layers[0].length_name} must be {bound}, got {length}, which takes {asked} bytes for "
        f"{counted(key.shape[0], 'sequence')} in {counted(len(layers), 'layer')}"
    )
