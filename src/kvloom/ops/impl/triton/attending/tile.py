"""Attention of one item of a plan: a tile of query rows over a run of stored tokens.

Shapes: M rows of a tile, N tokens of a tile, Dv head dim of values. A row is a query head of a new token.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import triton
import triton.language as tl

from kvloom.ops.impl.triton.attending.plan import runs_of, sequence_lengths
from kvloom.ops.impl.triton.attending.softmax import along, exp_below, online_softmax
from kvloom.ops.impl.triton.launching import wait_for_earlier
from kvloom.ops.impl.triton.numerics import is_finite
from kvloom.ops.impl.triton.places import Shape

CHANGING: Final = ["splits", "table_row", "decoding_batches", "mask_head", "mask_row"]
"""Integers that change from step to step: not specialized, since compiling again would stall a server."""


class Query(NamedTuple):
    """Queries ``[Tq, Hq, D]`` and their strides in elements."""

    data: Any
    token: int
    head: int
    element: int


class Table(NamedTuple):
    """First slot of each page of each sequence, and row_starts of ragged rows. ``page`` is a stride."""

    data: Any
    row_starts: Any
    page: int
    num_slots: int


class Bias(NamedTuple):
    """Mask, biases and sinks. The mask is ``[Hq, Tq, columns]``; ``column`` is a stride.

    The positional bias is as of ``attend``, its coefficients ``[Tq, Hq, 2K]`` with strides.
    """

    mask: Any
    column: int
    alibi_slopes: Any
    sinks: Any
    coefficients: Any
    of_token: int
    of_head: int
    of_wave: int
    frequencies: Any
    first_position: Any


class Joint(NamedTuple):
    """Further tensors of a part: logarithms of sums ``[Tq, Hq]``, and the earlier part."""

    lse: Any = None
    prior: Any = None
    prior_lse: Any = None


class Partial(NamedTuple):
    """Partial results ``[rows, Hq, splits]``: largest score, sum of weights, and weighted values."""

    top: Any
    weight_sum: Any
    weighted: Any


@dataclass(frozen=True)
class SideForm:
    """Compile-time constants of keys or values. Sizes are in stored elements."""

    bits: int
    dim: int
    width: int  # elements of a chunk
    chunks: int
    planes: int
    parts: int  # number of chunks of all planes
    group: int  # elements that share a scale
    is_apart: bool  # elements are words whose two bytes are not adjacent
    scaling: str  # scales multiply "products", "numbers" in 16 bits, or codes "one by one"
    cache: Shape
    scale: Shape
    scales_in_word: int  # 2 if two are read at once
    is_scale_float16: bool
    largest_scale: float


@dataclass(frozen=True)
class AttendForm:
    """Compile-time constants of a call."""

    key_side: SideForm
    rope_side: SideForm | None  # of the rope keys, if keys are latents
    value_side: SideForm
    heads: int
    ratio: int
    page_size: int
    is_causal: bool
    has_softcap: bool
    pairs: int  # K, 0 without a positional bias
    is_split: bool
    reads_once: bool  # whether values are the keys of their tile, transposed
    token_axis: int  # of tokens in tiles of scores, and of elements in those of values; rows have the other
    rows: int  # M
    tokens: int  # N
    stages: int  # number of tiles of tokens in flight
    is_wide: bool  # whether some offset in the cache needs 64 bits
    largest: float  # largest finite value of the query's dtype


@triton.jit(do_not_specialize=CHANGING)
def attend_kernel(
    query,
    keys,
    ropes,
    values,
    table,
    lengths,
    items,
    bias,
    scale,
    softcap,
    first_rows,
    partial,
    joint,
    out,
    splits,
    table_row,
    decoding_batches,
    mask_head,
    mask_row,
    FORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute every n-th item of all heads, for n programs; heads, adjacent in memory, run together."""
    wait_for_earlier(OVERLAPS, not FORM.is_split)
    KEY: tl.constexpr = FORM.key_side
    ROPE: tl.constexpr = FORM.rope_side
    VALUE: tl.constexpr = FORM.value_side
    ROWS: tl.constexpr = FORM.rows
    total = tl.load(items.count) * FORM.heads
    for unit in range(tl.program_id(0), total, tl.num_programs(0)):
        head = unit % FORM.heads
        b = tl.load(items.sequence + unit // FORM.heads).to(tl.int64)
        part = tl.load(items.part + unit // FORM.heads).to(tl.int64)
        first_new, num_new, num_stored, first_visible = sequence_lengths(lengths, b, True)
        begin, end, split, tile = _run_of_item(lengths, part, num_new, num_stored, first_visible, FORM)

        row = tile * ROWS + tl.arange(0, ROWS)
        new = row // FORM.ratio
        query_head = head * FORM.ratio + row % FORM.ratio
        is_there = new < num_new
        position = num_stored - num_new + new
        low = tl.maximum(first_visible, position - lengths.window + 1)
        high = tl.zeros_like(position) + num_stored
        if bias.alibi_slopes is not None:
            high = tl.minimum(high, position + 1)
        elif FORM.is_causal:
            high = tl.where(b >= decoding_batches, tl.minimum(high, position + 1), high)
        if lengths.skip is not None:
            kept = position - lengths.skip + 1
            if lengths.skip_from is not None:
                kept = tl.maximum(kept, tl.load(lengths.skip_from + b).to(tl.int64))
            high = tl.minimum(high, tl.maximum(kept, 0))
        # Tokens that no row of the tile sees are skipped; tiles of tokens begin at multiples of N.
        first_seen = tl.maximum(begin, tl.min(low))
        begin = first_seen // FORM.tokens * FORM.tokens
        high = tl.where(is_there, high, 0)
        end = tl.minimum(end, tl.max(high))
        if table.num_slots == 0:
            end = tl.zeros_like(end)
        # Numbers of tokens fit int32; slots may not.
        begin, first_seen, end = begin.to(tl.int32), first_seen.to(tl.int32), end.to(tl.int32)
        position = position.to(tl.int32)
        low, high = tl.minimum(low, end).to(tl.int32), high.to(tl.int32)

        rows_at = query.data + (first_new + new) * query.token + query_head * query.head
        q = _query_parts(query, rows_at, is_there, KEY, FORM.token_axis)
        q_rope = ()
        if ROPE is not None:
            behind = rows_at + KEY.dim * KEY.planes * query.element
            q_rope = _query_parts(query, behind, is_there, ROPE, FORM.token_axis)
        page_row = _page_row(table, table_row, b)
        mask_at, slopes = _bias_of_rows(
            bias, mask_head, mask_row, lengths, b, first_new + new, query_head, is_there
        )
        waves_at = tl.where(is_there, (first_new + new) * bias.of_token + query_head * bias.of_head, 0)
        first_position = _first_position(bias, b)

        top, weight_sum, weighted = online_softmax(
            q, q_rope, keys, ropes, values, head, table, page_row, begin, first_seen, end, low, high,
            position, bias, mask_at, slopes, waves_at, first_position, scale, softcap, FORM, False,
        )  # fmt: skip
        # A value that is not finite times a weight of 0 is NaN, too. That is rare: compute again with
        # CAREFUL.
        finite = tl.full((), 1, tl.int32)
        for i in tl.static_range(len(weighted)):
            finite &= tl.min(is_finite(weighted[i]).to(tl.int32))
        if finite == 0:
            top, weight_sum, weighted = online_softmax(
                q, q_rope, keys, ropes, values, head, table, page_row, begin, first_seen, end, low, high,
                position, bias, mask_at, slopes, waves_at, first_position, scale, softcap, FORM, True,
            )  # fmt: skip

        query_heads: tl.constexpr = FORM.heads * FORM.ratio
        if FORM.is_split:
            partial_row = tl.load(first_rows + b).to(tl.int64) + new
            at = (partial_row * query_heads + query_head) * splits + split
            tl.store(partial.top + at, top, mask=is_there)
            tl.store(partial.weight_sum + at, weight_sum, mask=is_there)
            _write(partial.weighted, at, weighted, is_there, VALUE, FORM.token_axis, BY_PLANE=True)
        else:
            if bias.sinks is not None:
                sink = tl.load(bias.sinks + query_head, mask=is_there, other=0.0).to(tl.float32)
                top, weight_sum, weighted = with_sink(sink, top, weight_sum, weighted)
            at = (first_new + new) * query_heads + query_head
            if joint.prior is not None:
                top, weight_sum, weighted = _with_prior(joint, at, top, weight_sum, weighted, is_there, VALUE)
            if joint.lse is not None:
                tl.store(joint.lse + at, top + tl.log(weight_sum), mask=is_there)
            _write(
                out, at, normalized(weighted, weight_sum), is_there, VALUE, FORM.token_axis, BY_PLANE=False
            )


@triton.jit
def with_sink(sink, top, weight_sum, weighted):
    """Add a sink, a logit without a value, to the softmax of each row."""
    new_top = tl.maximum(top, sink)
    rescale = exp_below(top, new_top)
    rescaled = ()
    for i in tl.static_range(len(weighted)):
        rescaled += (weighted[i] * rescale[:, None],)
    return new_top, weight_sum * rescale + exp_below(sink, new_top), rescaled


@triton.jit
def _with_prior(joint, at, top, weight_sum, weighted, is_there, FORM: tl.constexpr):
    """Merge the earlier part into the sums of each row. A weight of 0 hides NaN."""
    prior_lse = tl.load(joint.prior_lse + at, mask=is_there, other=float("-inf"))
    new_top = tl.maximum(top, prior_lse)
    mine, theirs = exp_below(top, new_top)[:, None], exp_below(prior_lse, new_top)[:, None]
    merged = ()
    dim = FORM.dim * FORM.planes
    for i in tl.static_range(len(weighted)):
        element = i // FORM.planes * FORM.width + tl.arange(0, FORM.width)
        number = element * FORM.planes + i % FORM.planes
        is_in = is_there[:, None] & (element < FORM.dim)[None, :]
        prior = tl.load(joint.prior + at[:, None] * dim + number[None, :], mask=is_in, other=0.0)
        kept = tl.where(mine == 0, 0.0, weighted[i] * mine)
        merged += (kept + tl.where(theirs == 0, 0.0, prior * theirs),)
    return new_top, weight_sum * tl.sum(mine, axis=1) + tl.sum(theirs, axis=1), merged


@triton.jit
def normalized(weighted, weight_sum):
    """Weighted values over the sum of weights; 0 where there are no weights."""
    divided = ()
    for i in tl.static_range(len(weighted)):
        divided += (weighted[i] / tl.where(weight_sum == 0, 1.0, weight_sum)[:, None],)
    return divided


@triton.jit
def _run_of_item(lengths, part, num_new, num_stored, first_visible, FORM: tl.constexpr):
    """First token, the one after the last, number of the split and of the tile of rows."""
    if FORM.is_split:
        first, run, splits = runs_of(lengths, num_new, num_stored, first_visible)
        begin = first + part % splits * run
        return begin, tl.minimum(begin + run, num_stored), part % splits, part // splits
    return tl.zeros_like(part), num_stored, tl.zeros_like(part), part


@triton.jit
def _query_parts(query, rows_at, is_there, FORM: tl.constexpr, T: tl.constexpr):
    """Query rows ``[M, width]`` in the order of the keys: chunk by chunk, plane by plane."""
    parts = ()
    PARTS: tl.constexpr = FORM.parts
    WIDTH: tl.constexpr = FORM.width
    for i in tl.static_range(PARTS):
        element = i // FORM.planes * WIDTH + tl.arange(0, WIDTH)
        number = element * FORM.planes + i % FORM.planes
        is_in = along(is_there, 1 - T) & along(element < FORM.dim, T)
        at = along(rows_at, 1 - T) + along(number, T).to(tl.int64) * query.element
        parts += (tl.load(at, mask=is_in, other=0.0),)
    return parts


@triton.jit
def _page_row(table, table_row, b):
    """Address of the first page of sequence b in the table."""
    if table.row_starts is not None:
        return tl.load(table.row_starts + b).to(tl.int64) * table.page
    return b * table_row


@triton.jit
def _bias_of_rows(bias, mask_head, mask_row, lengths, b, new_token, query_head, is_there):
    """Address of each row's mask, and its slope."""
    mask_at = tl.zeros_like(new_token)
    slopes = tl.zeros(new_token.shape, tl.float32)
    if bias.mask is not None:
        mask_at = query_head * mask_head + new_token * mask_row
        mask_at += tl.load(lengths.kvstarts + b).to(tl.int64) * bias.column
    if bias.alibi_slopes is not None:
        slopes = tl.load(bias.alibi_slopes + query_head, mask=is_there, other=0.0).to(tl.float32)
    return mask_at, slopes


@triton.jit
def _first_position(bias, b):
    """Position of token 0 of sequence b."""
    if bias.first_position is not None:
        return tl.load(bias.first_position + b).to(tl.int64)
    return tl.zeros_like(b)


@triton.jit
def _write(target, at, parts, is_there, FORM: tl.constexpr, T: tl.constexpr, BY_PLANE: tl.constexpr):
    """Write results ``[M, Dv]`` to rows ``at`` of ``target``, in the order of the values or plane by plane.

    Plane by plane, adjacent threads write adjacent numbers.
    """
    dim = FORM.dim * FORM.planes
    PARTS: tl.constexpr = FORM.parts
    WIDTH: tl.constexpr = FORM.width
    for i in tl.static_range(PARTS):
        element = i // FORM.planes * WIDTH + tl.arange(0, WIDTH)
        if BY_PLANE:
            number = i % FORM.planes * FORM.dim + element
        else:
            number = element * FORM.planes + i % FORM.planes
        is_in = along(is_there, 1 - T) & along(element < FORM.dim, T)
        place = target + along(at, 1 - T) * dim + along(number, T)
        tl.store(place, parts[i].to(target.dtype.element_ty), mask=is_in)
