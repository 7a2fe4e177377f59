"""Sparse attention: each query reads tokens that were chosen for it, in place.

Shapes: B sequences, N columns, Q new tokens of each, K chosen columns, Hq query heads, Dk and Dv head dims.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.tensors.residual import Unquantized, attend_beside
from kvloom.caches.tensors.token_index import TokenIndex
from kvloom.caches.tensors.tokens import Tokens
from kvloom.caches.tensors.transform import attend
from kvloom.core.indexing import CacheIndex, prefix_sums


def attend_chosen(
    tokens: Tokens, query: Tensor, chosen: Tensor, scores: ops.Scores, first: Tensor | None = None
) -> Tensor:
    """Attention of the last Q columns, each to its chosen columns that are visible to it.

    Each query becomes a sequence with a table of its chosen slots, so the cost is proportional to the tokens
    that it reads.

    Args:
        tokens: Tokens without a window, whose keys have no smoothing that depends on positions.
        query: ``[B, Hq, Q, Dk]``.
        chosen: ``[B, Q, K]`` int32 or int64, distinct columns of each query. Negative ones, those after the
            query and empty ones are ignored.
        scores: As ``ops.attend``, without window, mask and ALiBi.
        first: ``[B]``, the first visible column of each sequence; all if ``None``.

    Returns:
        ``[B, Q, Hq, Dv]``; 0 where a query sees nothing.
    """
    index, exact, transform = tokens.index, tokens.exact, tokens.transform
    num_new, device = query.shape[2], query.device
    last = index.lengths if index.origins is None else index.lengths - index.origins
    position = (last - num_new).unsqueeze(1) + torch.arange(num_new, device=device)  # [B, Q]
    chosen, position = chosen.long(), position.unsqueeze(2)
    seen = (chosen >= 0) & (chosen <= position)
    if first is not None:
        seen &= chosen >= first.view(-1, 1, 1)
    scores = replace(scores, is_causal=False)  # a query may see nothing
    packed = query.transpose(1, 2).flatten(0, 1)  # [B * Q, Hq, Dk]
    is_latent = tokens.is_latent
    if exact is None:
        batch = _batch(index, chosen, seen)
        out = attend(packed, tokens.view, batch, scores, transform, None, is_latent)
    else:
        column = chosen - exact.before(index.num_columns)
        newest = seen & (column >= 0) & (chosen > position - exact.num_newest)
        if exact.known is not None:
            newest &= column >= exact.known.view(-1, 1, 1)
        of_newest = _batch(exact.tokens.index, column, newest), replace(scores, sinks=None)
        batch = _batch(index, chosen, seen & ~newest)
        codes = tokens.view, batch, scores, transform, None, is_latent
        out = attend_beside(packed, Unquantized(exact.tokens.view, *of_newest), *codes, skip=None)
    return out.view(len(query), num_new, *out.shape[1:])


def _batch(index: TokenIndex, columns: Tensor, seen: Tensor) -> ops.Batch:
    """Batch of a sequence for each query ``[B, Q]``: its ``seen`` ``columns`` ``[B, Q, K]``, sorted."""
    rows, num_new, count = columns.shape
    slots = index.own_slots()
    inside = columns.clamp(0, index.num_columns - 1)
    seen = seen & (slots.gather(1, inside.flatten(1)).view_as(columns) >= 0)
    ordered = inside.masked_fill(~seen, index.num_columns).sort(-1).values
    where = ordered.clamp(max=index.num_columns - 1).flatten(1)
    table = slots.gather(1, where).view(rows * num_new, count)
    starts = torch.arange(rows * num_new + 1, device=columns.device)
    return ops.Batch(CacheIndex.pages(table, 1), starts, prefix_sums(seen.sum(-1).flatten()))
