"""The newest tokens of a cache of codes unquantized, beside the codes of all tokens.

Position p of a sequence lies in slot ``p % C`` of a ring of C slots.

Shapes: B sequences, Q new tokens of each, H heads, D head dim, C slots of a ring.
"""

from collections.abc import Container, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.memory import outside_inference_mode
from kvloom.caches.residual import ResidualTokens
from kvloom.caches.tokens import BLOCK, PARTIAL, Exact, TokenIndex, Tokens
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView, detached
from kvloom.ops.plain import store_plain

_LAYOUT: Final = CacheLayout("B H S D")
ROLLBACK: Final = 16
"""Tokens kept beyond the newest, so that as many can be removed and those before are still exact."""


def ring_slots(num_tokens: int, rollback: int = ROLLBACK) -> int:
    """C, where each query reads its ``num_tokens`` newest tokens unquantized."""
    return -(-num_tokens // BLOCK) * BLOCK + -(-rollback // BLOCK) * BLOCK


def ring_nbytes(num_tokens: int, key: Tensor, value: Tensor) -> int:
    """Bytes of a ring for keys and values such as these, ``[B, H, any, D]``; 0 for no tokens."""
    elements = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in (key, value))
    return elements * ring_slots(num_tokens) * key.element_size() if num_tokens else 0


class RecentStep(NamedTuple):
    """New tokens of a batch and those before them that their attention reads unquantized.

    Attributes:
        start: Position of the first new token.
        end: Position behind the last.
        first: Position of the first token that is read.
        slots: ``[B, n]``, slots of the newest n in a ring.
        old: ``[m]``, slots of the first tokens in a ring of one sequence, where they do not fit into one
            with the new ones: then all are read from tensors of their own. ``None`` if they fit.
        place: Where the tokens are that are read.
        known: ``[B]``, the first of them that is known of each sequence; ``None`` for all.
    """

    start: int
    end: int
    first: int
    slots: Tensor
    old: Tensor | None
    place: TokenIndex
    known: Tensor | None


class RecentRing:
    """Keys and values ``[B, H, C, D]`` of one layer."""

    def __init__(self, tensors: tuple[Tensor, Tensor]) -> None:
        self.tensors = tensors
        self.view = KVView.split(_LAYOUT, *tensors)

    @classmethod
    def of(cls, key: Tensor, value: Tensor, num_slots: int) -> "RecentRing":
        """An empty one for keys and values such as these, ``[B, H, any, D]``."""
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
        """Another one, in which sequence i is what sequence ``rows[i]`` was."""
        with outside_inference_mode():
            where = torch.tensor(list(rows), device=self.tensors[0].device)
            key, value = (x.index_select(0, where) for x in self.tensors)
        return RecentRing((key, value))


class Recent:
    """The newest tokens of B sequences, in every layer that shares them.

    Args:
        num_newest: R, newest tokens that a query reads unquantized, itself included.
        window: Tokens that a later query can see, itself included, so that no more are kept; ``None`` for
            all. Within a step a mask may show more.
        rollback: Tokens kept beyond the newest, so that as many can be removed and those before are still
            exact.
    """

    def __init__(self, num_newest: int, window: int | None = None, rollback: int = ROLLBACK) -> None:
        self.num_newest, self.window, self.rollback = num_newest, window, rollback
        self.num_tokens = num_newest if window is None else min(num_newest, window)
        self.rings: dict[int, RecentRing] = {}
        self._known: list[int] = []  # of each sequence, the position from which on tokens are in the rings
        self._is_exact: list[bool] = []  # of each sequence, whether no query read a newest token as a code
        self._end = 0  # behind the last position that was written in any ring
        self._tables: dict[tuple[int, int, torch.device], CacheIndex] = {}

    @property
    def num_slots(self) -> int:
        """C."""
        return ring_slots(self.num_tokens, self.rollback)

    def begin(self, rows: int, start: int, end: int, device: torch.device) -> RecentStep:
        """The step of ``rows`` sequences that stores positions ``start .. end``, which may be none."""
        if len(self._known) != rows:
            self._known, self._is_exact = [start] * rows, [True] * rows
        first, size = max(start - self.num_tokens + 1, 0), self.num_slots
        base, is_ring = first // PARTIAL * PARTIAL, end - first <= size
        stored, count = end - base, min(end - start, size)
        newest = [p % size for p in range(end - count, end)]
        known = [max(position - first, 0) for position in self._known]
        if any(known) and end > start:
            self._is_exact = [was and not unknown for was, unknown in zip(self._is_exact, known, strict=True)]
        numbers = [*range(0, (rows + 1) * stored, stored)] if stored else [0] * (rows + 1)
        numbers += [stored] * rows + [first - base] * rows + known
        numbers += [row * size + slot for row in range(rows) for slot in newest]
        parts = torch.tensor(numbers, dtype=torch.int64, device=device)
        kvstarts, lengths, origins, of_known, slots = parts.split([rows + 1, rows, rows, rows, rows * count])
        old = None
        if is_ring:
            index = self._ring_index(rows, base, device)
        else:
            begin = first // BLOCK * BLOCK
            pages = torch.arange(base, end, BLOCK, device=device) - begin
            starts = torch.arange(rows, device=device).unsqueeze(1) * (end - begin)
            index = CacheIndex(starts + pages.clamp(min=0), None, BLOCK)
            old = torch.arange(begin, start, device=device) % size
        visible = TokenIndex(index, lengths, end - first, origins if first > base else None, kvstarts)
        return RecentStep(
            start, end, first, slots.view(rows, count), old, visible, of_known if any(known) else None
        )

    def keep(self, layer: int, key: Tensor, value: Tensor, step: RecentStep) -> Exact | None:
        """Keep new tokens ``[B, H, Q, D]`` of a layer; what its attention reads unquantized."""
        if key.requires_grad or value.requires_grad:
            key, value = detached(key), detached(value)
        ring = self.rings.get(layer)
        if ring is None:
            ring = RecentRing.of(key, value, self.num_slots)
            if step.start:  # tokens before are in no ring of this layer
                self._known = [max(known, step.start) for known in self._known]
        view = ring.view
        if step.old is not None:
            keys, values = (
                _joined(x, step.old, new) for x, new in zip(ring.tensors, (key, value), strict=True)
            )
            view = RecentRing((keys, values)).view
        count = step.slots.shape[1]
        if count:
            self._end = max(self._end, step.end)
            if count < key.shape[2]:
                key, value = key[:, :, -count:], value[:, :, -count:]
            if not store_plain(key, value, step.slots, ring.view):
                ops.store(key, value, step.slots, ring.view)
        self.rings[layer] = ring
        return Exact(Tokens(view, step.place), self.num_newest, step.known)

    def held(self, layer: int, step: RecentStep) -> Exact | None:
        """What ``keep`` returned; of a step without new tokens, what the next token sees."""
        ring = self.rings.get(layer)
        if ring is None or step.end == step.first:
            return None
        return Exact(Tokens(ring.view, step.place), self.num_newest, step.known)

    def forget(self, rows: int, end: int) -> None:
        """Know none of the tokens before ``end`` of so many sequences."""
        self._known, self._is_exact, self._end = [end] * rows, [True] * rows, end

    def distrust(self, row: int) -> None:
        """The codes of a sequence are those of another that had the same tokens."""
        self._is_exact[row] = False

    def residual(self, row: int, end: int) -> ResidualTokens | None:
        """What a query at ``end`` of a sequence reads unquantized, if it is all here and not nothing.

        ``None`` also where the sequence itself read codes in the place of such tokens.
        """
        first = max(end - self.num_tokens + 1, 0)
        if max(self._known[row], self._end - self.num_slots) > first or first == end:
            return None
        if not self._is_exact[row]:
            return None
        layers = {}
        for layer, ring in self.rings.items():
            where = torch.arange(first, end, device=ring.tensors[0].device) % self.num_slots
            key, value = (x[row : row + 1].index_select(2, where) for x in ring.tensors)
            layers[layer] = key, value
        return ResidualTokens(first, layers)

    def restore(self, rows: Sequence[ResidualTokens | None], end: int) -> None:
        """Begin at position ``end`` of as many sequences, of which those in front are known, if given."""
        self.rings, self._is_exact, self._end = {}, [True] * len(rows), end
        self._known = [end if x is None else x.first for x in rows]
        for row, tokens in enumerate(rows):
            for layer, pair in () if tokens is None else tokens.layers.items():
                if layer not in self.rings:
                    key, value = (x.expand(len(rows), -1, -1, -1) for x in pair)
                    self.rings[layer] = RecentRing.of(key, value, self.num_slots)
                where = torch.arange(end - pair[0].shape[2], end, device=pair[0].device) % self.num_slots
                for ring, x in zip(self.rings[layer].tensors, pair, strict=True):
                    ring[row].index_copy_(1, where, x[0])

    def keep_only(self, layers: Container[int]) -> None:
        """Free the rings of all other layers, whose next tokens may be of other shapes."""
        self.rings = {layer: ring for layer, ring in self.rings.items() if layer in layers}

    def removed(self, end: int, shifts: Sequence[int]) -> None:
        """Positions from ``end`` on were removed; then sequence b was moved ``shifts[b]`` positions back.

        Raises:
            Exception: whatever an allocation raises; nothing was changed.
        """
        overwritten = self._end - self.num_slots
        known = [max(position, overwritten) for position in self._known]
        if any(shifts):
            rings = {}
            for layer, ring in self.rings.items():
                key, value = (_rolled(x, shifts) for x in ring.tensors)
                rings[layer] = RecentRing((key, value))
            self.rings = rings
            known = [position + shift for position, shift in zip(known, shifts, strict=True)]
        self._known = [min(position, end) for position in known]  # what follows will be known
        self._end = min(self._end, end)

    def cleared(self) -> "Recent":
        """Another one, without tokens."""
        return Recent(self.num_newest, self.window, self.rollback)

    def selected(self, rows: Sequence[int]) -> "Recent":
        """Another one, in which sequence i is what sequence ``rows[i]`` was."""
        other = self.cleared()
        if self._known:
            other._known = [self._known[row] for row in rows]
            other._is_exact = [self._is_exact[row] for row in rows]
        other._end = self._end
        other.rings = {layer: ring.selected(rows) for layer, ring in self.rings.items()}
        return other

    def nbytes_of(self, layer: int) -> int:
        """Bytes allocated for a layer."""
        return self.rings[layer].nbytes if layer in self.rings else 0

    def _ring_index(self, rows: int, base: int, device: torch.device) -> CacheIndex:
        """Every page of the rings from position ``base`` on, as far as a step reaches."""
        found = self._tables.get((rows, base, device))
        if found is None:
            size = self.num_slots
            pages = torch.arange(base, base + PARTIAL + size, BLOCK, device=device) % size
            starts = torch.arange(rows, device=device).unsqueeze(1) * size
            found = CacheIndex(starts + pages, None, BLOCK)
            self._tables = {(rows, base, device): found}
        return found


def begin_recent(
    recent: Recent | None, rows: int, start: int, end: int, device: torch.device
) -> RecentStep | None:
    """``recent.begin``, where tokens are kept so."""
    return None if recent is None else recent.begin(rows, start, end, device)


def copied_recent(recent: Recent | None, rows: Sequence[int]) -> Recent | None:
    """``recent.selected``, where tokens are kept so."""
    return None if recent is None else recent.selected(rows)


def _joined(ring: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Tokens of a ring and new ones behind them."""
    return torch.cat((ring.index_select(2, old), new), 2) if len(old) else new


def _rolled(x: Tensor, shifts: Sequence[int]) -> Tensor:
    with outside_inference_mode():
        return torch.stack([row.roll(shift, 1) for row, shift in zip(x, shifts, strict=True)])
