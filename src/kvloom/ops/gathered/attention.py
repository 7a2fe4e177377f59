"""Attention of many new tokens by torch's own kernel, over keys and values gathered for the call.

Gathering reads and writes each token once, and then torch's attention reads contiguous keys at twice the
speed of kernels that read pages. So it takes less time where many queries share the tokens. The numbers of
tokens, which torch's attention wants on the host, are those of ``Batch.counts``: nobody waits for the device.

Shapes: B sequences, Tq new tokens of all, H key/value heads, Hq query heads, Dk and Dv head dims; R sequences
of one run with Q new tokens each, which see N tokens each.
"""

import math
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import torch
from torch import Tensor

from kvloom.core.views import KVView
from kvloom.ops.attend_arguments import attend_arguments
from kvloom.ops.choice import run as call
from kvloom.ops.gathered.flash import attention, attention_part, why_not_on_cuda
from kvloom.ops.gathered.plan import GatheredRun, GatherPlan, Others, expect_counts, plan_of
from kvloom.ops.impl.cpu import is_batch_invariant
from kvloom.ops.scores import Batch, Scores

DEVICES: Final = ["cuda"]
"""Types of devices where torch's attention over gathered tokens takes less time. Tests add others."""

LEAST_ROWS: Final = 512
"""Least number of new tokens of a sequence, times query heads of a key/value head, that are worth a gather.

A gather costs two transfers of each token: 1 KiB of bfloat16 keys and values of 128 elements, 0.3 ns on a
device of 3.4 TB/s. A row is 512 operations for each token, and saves 0.85 ps where 300 TFLOP/s become 600. So
from 360 rows on.
"""

MOST_BYTES: Final = 1 << 30
"""Bytes of keys and values that are gathered at once, if a single sequence does not take more."""

Load = Callable[[GatheredRun], tuple[Tensor, Tensor]]
"""Keys and values ``[R, H, N, D]`` of a run, as the queries need them."""
Rest = Callable[[Others], Tensor]
"""Attention ``[T, Hq, Dv]`` of sequences that are not gathered."""
RestOfPart = Callable[[Others], tuple[Tensor, Tensor]]
"""The same of a part, float32, and the logarithms ``[T, Hq]`` of its sums."""
_Found = TypeVar("_Found")


def is_gathered(query: Tensor, kv: KVView, batch: Batch, scores: Scores, is_latent: bool) -> bool:
    """Whether ``attend`` is to be called, with arguments that ``ops.attend`` takes."""
    counts = batch.counts
    if counts is None or kv.device.type not in DEVICES or not counts.new or not query.shape[1]:
        return False
    is_worth_it = max(counts.new) >= _least_new(query, kv)
    return is_worth_it and why_not(query, kv, batch, scores, is_latent) is None


def is_part_gathered(
    query: Tensor,
    kv: KVView,
    batch: Batch,
    scores: Scores,
    is_latent: bool,
    skip: int | None,
    skip_from: Tensor | None,
    prior: object,
) -> bool:
    """Whether ``attend_part`` is to be called, with arguments that ``ops.attend_part`` takes.

    What skips no tokens is a residual window, which has too few of them for a gather.
    """
    is_plain = skip is not None and skip_from is None and prior is None and scores.sinks is None
    return is_plain and is_gathered(query, kv, batch, scores, is_latent)


def _least_new(query: Tensor, kv: KVView) -> int:
    """Number of new tokens of a sequence from which on it is gathered."""
    return max(1, -(-LEAST_ROWS * kv.num_heads // query.shape[1]))


def why_not(query: Tensor, kv: KVView, batch: Batch, scores: Scores, is_latent: bool) -> str | None:
    """Reason why torch's attention cannot compute this over gathered tokens; ``None`` if it can."""
    if torch.compiler.is_compiling():
        return "sizes are compiled in"
    if batch.counts is None:
        return "the numbers of tokens are on the device alone"
    if is_latent:
        return "queries are over latents"
    for name in ("mask", "alibi_slopes", "softcap", "positional_bias"):
        if getattr(scores, name) is not None:
            return f"scores have {name}"
    if not scores.is_causal or batch.decoding_batches:
        return "queries see later tokens"
    if kv.value is None or kv.value.head_dim == 0:
        return "there are no values"
    if batch.first_visible is not None and batch.counts.first is None:
        return "hidden tokens are known on the device alone"
    if is_batch_invariant():
        return "torch's attention is not batch invariant"
    if kv.device.type != "cuda":
        return None
    head_dim = max(query.shape[2], kv.value.head_dim)
    return why_not_on_cuda(kv.device, query.dtype, head_dim)


def attend_plain(query: Tensor, kv: KVView, batch: Batch, scores: Scores) -> Tensor:
    """``attend`` to keys and values as they are stored."""

    def rest(others: Others) -> Tensor:
        own = attend_arguments(query[others.rows], kv, others.batch, scores, query.shape[2])
        found: Tensor = call("auto", "attend", kv.device, *own)
        return found

    return attend(query, kv, batch, scores, _loading(kv, query.dtype), rest)


def attend_part_plain(
    query: Tensor, kv: KVView, batch: Batch, scores: Scores, skip: int | None
) -> tuple[Tensor, Tensor]:
    """``attend_part`` to keys and values as they are stored."""

    def rest(others: Others) -> tuple[Tensor, Tensor]:
        own = attend_arguments(query[others.rows], kv, others.batch, scores, query.shape[2])
        found: tuple[Tensor, Tensor] = call("auto", "attend_part", kv.device, *own, skip, None, None, None)
        return found

    return attend_part(query, kv, batch, scores, skip, _loading(kv, query.dtype), rest)


def _loading(kv: KVView, dtype: torch.dtype) -> Load:
    """``Load`` of what is stored."""

    def load(run: GatheredRun) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = call("auto", "load", kv.device, run.slots, *kv.tensors, dtype, 1)
        return found

    return load


def attend(query: Tensor, kv: KVView, batch: Batch, scores: Scores, load: Load, rest: Rest) -> Tensor:
    """Attention ``[Tq, Hq, Dv]`` where ``is_gathered`` says so; arguments are checked.

    Sequences whose new tokens are few are not gathered. A row that sees no token gives 0. At most
    ``MOST_BYTES``, or one sequence's keys and values of this layer, are gathered at a time, and freed before
    the next.

    Args:
        query: As of ``ops.attend``.
        kv: The same.
        batch: The same.
        scores: The same.
        load: As ``Load``.
        rest: As ``Rest``, for the same queries and scores.

    Raises:
        ArgumentError: the counts are not those of the batch.
        OutOfMemory, torch.OutOfMemoryError: there is no memory to gather; nothing was changed.
    """
    plan, sinks = _plan(query, kv, batch, scores, None), scores.sinks
    out = query.new_zeros((*query.shape[:2], kv.sides[1].head_dim))
    if sinks is None:
        for run, found in _attended(query, kv, scores, plan, load, attention):
            run.of(out).copy_(found)
    else:  # one more weight of each sum, without a value
        for run, (found, lse) in _attended(query, kv, scores, plan, load, attention_part):
            run.of(out).copy_(found * (lse - sinks.float()).sigmoid().unsqueeze(-1))
    if plan.others is not None:
        out[plan.others.rows] = rest(plan.others)
    return out


def attend_part(
    query: Tensor, kv: KVView, batch: Batch, scores: Scores, skip: int | None, load: Load, rest: RestOfPart
) -> tuple[Tensor, Tensor]:
    """``attend`` of queries that skip their last tokens, in float32, with the logarithms of its sums.

    Args:
        query: As of ``ops.attend_part``.
        kv: The same.
        batch: The same.
        scores: The same, without sinks.
        skip: The same.
        load: As ``Load``.
        rest: As ``RestOfPart``, for the same queries and scores.

    Returns:
        As ``ops.attend_part``.

    Raises:
        ArgumentError, OutOfMemory, torch.OutOfMemoryError: as ``attend``.
    """
    plan = _plan(query, kv, batch, scores, skip)
    out = query.new_zeros((*query.shape[:2], kv.sides[1].head_dim), dtype=torch.float32)
    lse = out.new_full(out.shape[:2], float("-inf"))
    for run, found in _attended(query, kv, scores, plan, load, attention_part, skip or 0):
        run.of(out).copy_(found[0])
        run.of(lse).copy_(found[1])
    if plan.others is not None:
        out[plan.others.rows], lse[plan.others.rows] = rest(plan.others)
    return out, lse


def _plan(query: Tensor, kv: KVView, batch: Batch, scores: Scores, skip: int | None) -> GatherPlan:
    """Plan of a batch, whose counts are checked."""
    expect_counts(query, batch)
    return plan_of(batch, _least_new(query, kv), scores.window, skip or 0)


def _attended(
    query: Tensor,
    kv: KVView,
    scores: Scores,
    plan: GatherPlan,
    load: Load,
    attention: Callable[[Tensor, Tensor, Tensor, float, int | None], _Found],
    skip: int = 0,
) -> Iterator[tuple[GatheredRun, _Found]]:
    """Runs, and the ``attention`` of each, whose keys and values nobody holds afterwards."""
    value_dim = kv.sides[1].head_dim
    scale = 1.0 / math.sqrt(query.shape[2]) if scores.scale is None else scores.scale
    token_bytes = kv.num_heads * (query.shape[2] + value_dim) * query.itemsize
    for run in plan.runs:
        num_seen = run.slots.shape[1]
        # What is left of a window whose last tokens are skipped.
        window = None if scores.window is None else scores.window - skip
        window = None if window is None or window >= num_seen else window
        for part in run.parts(max(1, MOST_BYTES // max(token_bytes * num_seen, 1))):
            yield part, attention(part.of(query).transpose(1, 2), *load(part), scale, window)
