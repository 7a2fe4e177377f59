"""Attention metadata of a step: slots and batch, made once for all layers of a group.

Shapes: T new tokens of all requests, R requests, P blocks of a request.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex, prefix_sums
from kvloom.errors import UnsupportedError


@dataclass(frozen=True, slots=True, eq=False)
class VllmStep:
    """Attention metadata of one forward pass, shared by all layers.

    Attributes:
        num_tokens: T; rows after them in a model's tensors are padding.
        batch: Index and lengths of all tokens.
    """

    num_tokens: int
    batch: ops.Batch
    _positions: list[Tensor] = field(default_factory=list, init=False, repr=False)

    @property
    def positions(self) -> Tensor:
        """``[T]`` int64: position of each new token in its request, computed once for all layers."""
        if not self._positions:
            starts, ends = self.batch.seqstarts, self.batch.kvstarts.diff()
            first = ends - starts[1:]  # length of each request minus the end of its rows
            behind = first.repeat_interleave(starts.diff(), output_size=self.num_tokens)
            self._positions.append(behind + torch.arange(self.num_tokens))
        return self._positions[0]

    def of_first(self, num_requests: int, num_tokens: int) -> "VllmStep":
        """The step of the first requests alone, with ``num_tokens`` new tokens."""
        batch, end = self.batch, num_requests + 1
        index = replace(batch.index, table=batch.index.table[:num_requests])
        return VllmStep(num_tokens, ops.Batch(index, batch.seqstarts[:end], batch.kvstarts[:end]))

    @classmethod
    def of(
        cls,
        query_starts: Tensor,
        lengths: Tensor,
        block_table: Tensor,
        block_size: int,
        *,
        num_tokens: int,
        max_length: int,
    ) -> "VllmStep":
        """The step of some requests; tensors are copied, since vLLM overwrites them in the next step.

        Args:
            query_starts: ``[R + 1]`` int32, starts of the new tokens.
            lengths: ``[R]`` int32, number of stored tokens of each request, new ones included.
            block_table: ``[R, P]`` int32, ids of blocks; ids after a request's last block are not read.
            block_size: Tokens in a block.
            num_tokens: T.
            max_length: Upper bound of ``lengths``.
        """
        used = block_table[:, : -(-max_length // block_size)]
        index = CacheIndex.blocks(used, block_size)
        return cls(num_tokens, ops.Batch(index, query_starts.long(), prefix_sums(lengths)))


def step_of(metadata: Any, block_size: int) -> VllmStep:
    """Make the step of a group.

    Args:
        metadata: vLLM's ``CommonAttentionMetadata`` of the group.
        block_size: Tokens in its blocks.

    Raises:
        UnsupportedError: attention is not causal.
    """
    m = metadata
    if m.causal is not True:
        raise UnsupportedError(f"attention to pages of kvloom must be causal, got causal={m.causal}")
    return VllmStep.of(
        m.query_start_loc[: m.num_reqs + 1],
        m.seq_lens[: m.num_reqs],
        m.block_table_tensor[: m.num_reqs],
        block_size,
        num_tokens=m.num_actual_tokens,
        max_length=m.max_seq_len,
    )
