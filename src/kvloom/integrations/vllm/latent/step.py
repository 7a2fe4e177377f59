"""Latent attention (MLA) of one step over vLLM's pages, by latents or by expansion; does not import vLLM.

Shapes: Q new tokens of a request, N all of its tokens, H heads; ``nope`` and ``rope`` elements of a query
without and with positions, ``v`` of a value, ``rank`` of a latent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.tensors.absorption import LatentSizes, is_faster_expanded
from kvloom.caches.tensors.transform import Transform, stored_by
from kvloom.core.indexing import CacheIndex
from kvloom.core.views import KVView
from kvloom.integrations.vllm.builder import VllmStep, step_of


@dataclass(frozen=True, slots=True, eq=False)
class Expanded:
    """A request whose latents are expanded.

    Attributes:
        rows: Rows of its new tokens among those of all such requests.
        slots: ``[N]`` int64, slots of its latents.
        batch: Batch of the new tokens and N contiguous keys.
    """

    rows: slice
    slots: Tensor
    batch: ops.Batch


@dataclass(frozen=True, slots=True, eq=False)
class LatentStep:
    """Attention metadata of one forward pass, with the names that vLLM's layers of latent attention read.

    Attributes:
        num_actual_tokens: Number of new tokens of all requests.
        num_decodes: Number of requests that attend to latents; they come first.
        num_decode_tokens: Number of new tokens of these.
        num_prefills: Number of requests whose latents are expanded.
        decode: Step of the requests that attend to latents; ``None`` if there are none.
        prefill: Requests whose latents are expanded.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: VllmStep | None
    prefill: list[Expanded]


def latent_step_of(metadata: Any, block_size: int, sizes: LatentSizes | None) -> LatentStep:
    """Make the step of a group.

    Requests are expanded from the last one backwards, up to the first that is not faster when expanded. vLLM
    puts prompts that begin last, and prompts that continue before them. So a request that would be faster
    expanded attends to latents if a request after it does.

    Args:
        metadata: vLLM's ``CommonAttentionMetadata`` of the group.
        block_size: Tokens in its blocks.
        sizes: Sizes of its layers; ``None`` if no latents are to be expanded.

    Raises:
        UnsupportedError: attention is not causal.
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
        view: Pages of the layer.
        request: Slots and batch of the request.
        expand: Function from latents ``[N, rank]`` to ``[N, H * (nope + v)]``.
        scores: Options of the model's scores.
        transform: Transform of latents before they were stored; ``None`` for none.

    Returns:
        ``[Q, H, v]``.
    """
    latents, rope = ops.load(request.slots, view, dtype=query.dtype, **stored_by(transform))
    heads, nope = query.shape[1], query.shape[2] - rope.shape[2]
    expanded = expand(latents.squeeze(1)).unflatten(-1, (heads, -1))
    key = torch.cat((expanded[..., :nope], rope.expand(-1, heads, -1)), -1)
    return ops.attend(query, KVView.split("T H D", key, expanded[..., nope:]), request.batch, scores)


def expanded_in(index: CacheIndex, request: int, num_tokens: int, rows: slice) -> Expanded:
    """``Expanded`` for a request of an index with ``num_tokens`` tokens; ``rows`` has its queries."""
    slots = index.slots(torch.full((num_tokens,), request), torch.arange(num_tokens))
    dense = CacheIndex.blocks(torch.zeros(1, 1, dtype=torch.int64), num_tokens)
    num_new = rows.stop - rows.start
    batch = ops.Batch(dense, torch.tensor([0, num_new]), torch.tensor([0, num_tokens]))
    return Expanded(rows, slots, batch)
