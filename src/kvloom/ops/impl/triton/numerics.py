"""Device functions of ``quant/affine.py``: each step in float32, then rounded where the reference rounds.

Ties round to even. Quotients are divided (``div_rn``), but of 16-bit numbers by a scale of their dtype, see
``quotients``.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from kvloom.ops.impl.triton.launching import INTERPRETED
from kvloom.quant.affine import EPS

# Adding and subtracting 1.5 * 2^23 rounds numbers below 2^22 to integers, ties to even.
_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
_BITS_OF_ROUNDER: tl.constexpr = tl.constexpr(0x4B400000)  # of which the last byte is 0
_INF: tl.constexpr = tl.constexpr(float("inf"))
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_EPS: tl.constexpr = tl.constexpr(EPS)

# PTX is assembly for NVIDIA's GPUs; elsewhere kernels do the same in Triton.
_HAS_PTX: tl.constexpr = tl.constexpr(not INTERPRETED and torch.version.hip is None)


@triton.constexpr_function
def _ptx_of_word(dtype: str, bits: int, plane: int) -> str:
    """PTX for ``number_as`` of two words: a code below a power of two, minus the offset of both."""
    name, power, one = ("bf16", 0x4300, "0x3f803f80") if dtype == "bf16" else ("f16", 0x6400, "0x3c003c00")

    def twice(x: int) -> str:
        return f"0x{x << 16 | x:08x}"

    word = f"shr.u32 x, $1, {bits * plane};"
    if name == "bf16" and bits == 8:
        return f"""{{
            .reg .b32 x, low, high, minus;
            {word}
            lop3.b32 low, x, {twice(0x7F)}, {twice(power)}, 0xea;
            lop3.b32 high, x, {twice(0x80)}, {twice(power)}, 0xea;
            mov.b32 minus, 0xbf80bf80;
            fma.rn.bf16x2 $0, high, minus, low;
        }}"""
    offset = power | 1 << (bits - 1)
    return f"""{{
        .reg .b32 x, one, offset;
        {word}
        lop3.b32 x, x, {twice((1 << bits) - 1)}, {twice(offset)}, 0x6a;
        mov.b32 one, {one};
        mov.b32 offset, {twice(offset | 0x8000)};
        fma.rn.{name}x2 $0, x, one, offset;
    }}"""


LARGEST: Final = {x: torch.finfo(x).max for x in (torch.float32, torch.float16, torch.bfloat16)}
"""Largest finite value of each dtype."""

LEAST_SCALE: Final = {x: float(torch.tensor(EPS, dtype=x)) for x in LARGEST}
"""Smallest scale, rounded to each dtype of inputs."""


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Float32 ``x`` rounded to ``dtype``, in float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def is_finite(x):
    """Whether ``x`` is neither infinite nor NaN."""
    return tl.abs(x) < _INF


@triton.jit
def exp(x):
    """Exponential of float32; results below the smallest normal number may be 0."""
    if _HAS_PTX:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * _LOG2_E], tl.float32, is_pure=True, pack=1
        )
    else:
        power = tl.exp(x)
    return power


@triton.jit
def clamped(x, LARGEST: tl.constexpr):
    """``x`` within ``[-LARGEST, LARGEST]``; NaN stays NaN."""
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(x, QMAX: tl.constexpr):
    """Largest magnitude of each row of ``x``, and whether the row, and so the magnitude, is finite.

    With a negative QMAX the first is the element that has that magnitude; of two, the positive one.
    """
    largest = tl.reduce(tl.abs(x), 1, larger, keep_dims=True)
    finite = is_finite(largest)
    if QMAX < 0:
        largest = tl.where(tl.max(x, axis=1, keep_dims=True) >= largest, largest, -largest)
    return largest, finite


@triton.jit
def scale_of(largest, dtype: tl.constexpr, QMAX: tl.constexpr, LEAST: tl.constexpr):
    """Scale of groups with these largest elements, in the dtype of the input, as float32.

    As with ``quotients``, a product rounds to 16 bits as the quotient does: QMAX is odd and has fewer bits
    than these dtypes, or it is a power of two.
    """
    if dtype == tl.float32:
        quotient = tl.div_rn(largest, tl.full(largest.shape, QMAX, tl.float32))
    else:
        quotient = largest * (1.0 / QMAX)
    scale = rounded(quotient, dtype)
    return tl.where(tl.abs(scale) < LEAST, LEAST, scale)


@triton.jit
def length_kept(x, largest, scale, finite, LEAST: tl.constexpr):
    """Float32 scale with which 2-bit codes keep the length of each row of ``x``."""
    is_scaled = finite & (scale > LEAST)
    largest = tl.where(is_scaled, largest, 1.0)
    magnitude = tl.where(is_scaled, tl.abs(x), 0.0)
    by = tl.div_rn(tl.full(largest.shape, 255.0, tl.float32), largest)
    part = ((magnitude * by + _ROUNDER) - _ROUNDER).to(tl.int32)
    number = tl.where(magnitude >= 2 * scale, 3, 1)
    squares = tl.sum(part * part, axis=1, keep_dims=True).to(tl.float32)
    products = tl.sum(part * number, axis=1, keep_dims=True).to(tl.float32)
    quotient = tl.div_rn(squares, tl.where(is_scaled, products, 1.0))
    kept = tl.div_rn(largest, tl.full(largest.shape, 255.0, tl.float32)) * quotient
    return tl.where(is_scaled, tl.maximum(kept, _EPS), scale)


@triton.jit
def quotients(x, scale, dtype: tl.constexpr):
    """``x / scale`` rounded to ``dtype``, which both have, in float32; ``scale`` is at least ``LEAST_SCALE``.

    With 16 bits this is one division for each scale. Let both have n significant bits. What lies halfway
    between two results has n + 1, and times the scale it is no x: multiples of an odd number of n + 1 bits
    have more than n. So a quotient differs from it by at least one part in ``(2^(n+1) - 1) * (2^n - 1)``,
    which is more than the rounding of the reciprocal and of the product, 2^-24 each. Ties do not occur, so
    adding half of the last bit that is kept rounds. Results below the normal numbers of float16 keep more
    bits than float16 has, but their codes are 0.
    """
    if dtype == tl.float32:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    DROPPED: tl.constexpr = 16 if dtype == tl.bfloat16 else 13
    near = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    bits = near.to(tl.int32, bitcast=True) + (1 << (DROPPED - 1))
    return (bits & -(1 << DROPPED)).to(tl.float32, bitcast=True)


@triton.jit
def code_of(x, scale, finite, dtype: tl.constexpr, QMAX: tl.constexpr, BITS: tl.constexpr):
    """Codes of ``x`` in the last bits of each int32; 0 where its group is not finite."""
    if BITS == 2:
        code = (tl.abs(x) >= 2 * scale).to(tl.int32) ^ (x.to(tl.int32, bitcast=True) >> 31)
        return tl.where(finite, code, 0)
    code = (quotients(x, scale, dtype) + _ROUNDER).to(tl.int32, bitcast=True)
    if BITS == 8:
        code = tl.maximum(code, _BITS_OF_ROUNDER - tl.where(finite, QMAX, 0))
        return tl.minimum(code, _BITS_OF_ROUNDER + tl.where(finite, QMAX, 0))
    # A rounded scale of 4 bits is so near that no quotient rounds to more than 7, or to less than -8.
    if QMAX < 0:
        code = tl.minimum(code, _BITS_OF_ROUNDER + 7)
    return code & tl.where(finite, 0xF, 0)


@triton.jit
def stored_scale(scale, finite, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Scale as stored: saturated, and NaN where its group is not finite."""
    kept = clamped(scale, LARGEST).to(dtype)
    return tl.where(finite, kept, tl.full(kept.shape, float("nan"), dtype))


@triton.jit
def dequantized(number, scale, dtype: tl.constexpr, LARGEST_SCALE: tl.constexpr, LARGEST: tl.constexpr):
    """``number * scale`` rounded to the dtype of the scale, then to ``dtype``; finite if the scale is."""
    product = rounded(number.to(tl.float32) * scale.to(tl.float32), scale.dtype)
    product = clamped(product, LARGEST_SCALE)
    return clamped(product, LARGEST).to(dtype)


@triton.jit
def number_in(stored, plane: tl.constexpr, BITS: tl.constexpr):
    """Number of the code of one plane in each int8 or int16; plane 0 has the lowest bits."""
    WIDTH: tl.constexpr = stored.dtype.primitive_bitwidth
    code = (stored << (WIDTH - BITS * (plane + 1))) >> (WIDTH - BITS)
    return code * 2 + 1 if BITS == 2 else code


@triton.jit
def number_as(stored, plane: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Number as of ``number_in``, in ``dtype``, which has 16 bits if codes of 4 or 8 bits are in int16.

    Such codes become the last bits of a number of ``dtype``, from which an offset is subtracted, exactly and
    without an integer conversion: 1024 in float16, with 10 mantissa bits; in bfloat16, with 7 bits, 128, or
    256 for a negative code.
    """
    if _HAS_PTX and stored.dtype == tl.int16:
        asm: tl.constexpr = _ptx_of_word(dtype.name, BITS, plane)
        bits = tl.inline_asm_elementwise(asm, "=r,r", [stored], tl.int16, is_pure=True, pack=2)
        number = bits.to(dtype, bitcast=True)
    else:
        number = number_in(stored, plane, BITS).to(dtype)
    return number


@triton.jit
def packed(code, BITS: tl.constexpr):
    """Pack codes ``[rows, width]``, int32, into bytes ``[rows, width * BITS / 8]``."""
    if BITS == 2:
        even, odd = tl.split(code.reshape(code.shape[0], code.shape[1] // 2, 2))
        code = (even & 3) | ((odd & 3) << 2)
    if BITS < 8:
        low, high = tl.split(code.reshape(code.shape[0], code.shape[1] // 2, 2))
        code = (low & 0xF) | (high << 4)
    return code.to(tl.int8)


@triton.jit
def unpacked(byte, BITS: tl.constexpr):
    """Unpack int8 bytes ``[rows, width]`` into the numbers of their codes, in order, int8."""
    if BITS == 8:
        numbers = byte
    elif BITS == 4:
        numbers = tl.join(number_in(byte, 0, BITS), number_in(byte, 1, BITS))
    else:
        even = tl.join(number_in(byte, 0, BITS), number_in(byte, 2, BITS))
        odd = tl.join(number_in(byte, 1, BITS), number_in(byte, 3, BITS))
        numbers = tl.join(even, odd)
    return numbers.reshape(byte.shape[0], 8 // BITS * byte.shape[1])
