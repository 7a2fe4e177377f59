"""A step over rows of any length, made before the layers and shared by all of them.

Shapes: T new tokens of all rows, B rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.rows.row import Row
from kvloom.core.indexing import prefix_sums, ragged_positions


class GroupStep(NamedTuple):
    """Attention metadata of one group of layers.

    Attributes:
        slots: ``[T]``, slots of the new tokens.
        batch: Batch that attention reads.
        first_position: ``[B]``, position of the first token in the index of each row; ``None`` for 0.
    """

    slots: Tensor
    batch: ops.Batch
    first_position: Tensor | None


class Step:
    """Attention metadata of one forward pass.

    Args:
        lengths: Numbers of stored and new tokens of each row.
        groups: Groups of layers.
        tables: For each group, its rows.

    Attributes:
        groups: Metadata of each group.
        num_tokens: T.
        positions: ``[T]``, positions of the new tokens in their texts.
    """

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        groups: Sequence[PrefixGroup],
        tables: Sequence[Sequence[Row]],
    ) -> None:
        storages = [next(iter(group.storages.values())) for group in groups]
        device = storages[0].device
        stored, new = torch.tensor(lengths, device=device).unbind(1)
        seqstarts, self.num_tokens = prefix_sums(new), sum(count for _, count in lengths)
        sequence, position = ragged_positions(seqstarts, stored, total=self.num_tokens)
        self.positions = position
        self.groups: list[GroupStep] = []
        for group, held, storage in zip(groups, tables, storages, strict=True):
            index, begins = group.index_of(held, storage)
            ends, own, bases = stored + new, position, None
            if any(begins):
                bases = torch.tensor(begins, device=device)
                ends, own = ends - bases, position - bases[sequence]
            counts = None
            if self.num_tokens > len(lengths):  # more than a decoding step
                held_now = [sum(both) - begin for both, begin in zip(lengths, begins, strict=True)]
                counts = ops.Counts(tuple(count for _, count in lengths), tuple(held_now))
            batch = ops.Batch(index, seqstarts, prefix_sums(ends), counts=counts, is_fixed=True)
            self.groups.append(GroupStep(index.slots(sequence, own), batch, bases))
