"""Attention of many new tokens by torch's own kernel, over keys and values gathered for the call.

Gathering reads and writes each token once, and then torch's attention reads contiguous keys at twice the
speed of kernels that read pages. So it takes less time where many queries share the tokens. The numbers of
tokens, which torch's attention wants on the host, are those of ``Batch.counts``: nobody waits for the device.

Shapes: B sequences, Tq new tokens of all, H key/value heads, Hq query heads, Dk and Dv head dims; R sequences
of one run with Q new tokens each, which see N tokens each.
"""

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvloom.core.views import KVView
from kvloom.ops.attend_arguments import attend_arguments
from kvloom.ops.choice import run as call
from kvloom.ops.gathered.plan import GatheredRun, Others, expect_counts, plan_of
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

MAX_WIDTH: Final = 256
"""Largest head dim of FlashAttention."""


Load = Callable[[GatheredRun], tuple[Tensor, Tensor]]
"""Keys and values ``[R, H, N, D]`` of a run, as the queries need them."""
Rest = Callable[[Others], Tensor]
"""Attention ``[T, Hq, Dv]`` of sequences that are not gathered."""


def is_gathered(query: Tensor, kv: KVView, batch: Batch, scores: Scores, is_latent: bool) -> bool:
    """Whether ``attend`` is to be called, with arguments that ``ops.attend`` takes."""
    counts = batch.counts
    if counts is None or kv.device.type not in DEVICES or not counts.new or not query.shape[1]:
        return False
    is_worth_it = max(counts.new) >= _least_new(query, kv)
    return is_worth_it and why_not(query, kv, batch, scores, is_latent) is None


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
    for name in ("mask", "alibi_slopes", "softcap", "sinks", "positional_bias"):
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
    return _why_not_on_cuda(query, kv, scores) if kv.device.type == "cuda" else None


def attend_plain(query: Tensor, kv: KVView, batch: Batch, scores: Scores) -> Tensor:
    """``attend`` to keys and values as they are stored."""

    def load(run: GatheredRun) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = call("auto", "load", kv.device, run.slots, *kv.tensors, query.dtype, 1)
        return found

    def rest(others: Others) -> Tensor:
        own = attend_arguments(query[others.rows], kv, others.batch, scores, query.shape[2])
        found: Tensor = call("auto", "attend", kv.device, *own)
        return found

    return attend(query, kv, batch, scores, load, rest)


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
    expect_counts(query, batch)
    value_dim = kv.sides[1].head_dim
    plan = plan_of(batch, _least_new(query, kv), scores.window)
    scale = 1.0 / math.sqrt(query.shape[2]) if scores.scale is None else scores.scale
    out = query.new_zeros((*query.shape[:2], value_dim))
    token_bytes = kv.num_heads * (query.shape[2] + value_dim) * query.itemsize
    for run in plan.runs:
        for part in run.parts(max(1, MOST_BYTES // max(token_bytes * run.slots.shape[1], 1))):
            end = part.first_row + len(part.slots) * part.num_rows
            rows = len(part.slots), part.num_rows
            own = query[part.first_row : end].unflatten(0, rows)[:, -part.num_new :].transpose(1, 2)
            window = scores.window
            if window is not None and window >= part.slots.shape[1]:
                window = None
            found = _attention(own, *load(part), scale, window)
            out[part.first_row : end].unflatten(0, rows)[:, -part.num_new :] = found.transpose(1, 2)
    if plan.others is not None:
        out[plan.others.rows] = rest(plan.others)
    return out


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention ``[R, Hq, Q, Dv]`` of the last Q of N tokens; keys and values are ``[R, H, N, D]``."""
    num_new, num_seen, value_dim = query.shape[2], key.shape[2], value.shape[3]
    # FlashAttention takes one head dim, a multiple of 8. Zeros add nothing to products, and are cut off.
    width = -(-max(query.shape[3], value_dim) // 8) * 8
    query, key, value = (
        x if x.shape[3] == width else pad(x, (0, width - x.shape[3])) for x in (query, key, value)
    )
    if window is not None and query.is_cuda:
        out = _windowed(query, key, value, scale, window)
    elif query.is_cuda and num_new < num_seen:
        # What torch calls for ``causal_lower_right``, which no mode of torch may look at.
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        out = flash(query, key, value, is_causal=True, scale=scale)[0]
    else:
        mask = None
        if window is not None or num_new < num_seen:
            behind = torch.arange(num_seen - num_new, num_seen, device=query.device).unsqueeze(1)
            behind = behind - torch.arange(num_seen, device=query.device)
            mask = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        has_groups, is_causal = query.shape[1] != key.shape[1], mask is None
        out = scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=has_groups
        )
    return out[..., :value_dim]


def _windowed(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """``_attention`` by FlashAttention, whose window counts the tokens before a query's own."""
    rows, _, num_new, _ = query.shape
    num_seen, varlen = key.shape[2], _varlen_attention()
    step = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    sizes = step * num_new, step * num_seen, num_new, num_seen
    how = {"scale": scale, "window_size": (window - 1, 0), "enable_gqa": query.shape[1] != key.shape[1]}
    out: Tensor = varlen(*packed, *sizes, **how)
    return out.view(rows, num_new, *out.shape[1:]).transpose(1, 2)


@lru_cache
def _varlen_attention() -> Any:
    """torch's ``varlen_attn`` if it has windows and grouped queries, as since 2.13, or ``None``."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"window_size", "enable_gqa", "scale"} <= set(has) else None


def _why_not_on_cuda(query: Tensor, kv: KVView, scores: Scores) -> str | None:
    """Reason why FlashAttention, without which torch computes all scores, cannot run."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention has no {query.dtype}"
    if max(query.shape[2], kv.sides[1].head_dim) > MAX_WIDTH:
        return f"FlashAttention has head dims up to {MAX_WIDTH}"
    if not _has_flash_attention(query.device):
        return "FlashAttention is not in this torch, or not for this device"
    if scores.window is not None and _varlen_attention() is None:
        return "torch before 2.13 has no windows"
    if torch.cuda.is_current_stream_capturing():
        return "a graph is captured, which may be replayed with other sizes"
    return None


@lru_cache
def _has_flash_attention(device: torch.device) -> bool:
    """Whether torch's FlashAttention runs on a device."""
    is_new = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return is_new and torch.backends.cuda.is_flash_attention_available()
