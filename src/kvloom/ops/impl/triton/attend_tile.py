"""Attention of a tile of query rows over a run of stored tokens, read where they lie.

Softmax is taken online: a row keeps the largest score so far, the sum of its weights and the weighted values,
all float32, and shrinks them when a larger score comes. Codes of a cache stay integers in the products where
that loses nothing: the scale of a group of keys multiplies scores, that of values multiplies weights.

Letters: M rows of a tile, N tokens of a tile. A row is a query head of a new token. What a head vector stores
is read in chunks ``[N, width]``; a chunk of bytes of two codes has two planes, the even numbers and the odd.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvloom.ops.impl.triton.attend_plan import runs_of, sequence_lengths
from kvloom.ops.impl.triton.numerics import dequantized, is_finite, nibble
from kvloom.ops.impl.triton.places import Shape, place_of_element, place_of_slot

_INT32_MAX: tl.constexpr = tl.constexpr((1 << 31) - 1)


class Query(NamedTuple):
    """``[Tq, Hq, D]`` and its strides in elements."""

    data: Any
    token: int
    head: int
    element: int


class Table(NamedTuple):
    """First slot of each page of each sequence; row_starts where rows are ragged. Strides in elements."""

    data: Any
    row_starts: Any
    row: int
    page: int
    num_slots: int


class Bias(NamedTuple):
    """What is added to scores, and the sinks. The mask is ``[Hq, Tq, columns]`` by strides."""

    mask: Any
    head: int
    row: int
    column: int
    alibi_slopes: Any
    sinks: Any


class Partial(NamedTuple):
    """Partial results ``[rows, Hq, splits]``: largest score, sum of weights, and weighted values."""

    top: Any
    total: Any
    mixed: Any
    splits: int


@dataclass(frozen=True)
class SideForm:
    """What is compiled in about keys or values. Sizes are in stored elements."""

    bits: int
    dim: int
    width: int  # of a chunk
    chunks: int
    planes: int
    parts: int  # chunks of all planes
    group: int  # that share a scale
    scales_products: bool  # or else numbers are dequantised one by one, as the reference does
    cache: Shape
    scale: Shape
    largest_scale: float


@dataclass(frozen=True)
class Form:
    """What is compiled in about a call."""

    key_side: SideForm
    value_side: SideForm
    heads: int
    ratio: int
    page_size: int
    is_causal: bool
    has_softcap: bool
    is_split: bool
    rows: int  # M
    tokens: int  # N
    stages: int  # tiles of tokens that are on their way at once
    largest: float  # finite value of the query's dtype


@triton.jit
def attend_kernel(
    query,
    keys,
    values,
    table,
    lengths,
    items,
    bias,
    scale,
    softcap,
    first_rows,
    partial,
    out,
    FORM: tl.constexpr,
):
    """Every so many-th item of all heads; heads lie side by side in memory and are done side by side."""
    KEY: tl.constexpr = FORM.key_side
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
            high = tl.where(b >= lengths.decoding_batches, tl.minimum(high, position + 1), high)
        # Tokens that no row of the tile sees are not visited; tiles of tokens begin at multiples of N.
        begin = tl.maximum(begin, tl.min(low)) // FORM.tokens * FORM.tokens
        high = tl.where(is_there, high, 0)
        end = tl.minimum(end, tl.max(high))
        # Tokens are few enough for int32; slots may not be.
        begin, end, position = begin.to(tl.int32), end.to(tl.int32), position.to(tl.int32)
        low, high = tl.minimum(low, end).to(tl.int32), high.to(tl.int32)

        rows_at = query.data + (first_new + new) * query.token + query_head * query.head
        q = _query_parts(query, rows_at, is_there, KEY)
        page_row = _page_row(table, b)
        mask_at, slopes = _bias_of_rows(bias, lengths, b, first_new + new, query_head, is_there)

        top, weight_sum, mixed = _walk(
            q, keys, values, head, table, page_row, begin, end, low, high, position,
            bias, mask_at, slopes, is_there, scale, softcap, FORM, False,
        )  # fmt: skip
        # A value that is not finite makes NaN of a weight of 0, too. That is rare: look again, with care.
        finite = tl.full((), 1, tl.int32)
        for i in tl.static_range(len(mixed)):
            finite &= tl.min(is_finite(mixed[i]).to(tl.int32))
        if finite == 0:
            top, weight_sum, mixed = _walk(
                q, keys, values, head, table, page_row, begin, end, low, high, position,
                bias, mask_at, slopes, is_there, scale, softcap, FORM, True,
            )  # fmt: skip

        query_heads: tl.constexpr = FORM.heads * FORM.ratio
        if FORM.is_split:
            partial_row = tl.load(first_rows + b).to(tl.int64) + new
            at = (partial_row * query_heads + query_head) * partial.splits + split
            tl.store(partial.top + at, top, mask=is_there)
            tl.store(partial.total + at, weight_sum, mask=is_there)
            _write(partial.mixed, at, mixed, is_there, VALUE)
        else:
            if bias.sinks is not None:
                sink = tl.load(bias.sinks + query_head, mask=is_there, other=0.0).to(tl.float32)
                top, weight_sum, mixed = with_sink(sink, top, weight_sum, mixed)
            _write(
                out,
                (first_new + new) * query_heads + query_head,
                normalized(mixed, weight_sum),
                is_there,
                VALUE,
            )


@triton.jit
def with_sink(sink, top, weight_sum, mixed):
    """Let a logit that has no value take part in the softmax of each row."""
    new_top = tl.maximum(top, sink)
    shrink = exp_below(top, new_top)
    shrunk = ()
    for i in tl.static_range(len(mixed)):
        shrunk += (mixed[i] * shrink[:, None],)
    return new_top, weight_sum * shrink + exp_below(sink, new_top), shrunk


@triton.jit
def normalized(mixed, weight_sum):
    """Weighted values over the sum of weights; 0 where there are no weights."""
    divided = ()
    for i in tl.static_range(len(mixed)):
        divided += (mixed[i] / tl.where(weight_sum == 0, 1.0, weight_sum)[:, None],)
    return divided


@triton.jit
def exp_below(x, top):
    """``exp(x - top)``, and 0 where there is nothing to exceed: then both are -inf."""
    return tl.exp(x - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def _run_of_item(lengths, part, num_new, num_stored, first_visible, FORM: tl.constexpr):
    """First token, the one behind the last, number of the split and of the tile of rows."""
    if FORM.is_split:
        first, run, splits = runs_of(lengths, num_new, num_stored, first_visible)
        begin = first + part % splits * run
        return begin, tl.minimum(begin + run, num_stored), part % splits, part // splits
    return tl.zeros_like(part), num_stored, tl.zeros_like(part), part


@triton.jit
def _query_parts(query, rows_at, is_there, FORM: tl.constexpr):
    """The query rows ``[M, width]`` as keys are read: chunk by chunk, plane by plane."""
    parts = ()
    PARTS: tl.constexpr = FORM.parts
    WIDTH: tl.constexpr = FORM.width
    for i in tl.static_range(PARTS):
        element = i // FORM.planes * WIDTH + tl.arange(0, WIDTH)
        number = element * FORM.planes + i % FORM.planes
        is_in = is_there[:, None] & (element < FORM.dim)[None, :]
        parts += (
            tl.load(rows_at[:, None] + number[None, :].to(tl.int64) * query.element, mask=is_in, other=0.0),
        )
    return parts


@triton.jit
def _page_row(table, b):
    """Where the pages of sequence b begin in the table."""
    if table.row_starts is not None:
        return tl.load(table.row_starts + b).to(tl.int64) * table.page
    return b * table.row


@triton.jit
def _page_of(table, page_row, token, is_there, PAGE: tl.constexpr):
    """First slot of the page of each token, int64, and the token's place in it."""
    if PAGE > _INT32_MAX:
        page, within = tl.zeros_like(token), token
    else:
        page, within = token // PAGE, token % PAGE
    first = tl.load(table.data + page_row + page.to(tl.int64) * table.page, mask=is_there, other=-1)
    return first.to(tl.int64), within


@triton.jit
def _bias_of_rows(bias, lengths, b, new_token, query_head, is_there):
    """Where the mask of each row begins, and its slope."""
    mask_at = tl.zeros_like(new_token)
    slopes = tl.zeros(new_token.shape, tl.float32)
    if bias.mask is not None:
        mask_at = query_head * bias.head + new_token * bias.row
        mask_at += tl.load(lengths.kvstarts + b).to(tl.int64) * bias.column
    if bias.alibi_slopes is not None:
        slopes = tl.load(bias.alibi_slopes + query_head, mask=is_there, other=0.0).to(tl.float32)
    return mask_at, slopes


@triton.jit
def _walk(
    q, keys, values, head, table, page_row, begin, end, low, high, position,
    bias, mask_at, slopes, is_there, scale, softcap, FORM: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and weighted values of each row over the tokens ``begin:end``.

    With ``CAREFUL`` a weight of 0 hides what is not finite, and whoever sees it gets NaN.
    """
    KEY: tl.constexpr = FORM.key_side
    VALUE: tl.constexpr = FORM.value_side
    PARTS: tl.constexpr = VALUE.parts
    ROWS: tl.constexpr = FORM.rows
    TOKENS: tl.constexpr = FORM.tokens
    dtype: tl.constexpr = q[0].dtype
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight_sum = tl.full((ROWS,), 0.0, tl.float32)
    mixed = ()
    for _ in tl.static_range(PARTS):
        mixed += (tl.full((ROWS, VALUE.width), 0.0, tl.float32),)
    # Care is seldom needed: it gets no registers for tiles that are on their way.
    STAGES: tl.constexpr = 1 if CAREFUL else FORM.stages
    for start in tl.range(begin, end, TOKENS, num_stages=STAGES):
        token = start + tl.arange(0, TOKENS)
        first_slot, within = _page_of(table, page_row, token, token < end, FORM.page_size)
        slot = first_slot + within
        is_stored = (token < end) & (first_slot >= 0) & (slot < table.num_slots)

        scores = _products(q, keys, slot, head, is_stored, KEY, FORM.largest) * scale
        if FORM.has_softcap:
            scores = softcap * _tanh(scores / softcap)
        is_seen = (token[None, :] >= low[:, None]) & (token[None, :] < high[:, None])
        if bias.mask is not None:
            column = mask_at[:, None] + token[None, :].to(tl.int64) * bias.column
            scores += tl.load(bias.mask + column, mask=is_seen, other=0.0).to(tl.float32)
        if bias.alibi_slopes is not None:
            scores += slopes[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
        scores = tl.where(is_seen, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink = exp_below(top, new_top)
        weights = exp_below(scores, new_top[:, None])
        weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
        mixed = _mix(
            mixed, shrink, weights, values, slot, head, is_stored, dtype, VALUE, FORM.largest, CAREFUL
        )
        top = new_top
    return top, weight_sum, mixed


@triton.jit
def _products(q, side, slot, head, is_stored, FORM: tl.constexpr, LARGEST: tl.constexpr):
    """Dot products ``[M, N]`` of the rows with the keys in ``slot``."""
    CACHE: tl.constexpr = FORM.cache
    CHUNKS: tl.constexpr = FORM.chunks
    PLANES: tl.constexpr = FORM.planes
    WIDTH: tl.constexpr = FORM.width
    at = place_of_slot(side.cache, slot, CACHE) + head * side.cache.head
    scores = tl.zeros((q[0].shape[0], slot.shape[0]), tl.float32)
    for c in tl.static_range(CHUNKS):
        element = c * WIDTH + tl.arange(0, WIDTH)
        is_in = (element < FORM.dim)[:, None] & is_stored[None, :]
        within = place_of_element(side.cache, element, CACHE)
        stored = tl.load(side.cache.data + within[:, None] + at[None, :], mask=is_in, other=0)
        part = tl.zeros_like(scores)
        if FORM.bits == 0:
            part = tl.dot(q[c], _cast(stored, q[0].dtype), part, input_precision="ieee")
        elif FORM.scales_products:
            for plane in tl.static_range(PLANES):
                code = _code(stored, plane, FORM).to(q[0].dtype)
                part = tl.dot(q[c * PLANES + plane], code, part, input_precision="ieee")
            part *= _group_scale(side, slot, head, is_stored, c, FORM)[None, :].to(tl.float32)
        else:
            factor = _scales(side, slot[None, :], head, is_in, element[:, None], FORM)
            for plane in tl.static_range(PLANES):
                number = dequantized(
                    _code(stored, plane, FORM), factor, q[0].dtype, FORM.largest_scale, LARGEST
                )
                part = tl.dot(q[c * PLANES + plane], number, part, input_precision="ieee")
        scores += part
    return scores


@triton.jit
def _mix(
    mixed, shrink, weights, side, slot, head, is_stored, dtype: tl.constexpr,
    FORM: tl.constexpr, LARGEST: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Shrink what was mixed so far, and add the values in ``slot`` by their weights ``[M, N]``."""
    CACHE: tl.constexpr = FORM.cache
    CHUNKS: tl.constexpr = FORM.chunks
    PLANES: tl.constexpr = FORM.planes
    WIDTH: tl.constexpr = FORM.width
    at = place_of_slot(side.cache, slot, CACHE) + head * side.cache.head
    result = ()
    for c in tl.static_range(CHUNKS):
        element = c * WIDTH + tl.arange(0, WIDTH)
        is_in = is_stored[:, None] & (element < FORM.dim)[None, :]
        within = place_of_element(side.cache, element, CACHE)
        stored = tl.load(side.cache.data + at[:, None] + within[None, :], mask=is_in, other=0)
        for plane in tl.static_range(PLANES):
            before = mixed[c * PLANES + plane]
            if FORM.bits > 0 and FORM.scales_products and not CAREFUL:
                code = _code(stored, plane, FORM).to(dtype)
                factor = _group_scale(side, slot, head, is_stored, c, FORM)
                scaled = weights * factor[None, :].to(tl.float32)
                after = tl.dot(scaled.to(dtype), code, before * shrink[:, None], input_precision="ieee")
            else:
                if FORM.bits == 0:
                    number = _cast(stored, dtype)
                else:
                    if FORM.scales_products:
                        factor = _group_scale(side, slot, head, is_stored, c, FORM)[:, None]
                    else:
                        factor = _scales(side, slot[:, None], head, is_in, element[None, :], FORM)
                    number = dequantized(
                        _code(stored, plane, FORM), factor, dtype, FORM.largest_scale, LARGEST
                    )
                if CAREFUL:
                    broken = ~is_finite(number.to(tl.float32))
                    number = tl.where(broken, 0.0, number.to(tl.float32)).to(dtype)
                    kept = tl.where(shrink[:, None] == 0, 0.0, before * shrink[:, None])
                    after = tl.dot(weights.to(dtype), number, kept, input_precision="ieee")
                    sees = tl.dot((weights != 0).to(tl.float16), broken.to(tl.float16)) > 0
                    after = tl.where(sees, float("nan"), after)
                else:
                    after = tl.dot(
                        weights.to(dtype), number, before * shrink[:, None], input_precision="ieee"
                    )
            result += (after,)
    return result


@triton.jit
def _code(stored, plane: tl.constexpr, FORM: tl.constexpr):
    """The codes of one plane, int8."""
    return nibble(stored, plane) if FORM.bits == 4 else stored


@triton.jit
def _cast(x, dtype: tl.constexpr):
    """Stored numbers in the dtype of the query."""
    return x if x.dtype == dtype else x.to(tl.float32).to(dtype)


@triton.jit
def _group_scale(side, slot, head, is_stored, group: tl.constexpr, FORM: tl.constexpr):
    """The scale ``[N]`` of one group, as it is stored."""
    SCALE: tl.constexpr = FORM.scale
    at = place_of_slot(side.scale, slot, SCALE) + head * side.scale.head
    at += place_of_element(side.scale, tl.full((), group, tl.int64), SCALE)
    return tl.load(side.scale.data + at, mask=is_stored, other=0.0)


@triton.jit
def _scales(side, slot, head, is_in, element, FORM: tl.constexpr):
    """The scale of each stored element, of the shape of ``is_in``, as it is stored."""
    SCALE: tl.constexpr = FORM.scale
    at = place_of_slot(side.scale, slot, SCALE) + head * side.scale.head
    within = place_of_element(side.scale, element // FORM.group, SCALE)
    return tl.load(side.scale.data + at + within, mask=is_in, other=0.0)


@triton.jit
def _tanh(x):
    """Hyperbolic tangent by an exponential that cannot overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def _write(target, at, parts, is_there, FORM: tl.constexpr):
    """Numbers ``[M, Dv]``, as values are read, to rows ``at`` of ``target``."""
    dim = FORM.dim * FORM.planes
    PARTS: tl.constexpr = FORM.parts
    WIDTH: tl.constexpr = FORM.width
    for i in tl.static_range(PARTS):
        element = i // FORM.planes * WIDTH + tl.arange(0, WIDTH)
        number = element * FORM.planes + i % FORM.planes
        is_in = is_there[:, None] & (element < FORM.dim)[None, :]
        tl.store(
            target + at[:, None] * dim + number[None, :], parts[i].to(target.dtype.element_ty), mask=is_in
        )
