"""Attention to codes and, beside them, to a residual window: each token is read in one of the two.

Shapes: T new tokens, Hq query heads, Dk and Dv head dims.
"""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from kvloom import ops
from kvloom.caches.tensors.transform import Transform, attend_part
from kvloom.core.views import KVView
from kvloom.ops.gathered import attention as gathered


class Unquantized(NamedTuple):
    """What queries read unquantized.

    Attributes:
        view: Keys and values.
        batch: Slots of the tokens in ``view``, and the queries.
        scores: Masks and biases of attention to them, without sinks.
    """

    view: KVView
    batch: ops.Batch
    scores: ops.Scores


def scores_of_newest(scores: ops.Scores, num_newest: int) -> ops.Scores:
    """Scores of attention to the residual window alone; sinks belong to one of both parts only."""
    window = num_newest if scores.window is None else min(scores.window, num_newest)
    return replace(scores, window=window, sinks=None)


def attend_beside(
    query: Tensor,
    newest: Unquantized,
    view: KVView,
    batch: ops.Batch,
    scores: ops.Scores,
    transform: Transform | None,
    first_position: Tensor | None = None,
    is_latent: bool = False,
    *,
    skip: int | None,
    skip_from: Tensor | None = None,
) -> Tensor:
    """Attention to all tokens: to the residual window of each query, merged with that to codes.

    Args:
        query: ``[T, Hq, Dk]``.
        newest: What is read unquantized.
        view: The codes of all tokens.
        batch: Slots of these codes, and the queries.
        scores: Masks and biases of attention to the codes.
        transform: Transform of the keys and values before they became codes; ``None`` for none.
        first_position: As ``TokenIndex.first_position``.
        is_latent: As ``ops.attend``.
        skip: Length of the residual window, as of ``ops.attend_part``.
        skip_from: The same.

    Returns:
        ``[T, Hq, Dv]``.
    """
    how = transform, first_position, is_latent
    if batch.counts is not None:
        codes = query, view, batch, replace(scores, sinks=None)
        if gathered.is_part_gathered(*codes, is_latent, skip, skip_from, None):
            # Codes first, since the kernel that reads the residual window merges both, and sinks.
            part = attend_part(*codes, *how, skip=skip)
            own = newest._replace(scores=replace(newest.scores, sinks=scores.sinks))
            return ops.attend_part(query, *own, prior=part).out.to(query.dtype)
    part = ops.attend_part(query, *newest, is_latent=is_latent)
    found = attend_part(query, view, batch, scores, *how, skip=skip, skip_from=skip_from, prior=part)
    return found.out.to(query.dtype)
