"""Attention metadata of a step: slots and batch, made once for all layers of a group.

Shapes: T new tokens of all requests, R requests, P blocks of a request.
"""

from dataclasses import dataclass

from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex, prefix_sums


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Attention metadata of one forward pass, shared by all layers.

    Attributes:
        num_tokens: T; what a model's tensors have after them is padding.
        batch: Where all tokens lie.
    """

    num_tokens: int
    batch: ops.Batch

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
    ) -> "Step":
        """The step of some requests; of the tensors, which vLLM writes again in the next step, it has copies.

        Args:
            query_starts: ``[R + 1]`` int32, those of new tokens.
            lengths: ``[R]`` int32, stored tokens of each, the new ones included.
            block_table: ``[R, P]`` int32 ids of blocks; what follows a request's last is not read.
            block_size: Tokens in a block.
            num_tokens: T.
            max_length: No request has more stored tokens.
        """
        used = block_table[:, : -(-max_length // block_size)]
        index = CacheIndex.blocks(used, block_size)
        return cls(num_tokens, ops.Batch(index, query_starts.long(), prefix_sums(lengths)))
