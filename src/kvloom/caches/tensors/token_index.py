"""Slots of the columns of a batch: the same in every layer that shares a page table.

Shapes: B sequences, N columns. A column is one token of every sequence, as in ``[B, H, N, D]``; a shorter
sequence ends with the others and has empty columns in front.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex, prefix_sums

PARTIAL: Final = 512
"""Stored tokens of one partial result of attention. An index that does not begin with the first token of its
sequence begins at a multiple of this, so that results have the same bits wherever a text was cut or
evicted."""
BLOCK: Final = 16
"""Slots that attention reads as one page, if tokens are in a ring or in the tensors of one step."""


def dense_index(rows: int, num_columns: int, device: torch.device) -> CacheIndex:
    """Slots of a tensor ``[rows, num_columns]`` of tokens."""
    starts = torch.arange(rows, device=device) * num_columns
    return CacheIndex.pages(starts.unsqueeze(1), max(num_columns, 1))


@dataclass(eq=False)
class TokenIndex:
    """Slots of N columns of B sequences: the same in every layer that shares a page table.

    Attributes:
        index: Slots of every stored token of each sequence.
        lengths: ``[B]`` int64, stored tokens of each sequence, those before the first column included.
        num_columns: N.
        origins: ``[B]`` int64, number of the stored token in column 0; negative if columns in front are
            empty; ``None`` for 0.
        kvstarts: ``[B + 1]`` int64, prefix sums of ``lengths``; ``None`` to compute them when needed.
        begins: ``[B]`` int64, the first column of each sequence that has a token, where placeholder pages
            fill the columns before it: in a sequence that begins among the new tokens, for example.
        first_position: ``[B]`` int64, position in its text of token 0 of each sequence of the index; negative
            if the sequence begins after it; ``None`` for 0.
        spans: ``origins``, ``lengths`` and ``begins`` of each sequence on the host; ``None`` if they are not
            known there.
    """

    index: CacheIndex
    lengths: Tensor
    num_columns: int
    origins: Tensor | None = None
    kvstarts: Tensor | None = None
    begins: Tensor | None = None
    first_position: Tensor | None = None
    spans: tuple[tuple[int, int, int], ...] | None = None
    # Computed once for all layers. Not by ``cached_property``, which takes a lock, and that does not compile.
    _slots: Tensor | None = field(default=None, init=False, repr=False)
    _batches: dict[int, ops.Batch] = field(default_factory=dict, init=False, repr=False)
    _hidden: tuple[int, Tensor | None, ops.Batch] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls,
        index: CacheIndex,
        bases: Sequence[int],
        start: int,
        end: int,
        firsts: Sequence[int],
        texts: Sequence[int],
    ) -> "TokenIndex":
        """Columns ``start .. end`` of a batch.

        Of sequence b, token 0 of the index is in column ``bases[b]``, the first token that is still held in
        column ``firsts[b]``, and the first token of its text in column ``texts[b]``.
        """
        counts, origins = ([position - base for base in bases] for position in (end, start))
        device, rows = index.table.device, len(bases)
        stand_in = any(first > max(start, base) for base, first in zip(bases, firsts, strict=True))
        begins = [max(first - start, 0) for first in firsts] if stand_in else None
        positions = [base - text for base, text in zip(bases, texts, strict=True)]
        both = torch.tensor([*counts, 0, *accumulate(counts)], device=device)  # one copy to the device
        return cls(
            index,
            lengths=both.narrow(0, 0, rows),
            num_columns=end - start,
            origins=torch.tensor(origins, device=device) if any(origins) else None,
            kvstarts=both.narrow(0, rows, rows + 1),
            begins=None if begins is None else torch.tensor(begins, device=device),
            first_position=torch.tensor(positions, device=device) if any(positions) else None,
            spans=tuple(zip(origins, counts, begins or [0] * rows, strict=True)),
        )

    def longer(self, *, is_sliding: bool) -> "TokenIndex":
        """The same columns and one more, whose slots ``index`` has; ``begins`` must be ``None``.

        Args:
            is_sliding: Leave out the first column, so that there are as many as before.
        """
        batch, origins, num_columns = self.batch(1), self.origins, self.num_columns
        kvstarts = batch.kvstarts + batch.seqstarts
        if is_sliding:
            origins = torch.ones_like(self.lengths) if origins is None else origins + 1
        else:
            num_columns += 1
        other = TokenIndex(
            self.index, self.lengths + 1, num_columns, origins, kvstarts, first_position=self.first_position
        )
        other._batches[1] = ops.Batch(
            self.index, batch.seqstarts, kvstarts, first_visible=origins, is_fixed=batch.is_fixed
        )
        return other

    def dense(self) -> "TokenIndex":
        """The same columns in a tensor ``[B, N]`` of slots."""
        lengths, begins = self.lengths, self.begins
        if self.origins is not None:
            lengths, empty = lengths - self.origins, (-self.origins).clamp(min=0)
            begins = empty if begins is None else torch.maximum(begins, empty)
        return TokenIndex(
            dense_index(len(lengths), self.num_columns, lengths.device),
            lengths,
            self.num_columns,
            begins=begins,
            spans=None if begins is not None else ((0, self.num_columns, 0),) * len(lengths),
        )

    @property
    def slots(self) -> Tensor:
        """Slot of each column, ``[B, N]`` int64; an empty column has the slot of some other token."""
        if self._slots is None:
            self._slots = self._find_slots()
        return self._slots

    def positions(self) -> Tensor:
        """Position of each column's token in its text, ``[B, N]`` int64; arbitrary for empty columns."""
        column = torch.arange(self.num_columns, device=self.lengths.device).expand(len(self.lengths), -1)
        for first in (self.origins, self.first_position):
            column = column if first is None else column + first.unsqueeze(1)
        return column

    def own_slots(self) -> Tensor:
        """``slots``, with -1 for empty columns."""
        slots, column = self.slots, torch.arange(self.num_columns, device=self.lengths.device)
        if self.origins is not None:
            slots = torch.where(column + self.origins.unsqueeze(1) < 0, -1, slots)
        return slots if self.begins is None else torch.where(column < self.begins.unsqueeze(1), -1, slots)

    def batch(
        self, num_new: int, first: Tensor | None = None, firsts: Sequence[int] | None = None
    ) -> ops.Batch:
        """Batch with the last ``num_new`` tokens as queries.

        Args:
            num_new: As above.
            first: ``[B]``, columns before this one are hidden.
            firsts: The same on the host; ``None`` if they are not known there.
        """
        if num_new not in self._batches:
            seqstarts = torch.arange(len(self.lengths) + 1, device=self.lengths.device)
            if num_new != 1:
                seqstarts *= num_new
            kvstarts = prefix_sums(self.lengths) if self.kvstarts is None else self.kvstarts
            counts = None
            if num_new != 1:
                counts = self._counts(num_new, None if self.origins is None else [0] * len(self.lengths))
            self._batches[num_new] = ops.Batch(
                self.index,
                seqstarts,
                kvstarts,
                first_visible=self.origins,
                counts=counts,
                is_fixed=self.spans is not None,  # those of fixed storage grow in place
            )
        batch = self._batches[num_new]
        if first is None and self.begins is None:
            return batch
        last = self._hidden  # all layers of a forward hide the same columns
        if last is not None and last[0] == num_new and last[1] is first:
            return last[2]
        hidden = self.begins if first is None else first
        if first is not None and self.begins is not None:
            hidden = torch.maximum(first, self.begins)
        counts = None
        if num_new != 1 and (first is None or firsts is not None):
            counts = self._counts(num_new, firsts or [0] * len(self.lengths))
        if hidden is not None and self.origins is not None:
            hidden = hidden + self.origins
        found = replace(batch, first_visible=hidden, counts=counts)
        self._hidden = num_new, first, found
        return found

    def _counts(self, num_new: int, firsts: Sequence[int] | None) -> ops.Counts | None:
        """Numbers of tokens of ``batch``, columns before ``firsts`` hidden; ``None`` if not known."""
        if self.spans is None:
            return None
        hidden = None
        if firsts is not None:
            spans = zip(firsts, self.spans, strict=True)
            hidden = tuple(max(max(n, begin) + origin, 0) for n, (origin, _, begin) in spans)
        return ops.Counts((num_new,) * len(self.spans), tuple(end for _, end, _ in self.spans), hidden)

    def row(self, b: int) -> "TokenIndex":
        """Sequence b alone."""
        index = replace(
            self.index,
            table=self.index.table[b : b + 1] if self.index.row_starts is None else self.index.table,
            row_starts=None if self.index.row_starts is None else self.index.row_starts[b : b + 2],
        )
        origins, begins, first = (
            None if x is None else x[b : b + 1] for x in (self.origins, self.begins, self.first_position)
        )
        lengths = self.lengths[b : b + 1]
        return TokenIndex(index, lengths, self.num_columns, origins, begins=begins, first_position=first)

    def _find_slots(self) -> Tensor:
        rows, device, index = len(self.lengths), self.lengths.device, self.index
        if self.origins is None and index.row_starts is None and index.page_size < self.num_columns:
            within = torch.arange(index.page_size, device=device)
            every = (index.table[:rows].long().unsqueeze(2) + within).flatten(1)
            return every[:, : self.num_columns].contiguous()
        position = torch.arange(self.num_columns, device=device).expand(rows, -1)
        if self.origins is not None:
            position = (position + self.origins.unsqueeze(1)).clamp(min=0)
        row = torch.arange(rows, device=device).unsqueeze(1).expand_as(position)
        slots = index.slots(row.flatten(), position.flatten()).view(position.shape)
        # A sequence without tokens has no page: slot 0 is a placeholder, which is hidden anyway.
        return slots if self.origins is None else slots.clamp(min=0)


class AlignedStep(NamedTuple):
    """Slots of the new tokens of a forward pass, which the layers use one after the other.

    Attributes:
        start: Position of the first new token.
        end: Position after the last new token.
        stride: Pages in an extent of the storages.
        slots: Slots of the new tokens, ``[B, end - start]``.
        positions: Positions of these tokens in their texts, as ``slots``; ``None`` if no layer needs them.
        visible: Tokens that their attention reads.
        known: ``[B]``, the first valid column of ``visible``, where earlier tokens may be missing; ``None``
            if all are valid.
    """

    start: int
    end: int
    stride: int
    slots: Tensor
    positions: Tensor | None
    visible: TokenIndex
    known: Tensor | None = None
