"""Where the tokens of a step lie: made once, for all layers.

Letters: T new tokens of all requests, B requests, P pages of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvloom import ops
from kvloom.core.indexing import CacheIndex


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What all layers of a forward share.

    Attributes:
        slots: ``[T]``, where the new tokens go.
        batch: Where all tokens lie.
    """

    slots: Tensor
    batch: ops.Batch

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int]], tables: Sequence[Tensor], page_size: int) -> "Step":
        """The step of some requests.

        Args:
            lengths: Stored and new tokens of each.
            tables: First slots ``[P]`` of the pages of each.
            page_size: Tokens in a page.
        """
        device = tables[0].device
        stored, new = torch.tensor(lengths, device=device).unbind(1)
        starts = torch.zeros(2, len(lengths) + 1, dtype=torch.int64, device=device)
        torch.cumsum(torch.stack((new, stored + new)), 1, out=starts[:, 1:])
        seqstarts, kvstarts = starts
        index = CacheIndex.pages(pad_sequence(list(tables), True, -1.0), page_size)
        sequence = torch.repeat_interleave(new)
        position = torch.arange(len(sequence), device=device) + (stored - seqstarts[:-1])[sequence]
        return cls(index.slots(sequence, position), ops.Batch(index, seqstarts, kvstarts))
