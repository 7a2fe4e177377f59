"""Stored tokens of a batch where they lie: attended to in place, or gathered.

Letters: B sequences, N columns, Q new tokens of each sequence, H key/value heads, Hq query heads, Dk and Dv
head dims. A column is one token of every sequence, as in ``[B, H, N, D]``; a shorter sequence ends with the
others and has columns in front that hold nothing.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.rotation import Rotation
from kvloom.core.indexing import CacheIndex, prefix_sums
from kvloom.core.views import KVView

_CAUSAL = ops.Scores()


@dataclass(eq=False)
class TokenIndex:
    """Where N columns of B sequences lie: the same in every layer that shares a page table.

    Attributes:
        index: Slots of every stored token of each sequence.
        lengths: ``[B]`` int64, stored tokens of each sequence, those before the first column included.
        num_columns: N.
        origins: ``[B]`` int64, which stored token stands in column 0; negative where columns in front hold
            nothing; ``None`` for 0.
        kvstarts: ``[B + 1]`` int64, sums of ``lengths``, if they are known.
    """

    index: CacheIndex
    lengths: Tensor
    num_columns: int
    origins: Tensor | None = None
    kvstarts: Tensor | None = None
    # Made once for all layers, by hand: ``cached_property`` takes a lock, which does not compile.
    _slots: Tensor | None = field(default=None, init=False, repr=False)
    _batches: dict[int, ops.Batch] = field(default_factory=dict, init=False, repr=False)

    @property
    def slots(self) -> Tensor:
        """Slot of each column, ``[B, N]`` int64; a column that holds nothing has that of some token."""
        if self._slots is None:
            self._slots = self._find_slots()
        return self._slots

    def own_slots(self) -> Tensor:
        """``slots``, with -1 where a column holds nothing."""
        if self.origins is None:
            return self.slots
        column = torch.arange(self.num_columns, device=self.origins.device)
        return torch.where(column + self.origins.unsqueeze(1) < 0, -1, self.slots)

    def batch(self, num_new: int, first: Tensor | None = None) -> ops.Batch:
        """The last ``num_new`` tokens of each sequence are queries; columns before ``first`` ``[B]`` hide."""
        if num_new not in self._batches:
            seqstarts = torch.arange(len(self.lengths) + 1, device=self.lengths.device)
            if num_new != 1:
                seqstarts *= num_new
            kvstarts = prefix_sums(self.lengths) if self.kvstarts is None else self.kvstarts
            self._batches[num_new] = ops.Batch(self.index, seqstarts, kvstarts, first_visible=self.origins)
        batch = self._batches[num_new]
        if first is None:
            return batch
        return replace(batch, first_visible=first if self.origins is None else first + self.origins)

    def row(self, b: int) -> "TokenIndex":
        """Sequence b alone."""
        index = replace(
            self.index,
            table=self.index.table[b : b + 1] if self.index.row_starts is None else self.index.table,
            row_starts=None if self.index.row_starts is None else self.index.row_starts[b : b + 2],
        )
        origins = None if self.origins is None else self.origins[b : b + 1]
        return TokenIndex(index, self.lengths[b : b + 1], self.num_columns, origins)

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
        # A sequence without tokens has no page; some other token stands in for what is hidden anyway.
        return slots if self.origins is None else slots.clamp(min=0)


class Step(NamedTuple):
    """New tokens that the layers of a batch store one after the other.

    Attributes:
        start: Position of the first of them.
        end: Position behind the last.
        stride: Pages in an extent of the storages.
        slots: ``[B, end - start]``.
        visible: What their attention reads.
    """

    start: int
    end: int
    stride: int
    slots: Tensor
    visible: TokenIndex


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """N columns of B sequences of one layer.

    Attributes:
        view: Keys and values of the layer.
        index: Where the columns lie in it.
        window: Tokens that a token sees, itself included; ``None`` for all before it.
        rows: Keys and values ``[B, H, N, D]`` as views of the cache, if they can be.
        rotation: How the view's keys and values are rotated; ``None`` if they are not.
    """

    view: KVView
    index: TokenIndex
    window: int | None = None
    rows: tuple[Tensor, Tensor] | None = None
    rotation: Rotation | None = None

    def gather(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys ``[B, H, N, Dk]`` and values ``[B, H, N, Dv]``: dequantized copies, or views."""
        if self.rows is not None and self.rows[0].dtype == self.rows[1].dtype == dtype:
            return self.rows
        found: tuple[Tensor, Tensor] = ops.load(self.index.slots, self.view, dtype=dtype)
        return found if self.rotation is None else self.rotation.turned(*found)

    def attend(
        self,
        query: Tensor,
        scores: ops.Scores = _CAUSAL,
        *,
        first: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attention of the last Q columns over all of them, reading the cache in place.

        Args:
            query: ``[B, Hq, Q, Dk]``.
            scores: As ``ops.attend``, without window and mask.
            first: ``[B]``, the first visible column of each sequence; all if ``None``.
            mask: ``[B or 1, Hq or 1, Q, N]``, bool (true is visible) or added to the scores. It says all,
                also of the window.

        Returns:
            ``[B, Q, Hq, Dv]``.
        """
        if self.rotation is not None:
            plain, turned = replace(self, rotation=None), self.rotation.query(query)
            return self.rotation.output(plain.attend(turned, scores, first=first, mask=mask))
        if mask is not None:
            rows = range(query.shape[0])
            return torch.cat([self._attend_row(query[b : b + 1], scores, first, mask, b) for b in rows])
        if self.window is not None:
            scores = replace(scores, window=self.window)
        num_new = query.shape[2]
        batch = self.index.batch(num_new, first)
        if num_new == 1:
            return ops.attend(query.squeeze(2), self.view, batch, scores).unsqueeze(1)
        out: Tensor = ops.attend(query.transpose(1, 2).flatten(0, 1), self.view, batch, scores)
        return out.view(query.shape[0], num_new, *out.shape[1:])

    def _attend_row(
        self, query: Tensor, scores: ops.Scores, first: Tensor | None, mask: Tensor, b: int
    ) -> Tensor:
        """One sequence by itself, since the mask of ``ops.attend`` has the tokens of all in one axis."""
        index = self.index.row(b)
        block = mask[b if mask.shape[0] > 1 else 0]
        if block.dtype == torch.bool:
            block = torch.zeros(block.shape, device=block.device).masked_fill(~block, float("-inf"))
        if index.origins is not None:  # columns of the mask become stored tokens
            before = int(index.origins)
            block = torch.nn.functional.pad(block, (before, 0)) if before > 0 else block[..., -before:]
        heads = query.shape[1]
        block = block[0] if block.shape[0] == 1 else block.expand(heads, -1, -1)
        batch = index.batch(query.shape[2], None if first is None else first[b : b + 1])
        out = ops.attend(query[0].transpose(0, 1), self.view, batch, replace(scores, mask=block))
        return out[None]
