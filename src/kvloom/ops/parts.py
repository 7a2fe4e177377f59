"""Attention in parts: over some of the stored tokens, to be merged with parts over the others.

A part is the result over its tokens alone and the logarithm of the sum of its weights. Two parts a and b are
merged to ``(out_a * exp(lse_a) + out_b * exp(lse_b)) / (exp(lse_a) + exp(lse_b))``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvloom.core.checks import INDEX_DTYPES, INT64_END, expect, expect_range
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops import schemas
from kvloom.ops.attend_arguments import (
    attend_arguments,
    bias_arguments,
    expect_attend,
    latent_view,
)
from kvloom.ops.choice import run
from kvloom.ops.fast import steps
from kvloom.ops.fast.plain import COMPILED, plain_arguments
from kvloom.ops.gathered import attention as gathered
from kvloom.ops.scores import CAUSAL, Batch, Scores


class AttendedPart(NamedTuple):
    """Attention over some of the tokens.

    Attributes:
        out: ``[Tq, Hq, Dv]`` float32; 0 if a row sees none of the tokens.
        lse: ``[Tq, Hq]`` float32, the logarithm of the sum of the exponentials of the scores, sinks included;
            -inf if a row sees none of the tokens, NaN if a score is NaN or infinite.
    """

    out: Tensor
    lse: Tensor


def attend_part(
    query: Tensor,
    kv: KVView,
    batch: Batch,
    scores: Scores = CAUSAL,
    *,
    is_latent: bool = False,
    skip: int | None = None,
    skip_from: Tensor | None = None,
    prior: AttendedPart | None = None,
    backend: str = "auto",
) -> AttendedPart:
    """``attend`` in float32 with the logarithm of its sums, merged with another part.

    The query at position p skips the stored tokens ``j > p - skip`` with ``j >= skip_from[b]``, which belong
    to another part, and those that ``scores`` and ``batch`` hide.

    On CUDA a part with ``skip``, and without ``skip_from``, ``prior`` and sinks, is computed by torch over
    gathered keys and values, as ``attend`` is. A part without ``skip`` is read in place: it is a residual
    window, which has few tokens.

    Args:
        query: As ``attend``.
        kv: As ``attend``; values have a head dim of at least 1.
        batch: As ``attend``.
        scores: As ``attend``; sinks must be those of one part only.
        is_latent: As ``attend``.
        skip: Number of last tokens that a query skips, itself included, at least 1; ``None`` for none.
        skip_from: ``[B]`` int64 or int32, the first stored token that may be skipped; 0 if ``None``.
        prior: Part of the same queries to merge with this one, contiguous.
        backend: As ``attend``.

    Returns:
        The part of all these tokens, in new tensors.

    Raises:
        ShapeError, ArgumentError, UnsupportedError: as ``attend``.
    """
    if prior is not None and not isinstance(prior, AttendedPart):
        raise ArgumentError(f"prior must be an AttendedPart, got {type(prior).__name__}")
    if is_latent:
        kv, is_latent = latent_view(kv)
    before = (None, None) if prior is None else tuple(prior)
    may_gather = backend == "auto" and batch.counts is not None and kv.device.type in gathered.DEVICES

    def expect_all() -> None:
        sizes = expect_attend(query, kv, batch, scores, is_latent)
        if not sizes["Dv"]:
            raise ShapeError("kv must have values of a head dim of at least 1, got 0")
        if skip is not None:
            expect_range("skip", skip, 1, INT64_END)
        if skip_from is not None:
            num_sequences = batch.kvstarts.shape[0] - 1
            expect("skip_from", skip_from, "B", dtype=INDEX_DTYPES, device=kv.device, B=num_sequences)
        if prior is not None:
            _expect_part(prior, sizes, kv.device)

    is_step = batch.is_fixed and kv.key.device.type in steps.DEVICES and backend == "auto"
    if is_step and not may_gather and skip_from is None and steps.is_step(query, scores):
        found = steps.attend_step(query, kv, batch, scores, is_latent, expect_all, skip, before)
        if found is not None and found[1] is not None:
            return AttendedPart(found[0], found[1])
    if (
        backend in COMPILED
        and not may_gather
        and (skip is None or type(skip) is int)
        and not (is_latent and scores.positional_bias is not None)
        and (prior is None or prior.out is not None)  # the kernel would read that as no prior
        and (own := plain_arguments(query, kv, batch, scores, skip_from, *before)) is not None
    ):
        operator = schemas.attend_latent_part if is_latent else schemas.attend_part
        own = *own, skip, skip_from, *before
        if scores.positional_bias is not None:
            operator, own = schemas.attend_part_biased, (*own, *bias_arguments(scores))
        try:
            return AttendedPart(*operator(*own))
        except (ValueError, IndexError, RuntimeError, ArithmeticError):
            pass  # the checks in Python have the better message
    expect_all()
    given = query, kv, batch, scores
    if may_gather and gathered.is_part_gathered(*given, is_latent, skip, skip_from, prior):
        call = gathered.attend_part_plain, *given, skip
        return AttendedPart(*schemas.without_gradient("attend_part", *call))
    own = attend_arguments(query, kv, batch, scores, query.shape[2])
    bias = bias_arguments(scores)
    own = (*own, skip, skip_from, *before, *bias)
    name = "attend_part.latent" if is_latent else "attend_part.biased" if bias else "attend_part"
    return AttendedPart(*schemas.without_gradient("attend_part", run, backend, name, kv.device, *own))


def _expect_part(prior: AttendedPart, sizes: dict[str, int], device: torch.device) -> None:
    known = {name: sizes[name] for name in ("Tq", "Hq", "Dv")}
    expect("prior.out", prior.out, "Tq Hq Dv", dtype=(torch.float32,), device=device, **known)
    known.pop("Dv")
    expect("prior.lse", prior.lse, "Tq Hq", dtype=(torch.float32,), device=device, **known)
    for name, x in zip(AttendedPart._fields, prior, strict=True):
        if not x.is_contiguous():
            raise ArgumentError(f"prior.{name} must be contiguous, got strides {x.stride()}")
