"""Online softmax of a tile of query rows over a run of stored tokens, read in place.

A row keeps the largest score so far, the sum of its weights and the weighted values, all float32, and
rescales them when a larger score comes. Codes stay integers in the products if that is exact: the scale of a
group of keys multiplies scores, that of values multiplies weights.

Shapes: M rows of a tile, N tokens of a tile. Stored elements of a head vector are read in chunks
``[N, width]``. If a byte has several codes, a chunk has one plane for each: for two codes the even and the
odd numbers. T is the axis of tokens in scores: 1 for ``[M, N]``. If it is 0, all tiles are transposed, since
tensor cores multiply 16 rows of the first factor by 8 columns of the second.
"""

import triton
import triton.language as tl

from kvloom.ops.impl.triton.numerics import dequantized, exp, is_finite, number_as, number_in
from kvloom.ops.impl.triton.places import place_of_element, place_of_vector

_INT32_MAX: tl.constexpr = tl.constexpr((1 << 31) - 1)


@triton.jit
def online_softmax(
    q, q_rope, keys, ropes, values, head, table, page_row, begin, first_seen, end, low, high,
    position, bias, mask_at, slopes, waves_at, first_position, scale, softcap,
    FORM: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and weighted values of each row over the tokens ``begin:end``.

    Tokens of a tile outside ``first_seen:end`` are read as the nearest one inside, with weight 0. With
    ``CAREFUL`` a weight of 0 hides NaN and infinity; a row that sees them is NaN.
    """
    KEY: tl.constexpr = FORM.key_side
    ROPE: tl.constexpr = FORM.rope_side
    VALUE: tl.constexpr = FORM.value_side
    PARTS: tl.constexpr = VALUE.parts
    ROWS: tl.constexpr = FORM.rows
    TOKENS: tl.constexpr = FORM.tokens
    T: tl.constexpr = FORM.token_axis
    R: tl.constexpr = 1 - T
    dtype: tl.constexpr = q[0].dtype
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight_sum = tl.full((ROWS,), 0.0, tl.float32)
    weighted = ()
    for _ in tl.static_range(PARTS):
        weighted += (tl.full((ROWS, VALUE.width) if T == 1 else (VALUE.width, ROWS), 0.0, tl.float32),)
    # CAREFUL is rare: it gets no registers for prefetched tiles.
    STAGES: tl.constexpr = 1 if CAREFUL else FORM.stages
    for start in tl.range(begin, end, TOKENS, num_stages=STAGES):
        token = start + tl.arange(0, TOKENS)
        slot = _slot_of(table, page_row, tl.minimum(tl.maximum(token, first_seen), end - 1), FORM)

        scores, read = _products(q, keys, slot, head, KEY, T, FORM.largest)
        if ROPE is not None:
            scores += _products(q_rope, ropes, slot, head, ROPE, T, FORM.largest)[0]
        if FORM.pairs > 0:
            scores += _positional_bias(bias, head, waves_at, first_position + token, FORM)
        scores = scores * scale
        if FORM.has_softcap:
            scores = softcap * _tanh(scores / softcap)
        is_seen = (along(token, T) >= along(low, R)) & (along(token, T) < along(high, R))
        if bias.mask is not None:
            column = along(mask_at, R) + along(token, T).to(tl.int64) * bias.column
            scores += tl.load(bias.mask + column, mask=is_seen, other=0.0).to(tl.float32)
        if bias.alibi_slopes is not None:
            scores += along(slopes, R) * (along(token, T) - along(position, R)).to(tl.float32)
        scores = tl.where(is_seen, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, axis=T))
        rescale = exp_below(top, new_top)
        weights = exp_below(scores, along(new_top, R))
        weight_sum = weight_sum * rescale + tl.sum(weights, axis=T)
        weighted = _add_values(
            weighted, rescale, weights, values, read if FORM.reads_once else (), slot, head, dtype, VALUE,
            T, FORM.largest, CAREFUL,
        )  # fmt: skip
        top = new_top
    return top, weight_sum, weighted


@triton.jit
def _products(q, side, slot, head, FORM: tl.constexpr, T: tl.constexpr, LARGEST: tl.constexpr):
    """Scores ``[M, N]``, dot products of rows and the keys in ``slot``, and the stored chunks of these."""
    CACHE: tl.constexpr = FORM.cache
    CHUNKS: tl.constexpr = FORM.chunks
    PLANES: tl.constexpr = FORM.planes
    WIDTH: tl.constexpr = FORM.width
    at = place_of_vector(side.cache, slot, head, CACHE)
    M: tl.constexpr = q[0].shape[1 - T]
    N: tl.constexpr = slot.shape[0]
    scores = tl.zeros((M, N) if T == 1 else (N, M), tl.float32)
    read = ()
    for c in tl.static_range(CHUNKS):
        element = c * WIDTH + tl.arange(0, WIDTH)
        element = along(element, 1 - T)
        is_in = element < FORM.dim
        stored = _stored(side, along(at, T), element, is_in, FORM)
        part = tl.zeros_like(scores)
        if FORM.bits == 0:
            part = _dot(q[c], _cast(stored, q[0].dtype), part, T)
        elif FORM.scaling == "products":
            for plane in tl.static_range(PLANES):
                code = number_as(stored, plane, FORM.bits, q[0].dtype)
                part = _dot(q[c * PLANES + plane], code, part, T)
            part *= along(_group_scale(side, slot, head, c, FORM), T).to(tl.float32)
        else:
            factor = _scales(side, along(slot, T), head, is_in, element, FORM)
            for plane in tl.static_range(PLANES):
                code = number_in(stored, plane, FORM.bits)
                number = dequantized(code, factor, q[0].dtype, FORM.largest_scale, LARGEST)
                part = _dot(q[c * PLANES + plane], number, part, T)
        scores += part
        read += (stored,)
    return scores, read


@triton.jit
def _positional_bias(bias, head, waves_at, position, FORM: tl.constexpr):
    """Bias ``[M, N]``: coefficients times cosines and sines of the angles at positions ``[N]``, int64.

    Angles are in units of 2^-64 turns, so that integers overflow exactly at whole turns.
    """
    PAIRS: tl.constexpr = FORM.pairs
    T: tl.constexpr = FORM.token_axis
    M: tl.constexpr = waves_at.shape[0]
    N: tl.constexpr = position.shape[0]
    found = tl.zeros((M, N) if T == 1 else (N, M), tl.float32)
    for i in tl.static_range(PAIRS):
        radians = tl.load(bias.frequencies + head * PAIRS + i).to(tl.float64)
        turns = radians * tl.full((), 0.15915494309189535, tl.float64)
        part = turns - tl.floor(turns + tl.full((), 0.5, tl.float64))
        broken = (part - part).to(tl.float32)  # NaN if the frequency is not finite
        unit = tl.where(part == part, part * tl.full((), 2.0**63, tl.float64), 0.0).to(tl.int64) * 2
        cos, sin = _waves(((unit * position) >> 32).to(tl.int32), broken)
        at = bias.coefficients + waves_at + i * bias.of_wave
        of_cos = tl.load(at).to(tl.float32)
        of_sin = tl.load(at + PAIRS * bias.of_wave).to(tl.float32)
        found += along(of_cos, 1 - T) * along(cos, T)
        found += along(of_sin, 1 - T) * along(sin, T)
    return found


@triton.jit
def _waves(angle, broken):
    """Cosines and sines of int32 angles in 2^-32 turns, to about 2^-24; NaN where ``broken`` is NaN.

    CUDA's own functions need local memory of each thread, since they support large angles.
    """
    quarter = (angle + (1 << 29)) >> 30
    x = (angle - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-9 + broken
    square = x * x
    s = (-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1
    c = (2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2
    s = s * square * x + x
    c = c * square * square - 0.5 * square + 1.0
    is_odd = (quarter & 1) != 0
    cos, sin = tl.where(is_odd, s, c), tl.where(is_odd, c, s)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def _add_values(
    weighted, rescale, weights, side, read, slot, head, dtype: tl.constexpr,
    FORM: tl.constexpr, T: tl.constexpr, LARGEST: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Rescale the sums so far, and add the values in ``slot`` by their weights ``[M, N]``.

    If ``read``, the chunks that were read as keys, is given, values are these.
    """
    CACHE: tl.constexpr = FORM.cache
    CHUNKS: tl.constexpr = FORM.chunks
    PLANES: tl.constexpr = FORM.planes
    WIDTH: tl.constexpr = FORM.width
    at = place_of_vector(side.cache, slot, head, CACHE)
    result = ()
    for c in tl.static_range(CHUNKS):
        element = c * WIDTH + tl.arange(0, WIDTH)
        element = along(element, T)
        is_in = element < FORM.dim
        if len(read) > 0:
            stored = tl.trans(read[c])
        else:
            stored = _stored(side, along(at, 1 - T), element, is_in, FORM)
        if FORM.scaling == "products":
            scale = _group_scale(side, slot, head, c, FORM)
            factor = along(scale, 1 - T)
        elif FORM.scaling == "numbers":
            factor = _scales_of_groups(side, slot, head, element, FORM, T)
        elif FORM.scaling == "one by one":
            factor = _scales(side, along(slot, 1 - T), head, is_in, element, FORM)
        for plane in tl.static_range(PLANES):
            before = weighted[c * PLANES + plane]
            if FORM.scaling == "products" and not CAREFUL:
                code = number_as(stored, plane, FORM.bits, dtype)
                scaled = weights * along(scale, T).to(tl.float32)
                after = _dot(scaled.to(dtype), code, before * along(rescale, 1 - T), T)
            else:
                if FORM.bits == 0:
                    number = _cast(stored, dtype)
                elif FORM.scaling == "numbers" and not CAREFUL:
                    number = number_as(stored, plane, FORM.bits, factor.dtype) * factor
                else:
                    code = number_in(stored, plane, FORM.bits)
                    number = dequantized(code, factor, dtype, FORM.largest_scale, LARGEST)
                if CAREFUL:
                    nonfinite = ~is_finite(number.to(tl.float32))
                    number = tl.where(nonfinite, 0.0, number.to(tl.float32)).to(dtype)
                    rescaled = before * along(rescale, 1 - T)
                    kept = tl.where(along(rescale, 1 - T) == 0, 0.0, rescaled)
                    after = _dot(weights.to(dtype), number, kept, T)
                    sees = _dot((weights != 0).to(tl.float16), nonfinite.to(tl.float16), None, T) > 0
                    after = tl.where(sees, float("nan"), after)
                else:
                    after = _dot(weights.to(number.dtype), number, before * along(rescale, 1 - T), T)
            result += (after,)
    return result


@triton.jit
def along(x, AXIS: tl.constexpr):
    """Vector as a tile of one row or column, ``x`` along ``AXIS``."""
    return x[:, None] if AXIS == 0 else x[None, :]


@triton.jit
def _dot(rows, tokens, acc, T: tl.constexpr):
    """``acc`` plus the product of a tile of rows with one of tokens, transposed if tokens come first."""
    if T == 1:
        result = tl.dot(rows, tokens, acc, input_precision="ieee")
    else:
        result = tl.dot(tokens, rows, acc, input_precision="ieee")
    return result


@triton.jit
def _slot_of(table, page_row, token, FORM: tl.constexpr):
    """Slots of tokens, clamped to the cache, so that an invalid table reads nothing outside."""
    token = token.to(tl.uint32)
    if FORM.page_size > _INT32_MAX:
        page, within = tl.zeros_like(token), token
    else:
        page, within = token // FORM.page_size, token % FORM.page_size
    first = tl.load(table.data + page_row + page.to(tl.int64) * table.page)
    if FORM.is_wide:
        last = tl.full((), table.num_slots - 1, tl.uint64)
        slot = tl.minimum(first.to(tl.uint64) + within, last).to(tl.int64)
    else:
        last = tl.full((), table.num_slots - 1, tl.uint32)
        slot = tl.minimum(first.to(tl.uint32) + within, last).to(tl.int32)
    return slot


@triton.jit
def _stored(side, at, element, is_in, FORM: tl.constexpr):
    """Elements of head vectors that begin ``at``, 0 after the last; bytes that are apart become words."""
    CACHE: tl.constexpr = FORM.cache
    if FORM.is_apart:
        low = _load(side.cache.data + (at + place_of_element(side.cache, 2 * element, CACHE)), is_in, FORM)
        high = _load(
            side.cache.data + (at + place_of_element(side.cache, 2 * element + 1, CACHE)), is_in, FORM
        )
        stored = (low.to(tl.int16) & 0xFF) | (high.to(tl.int16) << 8)
    else:
        stored = _load(side.cache.data + (at + place_of_element(side.cache, element, CACHE)), is_in, FORM)
    return stored


@triton.jit
def _load(at, is_in, FORM: tl.constexpr):
    """Stored elements, 0 after the last of a head vector."""
    if FORM.dim == FORM.chunks * FORM.width:
        return tl.load(at)
    return tl.load(at, mask=is_in, other=0)


@triton.jit
def exp_below(x, top):
    """``exp(x - top)``, and 0 if both are -inf."""
    return exp(x - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def _tanh(x):
    """Hyperbolic tangent by an exponential that cannot overflow."""
    decay = exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def _cast(x, dtype: tl.constexpr):
    """Cast stored numbers to the dtype of the query."""
    return x if x.dtype == dtype else x.to(tl.float32).to(dtype)


@triton.jit
def _group_scale(side, slot, head, group: tl.constexpr, FORM: tl.constexpr):
    """Stored scale ``[N]`` of one group."""
    SCALE: tl.constexpr = FORM.scale
    at = place_of_vector(side.scale, slot, head, SCALE)
    word = tl.full((), group // FORM.scales_in_word, tl.int32)
    stored = tl.load(side.scale.data + (at + place_of_element(side.scale, word, SCALE)))
    if FORM.scales_in_word == 1:
        scale = stored
    else:
        dtype: tl.constexpr = tl.float16 if FORM.is_scale_float16 else tl.bfloat16
        scale = (stored >> (16 * (group % 2))).to(tl.int16).to(dtype, bitcast=True)
    return scale


@triton.jit
def _scales_of_groups(side, slot, head, element, FORM: tl.constexpr, T: tl.constexpr):
    """Scale ``[N, width]`` of each stored element; that of each group is read once."""
    factor = along(_group_scale(side, slot, head, 0, FORM), 1 - T)
    for g in tl.static_range(1, FORM.dim // FORM.group):
        next_factor = along(_group_scale(side, slot, head, g, FORM), 1 - T)
        factor = tl.where(element < g * FORM.group, factor, next_factor)
    return factor


@triton.jit
def _scales(side, slot, head, is_in, element, FORM: tl.constexpr):
    """Stored scale of each stored element, in the broadcast shape of slot and element."""
    SCALE: tl.constexpr = FORM.scale
    at = place_of_vector(side.scale, slot, head, SCALE)
    within = place_of_element(side.scale, element // FORM.group, SCALE)
    return _load(side.scale.data + (at + within), is_in, FORM)
