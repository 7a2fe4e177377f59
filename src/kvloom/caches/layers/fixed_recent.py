"""Residual window of fixed storage: the last tokens unquantized, beside the codes of all.

Position p of a sequence is in slot ``p % C`` of a ring of C slots. Positions are tensors, and shapes depend
only on the number of new tokens, so that a step compiles once and does not synchronize.

Shapes: B sequences of one length, Q new tokens of each, H heads, D head dim, C slots of a ring, R tokens of
the residual window.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import RESIDUAL_ROLLBACK, num_exact
from kvloom.caches.tensors.memory import outside_inference_mode
from kvloom.caches.tensors.token_index import BLOCK, PARTIAL, TokenIndex
from kvloom.caches.tensors.tokens import Exact, Tokens
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView

_LAYOUT: Final = CacheLayout("B H S D")


def ring_slots(num_tokens: int) -> int:
    """C for a residual window of ``num_tokens``."""
    return -(-num_tokens // BLOCK) * BLOCK + -(-RESIDUAL_ROLLBACK // BLOCK) * BLOCK


def ring_nbytes(num_tokens: int, key: Tensor, value: Tensor) -> int:
    """Bytes of a ring for keys and values such as these, ``[B, H, any, D]``; 0 for no tokens."""
    elements = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in (key, value))
    return elements * ring_slots(num_tokens) * key.element_size() if num_tokens else 0


class RecentRing:
    """Ring of keys and values ``[B, H, C, D]`` of one layer."""

    def __init__(self, tensors: tuple[Tensor, Tensor]) -> None:
        self.tensors = tensors
        key, value = tensors
        self.view = KVView.split(_LAYOUT, key, value if value.shape[3] else None)

    @classmethod
    def of(cls, key: Tensor, value: Tensor, num_slots: int) -> "RecentRing":
        """Make an empty ring for keys and values such as these, ``[B, H, any, D]``."""
        with outside_inference_mode():
            a, b = (x.new_zeros((*x.shape[:2], num_slots, x.shape[3])) for x in (key, value))
        return cls((a, b))

    def __reduce__(self) -> Any:
        return RecentRing, (self.tensors,)

    @property
    def size(self) -> int:
        """B."""
        return self.tensors[0].shape[0]

    @property
    def num_slots(self) -> int:
        """C."""
        return self.tensors[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.nbytes for x in self.tensors)

    def selected(self, rows: Sequence[int]) -> "RecentRing":
        """A new ring whose sequence i is sequence ``rows[i]`` of this one."""
        with outside_inference_mode():
            where = torch.tensor(list(rows), device=self.tensors[0].device)
            key, value = (x.index_select(0, where) for x in self.tensors)
        return RecentRing((key, value))


class FixedRecent:
    """Residual window of B sequences of one layer.

    Args:
        num_newest: R.
        num_tokens: Number of these tokens that later queries can see, and that are kept.
        max_tokens: Tokens that a sequence can have; ``None`` for any number.
        ring: Ring of C slots that keeps them.
        known: The first valid position: tokens before it are not in the ring.
        end: Position after the last token that was written there.
    """

    def __init__(
        self,
        num_newest: int,
        num_tokens: int,
        max_tokens: int | None,
        ring: RecentRing,
        known: int = 0,
        end: int = 0,
    ) -> None:
        self.num_newest, self.num_tokens = num_newest, num_tokens
        self._max_tokens, self.ring = max_tokens, ring
        device = ring.tensors[0].device
        with outside_inference_mode():
            self._starts = torch.arange(ring.size, device=device).unsqueeze(1) * ring.num_slots
            self._known, self._end = (
                torch.full((), x, dtype=torch.int64, device=device) for x in (known, end)
            )
        for x in (*ring.tensors, self._starts, self._known, self._end):
            torch._dynamo.mark_static_address(x)

    @classmethod
    def of(
        cls, num_newest: int, num_tokens: int, max_tokens: int | None, key: Tensor, value: Tensor
    ) -> "FixedRecent":
        """Make an empty window for keys and values such as these, ``[B, H, any, D]``."""
        return cls(num_newest, num_tokens, max_tokens, RecentRing.of(key, value, ring_slots(num_tokens)))

    def keep(self, key: Tensor, value: Tensor, start: Tensor, column: Tensor | int) -> Exact:
        """Store new tokens; return those that their attention reads unquantized.

        Args:
            key: ``[B, H, Q, Dk]``.
            value: ``[B, H, Q, Dv]``.
            start: Position of the first new token, 0-d.
            column: Position of the first column of the tokens that attention reads.
        """
        count, num_slots = key.shape[2], self.ring.num_slots
        known, end = self._known_at(start), start + count
        if self.num_tokens - 1 + count <= num_slots:
            tokens = self._in_ring(start, count)
        else:
            tokens = self._in_one_piece(key, value, start)
        exact = self._exact(tokens, start, known, column)
        newest = min(count, num_slots)
        new = key[:, :, count - newest :], value[:, :, count - newest :] if value.shape[3] else None
        slots = self._starts + (end - newest + torch.arange(newest, device=key.device)) % num_slots
        self._known.copy_(known)
        self._end.copy_(end)
        ops.store(*new, slots, self.ring.view)
        return exact

    def held(self, end: Tensor, column: Tensor | int) -> Exact | None:
        """Residual window of the token at position ``end``, without itself; ``None`` if empty."""
        if self.num_tokens == 1:
            return None
        return self._exact(self._in_ring(end, 0), end, self._known_at(end), column)

    def forget(self, end: Tensor) -> None:
        """Mark all tokens before ``end`` as not valid."""
        self._known.copy_(end)
        self._end.copy_(end)

    def select(self, rows: Sequence[int]) -> None:
        """Make sequence i what sequence ``rows[i]`` was, in the same memory."""
        for x, new in zip(self.ring.tensors, self.ring.selected(rows).tensors, strict=True):
            x.copy_(new)

    def selected(self, rows: Sequence[int]) -> "FixedRecent":
        """A new window whose sequence i is sequence ``rows[i]`` of this one."""
        num_newest, num_tokens, max_tokens, ring, known, end = self._state()
        return FixedRecent(num_newest, num_tokens, max_tokens, ring.selected(rows), known, end)

    def __reduce__(self) -> Any:
        return FixedRecent, self._state()

    def _state(self) -> tuple[int, int, int | None, RecentRing, int, int]:
        sizes = self.num_newest, self.num_tokens, self._max_tokens
        return *sizes, self.ring, int(self._known), int(self._end)

    def _known_at(self, start: Tensor) -> Tensor:
        """The first valid position, at most ``start``; tokens from ``start`` on may have been removed."""
        oldest = self._end - num_exact(self.num_tokens)
        return torch.minimum(torch.maximum(self._known, oldest), start)

    def _first(self, start: Tensor) -> Tensor:
        """Position of the first token that a query at ``start`` reads."""
        return (start - self.num_tokens + 1).clamp(min=0)

    def _in_ring(self, start: Tensor, count: int) -> Tokens:
        """Tokens that ``count`` new ones read, if the ring has a slot for each."""
        size = self.ring.num_slots
        base = self._first(start) // PARTIAL * PARTIAL
        pages = (base + torch.arange(0, PARTIAL + size, BLOCK, device=start.device)) % size
        return self._tokens(self.ring, self._starts + pages, start, count)

    def _in_one_piece(self, key: Tensor, value: Tensor, start: Tensor) -> Tokens:
        """Tokens of the ring, followed by the new ones, in tensors of this step."""
        size, count, first = self.ring.num_slots, key.shape[2], self._first(start)
        base, begin = first // PARTIAL * PARTIAL, first // BLOCK * BLOCK
        num_old = self.num_tokens - 1 + BLOCK - 1  # from the start of a page
        device = start.device
        old = (begin + torch.arange(num_old, device=device)) % size
        new = start - begin + torch.arange(count, device=device)
        parts = []
        for kept, x in zip(self.ring.tensors, (key, value), strict=True):
            room = x.new_zeros((*x.shape[:2], count, x.shape[3]))
            parts.append(torch.cat((kept.index_select(2, old), room), 2).index_copy_(2, new, x))
        piece = RecentRing((parts[0], parts[1]))
        pages = base - begin + torch.arange(0, PARTIAL + self.num_tokens - 1 + count, BLOCK, device=device)
        starts = torch.arange(self.ring.size, device=device).unsqueeze(1) * piece.num_slots
        return self._tokens(piece, starts + pages.clamp(min=0), start, count)

    def _tokens(self, ring: RecentRing, table: Tensor, start: Tensor, count: int) -> Tokens:
        """Tokens from the first that ``count`` new ones at ``start`` read; columns after them are empty."""
        first = self._first(start)
        base, rows = first // PARTIAL * PARTIAL, ring.size
        num_columns = self.num_tokens - 1 + count
        if self._max_tokens is not None:
            num_columns = min(num_columns, self._max_tokens)
        lengths, origins = (start + count - base).expand(rows), (first - base).expand(rows)
        return Tokens(ring.view, TokenIndex(CacheIndex(table, None, BLOCK), lengths, num_columns, origins))

    def _exact(self, tokens: Tokens, start: Tensor, known: Tensor, column: Tensor | int) -> Exact:
        first = self._first(start)
        unknown = (known - first).clamp(min=0).expand(self.ring.size)
        return Exact(tokens, self.num_newest, unknown, first - column)


def with_recent(
    recent: FixedRecent | None,
    tokens: Tokens,
    start: Tensor,
    column: Tensor | int,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tokens:
    """``tokens`` with their residual window, if there is one.

    Args:
        recent: The residual window; ``None`` without one.
        tokens: Codes of all tokens, those of ``new`` included.
        start: Position of the first new token, or after all tokens if ``new`` is ``None``; 0-d.
        column: Position of the first column of ``tokens``.
        new: Keys and values ``[B, H, Q, D]`` to store in the window; ``None`` for none.
    """
    if recent is None:
        return tokens
    exact = recent.held(start, column) if new is None else recent.keep(*new, start, column)
    return replace(tokens, exact=exact)
