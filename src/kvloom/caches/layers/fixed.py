"""Layer of fixed storage in any format. Its length is a tensor, so a decode step compiles only once.

Shapes: B sequences, Q new tokens of each, H heads, Dk and Dv head dims.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.caches.format import RESIDUAL_ROLLBACK, CacheFormat, num_exact
from kvloom.caches.layers.changing import Forks
from kvloom.caches.layers.layer import Layer
from kvloom.caches.layers.read_only import ReadOnly
from kvloom.caches.layers.ring import Ring, load_ring
from kvloom.caches.rows.sequences import ROLLBACK
from kvloom.caches.tensors.memory import counted, free_bytes, outside_inference_mode
from kvloom.caches.tensors.storage import Storage
from kvloom.caches.tensors.token_index import BLOCK
from kvloom.caches.tensors.tokens import Exact, Tokens
from kvloom.core.checks import expect_range
from kvloom.core.memory import expect_memory
from kvloom.errors import ConfigError, OutOfMemory, OutOfPages, StateError, UnsupportedError

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
        self.num_slots = self._num_kept if self.max_tokens else _whole_blocks(self._num_kept)
        self.num_recent = min(x for x in (format.recent, window, self.max_tokens) if x is not None)
        self._free()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the tokens; rings leave out free slots."""
        return vars(self) | {"length": self.num_tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        length, ring, recent = (state.pop(name) for name in ("length", "_ring", "_recent"))
        saved, reach = state.pop("_storage", None), state.pop("_reach", 0)
        vars(self).update(state)
        self._free()
        if saved is not None:  # in files of earlier releases
            ring = load_ring(saved, self.num_slots, self.window, self._most_held, self.max_tokens, reach)
            if recent is not None:
                recent.truncate(length)
        if ring is not None:
            self._hold(ring, recent, length)

    @property
    def storage(self) -> Storage | None:
        """The tensors; ``None`` before ``allocate`` or the first update."""
        return None if self._ring is None else self._ring.storage

    @property
    def size(self) -> int:
        """B; 0 before ``allocate`` or the first update."""
        return 0 if self._ring is None else self._ring.storage.num_pages

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
    def residual_storage(self) -> Storage | None:
        """The tensors of the residual window; ``None`` without one."""
        return None if self._recent is None else self._recent.storage

    def nbytes_for(self, key: Tensor, value: Tensor) -> int:
        """Bytes that ``allocate_for`` takes."""
        formats = (self.format, self.num_slots), *self._of_recent()
        return sum(format.nbytes(key, value, count * key.shape[0]) for format, count in formats)

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
        if self._ring is not None:
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
        rings = list[Ring]()
        for format, num_slots in ((self.format, self.num_slots), *self._of_recent()):
            storage = Storage.of(format, key, value, num_slots, is_gathered=is_gathered)
            storage.reserve(key.shape[0], 1)
            if not rings:
                rings.append(Ring(storage, self.window, self._most_held, self.max_tokens))
            else:
                rings.append(Ring(storage, self.num_recent, num_exact(self.num_recent), None))
        self._hold(rings[0], rings[1] if len(rings) > 1 else None, 0)
        self.dtype = key.dtype

    def _of_recent(self) -> list[tuple[CacheFormat, int]]:
        """Format of the residual window and its number of slots, if there is one."""
        num_slots = _whole_blocks(self.num_recent) + _whole_blocks(RESIDUAL_ROLLBACK)
        return [(self.format.residual(num_slots), num_slots)] if self.num_recent else []

    def stored(self) -> Tokens:
        """Tokens of ``keys`` and ``values``, not gathered.

        Raises:
            StateError: before ``allocate`` or the first update.
        """
        ring, recent = self._allocated(), self._recent
        first = ring.gone
        tokens = ring.tokens(first, self.length, self.num_columns)
        if recent is None or self.num_recent == 1:
            return tokens
        newest = recent.tokens(self._first_recent, self.length, self._num_recent_columns(0))
        return replace(tokens, exact=self._exact(recent, newest, first))

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
        ring = self._allocated()
        position = ring.gone + torch.arange(self.num_columns, device=self.length.device)
        ring.storage.replace(new, ring.slots(position), position.expand(self.size, -1))
        if self._recent is not None:
            self._recent.forget(self.length)

    def _add(self, key: Tensor, value: Tensor, *, is_gathered: bool) -> Any:
        """Store new tokens; if they are the first and it raises, the next ones may have other shapes."""
        num_new, is_first = key.shape[2], self._ring is None
        if not torch.compiler.is_compiling() and self.max_tokens is not None:
            if (length := self.num_tokens) + num_new > self.max_tokens:
                raise StateError(
                    f"{self.length_name} must hold {counted(num_new, 'more token')}, got {self.max_tokens} "
                    f"with {length} taken"
                )
        if is_first or key.shape[0] != self.size:
            self.allocate_for(key, value, is_gathered=is_gathered)
        if not is_first:
            return self._store(key, value, is_gathered)
        try:
            return self._store(key, value, is_gathered)
        except BaseException:
            self._free()
            self.dtype = None
            raise

    def _store(self, key: Tensor, value: Tensor, is_gathered: bool) -> Any:
        ring, recent = self._allocated(), self._recent
        num_new, before = key.shape[2], (self.window or 1) - 1
        end = self.length + num_new
        added = [(ring, ring.add(key, value, self.length, before + num_new))]
        tokens = added[0][1].tokens
        if recent is not None:
            newest = recent.add(key, value, self.length, self._num_recent_columns(num_new))
            exact = self._exact(recent, newest.tokens, (self.length - before).clamp(min=0))
            added, tokens = [*added, (recent, newest)], replace(tokens, exact=exact)
        result = self._gathered(tokens, key.dtype) if is_gathered else tokens
        for kept, new in added:
            kept.keep(new)
        self.length.copy_(end)
        return result

    @property
    def _first_recent(self) -> Tensor:
        """Position of the first token that the next one reads from the residual window."""
        return (self.length - self.num_recent + 1).clamp(min=0)

    def _num_recent_columns(self, num_new: int) -> int:
        """Columns of the residual window that ``num_new`` tokens read."""
        count = self.num_recent - 1 + num_new
        return count if self.max_tokens is None else min(count, self.max_tokens)

    def _exact(self, recent: Ring, newest: Tokens, first: Tensor) -> Exact:
        """The residual window beside tokens that begin at ``first``, or at 0 with ``max_tokens``."""
        start = self._first_recent
        unknown = (recent.gone - start).clamp(min=0).expand(self.size)
        column = start - first if self.max_tokens is None else start
        return Exact(newest, self.format.recent, unknown, column)

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
        return 0 if self._ring is None else max(int(self._ring.reach) - self._ring.num_held, 0)

    def _truncate(self, num_tokens: int) -> None:
        for ring in self._rings:
            ring.truncate(num_tokens)
        self.length.fill_(num_tokens)
        rows = None if self._ring is None or self.window is not None else self._ring.storage.rows()
        for x in rows or ():
            x[:, :, num_tokens:] = 0

    def _select(self, rows: Sequence[int]) -> None:
        """Select sequences; the memory is kept if their number does not change."""
        if len(rows) != self.size:
            self._hold_rows(rows)
            return
        for ring in self._rings:
            ring.select(rows)

    def _hold_alone(self, forks: Forks | None) -> None:
        if self._ring is None:
            self._free()
        else:
            self._hold_rows(range(self.size))

    def _hold_rows(self, rows: Sequence[int]) -> None:
        """Copy these sequences to new memory."""
        ring, *recent = (x.selected(rows) for x in self._rings)
        self._hold(ring, recent[0] if recent else None, self.num_tokens)

    def _known_sizes(self) -> dict[str, int]:
        known = super()._known_sizes()
        if not torch.compiler.is_compiling() and not self.num_tokens:
            known.pop("B", None)  # memory is allocated again
        return known

    @property
    def _rings(self) -> list[Ring]:
        """The ring, and that of the residual window."""
        return [x for x in (self._ring, self._recent) if x is not None]

    def _allocated(self) -> Ring:
        if self._ring is None:
            raise StateError("gather needs a cache to which tokens were appended")
        return self._ring

    def _free(self) -> None:
        self._ring: Ring | None = None
        self._recent: Ring | None = None
        with outside_inference_mode():
            self.length = torch.zeros((), dtype=torch.int64)

    def _hold(self, ring: Ring, recent: Ring | None, num_tokens: int) -> None:
        with outside_inference_mode():
            self.length = torch.full((), num_tokens, dtype=torch.int64, device=ring.storage.device)
        self._ring, self._recent = ring, recent
        for x in (self.length, *(x for kept in self._rings for x in kept.tensors)):
            torch._dynamo.mark_static_address(x)


def _whole_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK) * BLOCK


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
