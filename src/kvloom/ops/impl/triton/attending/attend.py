"""Attend: plan, attention of each item, merge. At most four launches, without synchronization.

Shapes: B sequences, Tq new tokens, H key/value heads, Hq query heads, Dk and Dv head dims.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.checks import can_read
from kvloom.core.indexing import ENDLESS, CacheIndex, check_index, check_new, check_starts
from kvloom.core.views import Side, head_dim_of
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops.impl.triton.attending.cache import CacheKind, describe_cache
from kvloom.ops.impl.triton.attending.launch import AttendLaunch, Formula, Sizes
from kvloom.ops.impl.triton.attending.plan import Lengths, lengths_of, most_splits
from kvloom.ops.impl.triton.attending.tile import Bias, Joint, Table

NUM_SHARED: Final = 18
"""Number of arguments after the query that all attention operators have."""

MAX_HEAD_DIM: Final = 256
"""Largest head dim: several tiles of keys and of values must fit in the memory of a multiprocessor."""


def why_not(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    *_: object,
) -> str | None:
    """Reason why these kernels cannot attend over a cache, or ``None``."""
    head_dim = max(head_dim_of(key_cache, key_scale), head_dim_of(value_cache, value_scale))
    if head_dim > MAX_HEAD_DIM:
        return f"attends over head dims up to {MAX_HEAD_DIM}, got {head_dim}"
    if min(head_dim_of(key_cache, key_scale), head_dim_of(value_cache, value_scale)) == 0:
        return "attends over head dims from 1 on, got 0"
    return None


def attend(query: Tensor, *arguments: Any) -> Tensor:
    """Same contract as the reference; lengths and tables are checked if that needs no synchronization."""
    return launch_attend(query, *arguments[:NUM_SHARED], positional=arguments[NUM_SHARED:])[0]


def launch_attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    table: Tensor,
    row_starts: Tensor | None,
    page_size: int,
    seqstarts: Tensor,
    kvstarts: Tensor,
    decoding_batches: int,
    first_visible: Tensor | None,
    scale: float,
    is_causal: bool,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    skip: int | None = None,
    skip_from: Tensor | None = None,
    prior: Tensor | None = None,
    prior_lse: Tensor | None = None,
    *,
    positional: Sequence[Any] = (),
    is_part: bool = False,
    is_latent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Result of attention, and for a part, which is float32, the logarithms of its sums ``[Tq, Hq]``.

    Latents are keys and values; then the rope keys are in the arguments of the values.
    """
    num_slots = key_cache.shape[:3].numel()
    if can_read(kvstarts):
        always = alibi_slopes is not None or window is not None or skip is not None
        first_positioned = 0 if always else decoding_batches if is_causal else seqstarts.shape[0] - 1
        index = CacheIndex(table, row_starts, page_size)
        _check_values(index, seqstarts, kvstarts, query.shape[0], num_slots, mask, first_positioned)
    sides = Side(key_cache, key_scale), Side(value_cache, value_scale)
    views, kind = describe_cache(*sides, query.dtype, is_latent)
    out, joint = outputs(query, kind.value_dim, (prior, prior_lse) if is_part else None)
    if out.numel():
        bias = bias_of(mask, alibi_slopes, sinks, *(positional or (None, None, None)))
        lengths = lengths_of(seqstarts, kvstarts, first_visible, window, skip, skip_from)
        index = CacheIndex(table, row_starts, page_size)
        pairs = positional[1].shape[1] if positional else 0
        formula = Formula(scale, is_causal, softcap or 0.0, decoding_batches, pairs, *strides_of(mask))
        launch_of(query, kind, views.num_slots, index, lengths, formula)(query, views, bias, joint, out)
    return out, joint.lse if is_part else out


def launch_of(
    query: Tensor,
    kind: CacheKind,
    num_slots: int,
    index: CacheIndex,
    lengths: Lengths,
    formula: Formula,
) -> AttendLaunch:
    """Launch of attention to caches of a kind, its plan made."""
    num_new, query_heads = query.shape[:2]
    table, row_starts = index.table, index.row_starts
    row_stride, page_stride = (0, table.stride(0)) if table.ndim == 1 else table.stride()
    ragged = None if row_starts is None else row_starts.contiguous()
    places = Table(table, ragged, page_stride, num_slots)
    splits = most_splits(_most_stored(table, index.page_size, num_slots))
    sequences = lengths.seqstarts.shape[0] - 1
    shape = Sizes(sequences, num_new, query_heads, index.page_size, splits, row_stride)
    return AttendLaunch(kind, shape, formula, lengths, places, query.dtype, query.device)


def outputs(
    query: Tensor, value_dim: int, prior: tuple[Tensor | None, Tensor | None] | None
) -> tuple[Tensor, Joint]:
    """Result of attention, and what a part, after the prior one, has beside it; ``None`` for no part."""
    sizes = query.shape[:2]
    if prior is None:
        return query.new_empty((*sizes, value_dim)), Joint()
    out = query.new_empty((*sizes, value_dim), dtype=torch.float32)
    return out, Joint(query.new_empty(sizes, dtype=torch.float32), *prior)


def strides_of(mask: Tensor | None) -> tuple[int, int]:
    """Strides of a mask between heads and between rows."""
    return (0, 0) if mask is None else (0 if mask.ndim == 2 else mask.stride(0), mask.stride(-2))


def _check_values(
    index: CacheIndex,
    seqstarts: Tensor,
    kvstarts: Tensor,
    num_new: int,
    num_slots: int,
    mask: Tensor | None,
    first_positioned: int,
) -> None:
    """Make the reference's checks; positions matter in sequences from ``first_positioned`` on."""
    seq, kv = seqstarts.tolist(), kvstarts.tolist()
    check_starts("seqstarts", seq)
    check_starts("kvstarts", kv)
    if seq[-1] != num_new:
        raise ArgumentError(f"seqstarts must end with the {num_new} rows of query, got {seq[-1]}")
    if mask is not None and mask.shape[-1] < kv[-1]:
        raise ShapeError(f"mask must have at least {kv[-1]} columns, got {mask.shape[-1]}")
    new, stored = seqstarts.diff().tolist(), kvstarts.diff().tolist()
    check_new("kvstarts", new, stored, [b >= first_positioned for b in range(len(new))])
    check_index("index", index, kvstarts.diff(), num_slots)


def _most_stored(table: Tensor, page_size: int, num_slots: int) -> int:
    """Maximum number of stored tokens of a sequence, by shapes alone. Slots of one page do not repeat."""
    if table.ndim == 1:
        return table.shape[0]
    return num_slots if page_size >= ENDLESS else table.shape[1] * page_size


def bias_of(
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    coefficients: Tensor | None,
    frequencies: Tensor | None,
    first_position: Tensor | None,
) -> Bias:
    """Arguments for masks, biases and sinks."""
    slopes, logits, radians, first = (
        None if x is None else x.contiguous() for x in (alibi_slopes, sinks, frequencies, first_position)
    )
    of_token, of_head, of_wave = (0, 0, 0) if coefficients is None else coefficients.stride()
    return Bias(
        mask,
        0 if mask is None else mask.stride(-1),
        slopes,
        logits,
        coefficients,
        of_token,
        of_head,
        of_wave,
        radians,
        first,
    )
