"""Attention of a step: the first layer of a kind prepares what the others launch.

A layer differs from another in its tensors alone. So what follows from the batch, from shapes, strides and
dtypes, is kept with the batch, and what follows from the cache is kept with its view.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from kvloom.core.memo import form_of
from kvloom.core.views import KVView
from kvloom.ops.impl.triton.attending.attend import bias_of, launch_of, outputs
from kvloom.ops.impl.triton.attending.cache import CacheKind, CacheViews, describe_cache
from kvloom.ops.impl.triton.attending.launch import AttendLaunch, Formula
from kvloom.ops.impl.triton.attending.plan import lengths_of
from kvloom.ops.impl.triton.configs import tuning
from kvloom.ops.scores import Batch, Scores


class OfPart(NamedTuple):
    """Arguments of ``attend_part`` beside those of ``attend``; ``skip_from`` is 0."""

    skip: int | None
    prior: tuple[Tensor | None, Tensor | None]


def attend_step(
    query: Tensor,
    kv: KVView,
    batch: Batch,
    scores: Scores,
    scale: float,
    is_latent: bool,
    part: OfPart | None,
    expect: Callable[[], str | None],
) -> tuple[Tensor, Tensor | None] | None:
    """Result of attention, and for a part, which is float32, the logarithms of its sums.

    Args:
        query: As of ``ops.attend``, on a device.
        kv: The same.
        batch: The same; it is fixed.
        scores: The same, without mask and ALiBi.
        scale: Scale of the scores, also where it is the default.
        is_latent: As of ``ops.attend``.
        part: What makes it a part; ``None`` for all of attention.
        expect: Checks of the arguments, and the reason why these kernels cannot compute this, or ``None``.
            Called unless others with these shapes, strides and dtypes were checked for this batch.

    Returns:
        ``None`` if ``expect`` has a reason.
    """
    cache = kv.recall((query.dtype, is_latent))
    if cache is None:
        if expect() is not None or kv.value is None:
            return None
        cache = describe_cache(kv.key, kv.value, query.dtype, is_latent)
        kv.keep((query.dtype, is_latent), cache)
    views, kind = cache
    bias, sinks = scores.positional_bias, scores.sinks
    waves = (None,) * 3 if bias is None else (bias.coefficients, bias.frequencies, bias.first_position)
    skip, prior = (None, ()) if part is None else part
    key = (
        tuning(), kind, views.num_slots, scale, scores.is_causal, scores.window, scores.softcap,
        part is None, skip, *map(form_of, (query, sinks, *waves, *prior)),
    )  # fmt: skip
    launch = batch.recall(key)
    if launch is None:
        if expect() is not None:
            return None
        launch = _prepare(query, kind, views, batch, scores, scale, skip)
        batch.keep(key, launch)
    out, joint = outputs(query, kind.value_dim, None if part is None else part.prior)
    if not out.numel():
        return out, joint.lse
    launch(query, views, bias_of(None, None, sinks, *waves), joint, out)
    return out, joint.lse


def _prepare(
    query: Tensor,
    kind: CacheKind,
    views: CacheViews,
    batch: Batch,
    scores: Scores,
    scale: float,
    skip: int | None,
) -> AttendLaunch:
    """Launch of a batch for caches of a kind; its plan is launched now."""
    lengths = lengths_of(batch.seqstarts, batch.kvstarts, batch.first_visible, scores.window, skip)
    bias = scores.positional_bias
    pairs = 0 if bias is None else bias.frequencies.shape[1]
    softcap = scores.softcap or 0.0
    formula = Formula(scale, scores.is_causal, softcap, batch.decoding_batches, pairs, 0, 0)
    return launch_of(query, kind, views.num_slots, batch.index, lengths, formula)
