"""Latent attention (MLA) of one step over pages of vLLM's: which latents are expanded, and how; without vLLM.

Shapes: Q new tokens of a request, N all of its tokens, H heads; ``nope`` and ``rope`` elements of a query
without and with positions, ``v`` of a value, ``rank`` of a latent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.absorption import LatentSizes, is_faster_expanded
from kvloom.caches.transform import Transform
from kvloom.core.indexing import CacheIndex
from kvloom.core.views import KVView
from kvloom.integrations.vllm.builder import Step, step_of


@dataclass(frozen=True, slots=True, eq=False)
class Expanded:
    """A request whose latents are expanded.

    Attributes:
        rows: Its new tokens among those of all such requests.
        slots: ``[N]`` int64, where its latents lie.
        batch: Attention of the new tokens to N keys in one piece.
    """

    rows: slice
    slots: Tensor
    batch: ops.Batch


@dataclass(frozen=True, slots=True, eq=False)
class LatentStep:
    """Attention metadata of one forward pass, by the names that vLLM's layers of latent attention read.

    Attributes:
        num_actual_tokens: New tokens of all requests.
        num_decodes: Requests that attend to latents. They come first.
        num_decode_tokens: New tokens of these.
        num_prefills: Requests whose latents are expanded.
        decode: The step of the first ones; ``None`` if there are none.
        prefill: The others.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: Step | None
    prefill: list[Expanded]


def latent_step_of(metadata: Any, block_size: int, sizes: LatentSizes | None) -> LatentStep:
    """The step of a group.

    The last requests are expanded, as many as are faster so, each judged by its own numbers. vLLM has prompts
    that begin last, and before them those that go on, which are attended to as latents where one behind them
    is.

    Args:
        metadata: vLLM's ``CommonAttentionMetadata`` of it.
        block_size: Tokens in its blocks.
        sizes: Of its layers; ``None`` if no latents are to be expanded.

    Raises:
        UnsupportedError: it does not attend causally.
    """
    whole = step_of(metadata, block_size)
    starts, lengths = whole.batch.seqstarts.tolist(), whole.batch.kvstarts.diff().tolist()
    first = len(lengths)
    while (
        sizes is not None
        and first
        and is_faster_expanded(starts[first] - starts[first - 1], lengths[first - 1], sizes)
    ):
        first -= 1
    num_tokens, requests = starts[first], range(first, len(lengths))
    expanded = [
        expanded_in(
            whole.batch.index, r, lengths[r], slice(starts[r] - num_tokens, starts[r + 1] - num_tokens)
        )
        for r in requests
    ]
    return LatentStep(
        num_actual_tokens=whole.num_tokens,
        num_decodes=first,
        num_decode_tokens=num_tokens,
        num_prefills=len(expanded),
        decode=whole.of_first(first, num_tokens) if first else None,
        prefill=expanded,
    )


def attend_expanded(
    query: Tensor,
    view: KVView,
    request: Expanded,
    expand: Callable[[Tensor], Tensor],
    scores: ops.Scores,
    transform: Transform | None = None,
) -> Tensor:
    """Attention of a request's new tokens to keys and values that are made of its stored latents.

    Args:
        query: ``[Q, H, nope + rope]``.
        view: The pages of the layer.
        request: Where its tokens lie.
        expand: Makes ``[N, H * (nope + v)]`` of latents ``[N, rank]``.
        scores: Of the model.
        transform: What was done to latents before they were stored; ``None`` for nothing.

    Returns:
        ``[Q, H, v]``.
    """
    latents, rope = ops.load(request.slots, view, dtype=query.dtype)
    if transform is not None:
        latents, rope = transform.restored(latents, rope, None)
    heads, nope = query.shape[1], query.shape[2] - rope.shape[2]
    expanded = expand(latents.squeeze(1)).unflatten(-1, (heads, -1))
    key = torch.cat((expanded[..., :nope], rope.expand(-1, heads, -1)), -1)
    return ops.attend(query, KVView.split("T H D", key, expanded[..., nope:]), request.batch, scores)


def expanded_in(index: CacheIndex, request: int, num_tokens: int, rows: slice) -> Expanded:
    """A request of an index, all of its ``num_tokens``; ``rows`` are its new ones among the queries."""
    slots = index.slots(torch.full((num_tokens,), request), torch.arange(num_tokens))
    dense = CacheIndex.blocks(torch.zeros(1, 1, dtype=torch.int64), num_tokens)
    num_new = rows.stop - rows.start
    batch = ops.Batch(dense, torch.tensor([0, num_new]), torch.tensor([0, num_tokens]))
    return Expanded(rows, slots, batch)
