"""``quant/affine.py`` in kernels: each step in float32, then rounded where the reference rounds.

Quotients are divided (``div_rn``), never multiplied by a reciprocal, and ties round to even.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from kvloom.quant.affine import EPS

# Adding and taking away 1.5 * 2^23 leaves an integer, ties to even, of what is smaller than 2^22.
_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
_INF: tl.constexpr = tl.constexpr(float("inf"))
_EPS: tl.constexpr = tl.constexpr(EPS)

LARGEST: Final = {x: torch.finfo(x).max for x in (torch.float32, torch.float16, torch.bfloat16)}
"""Largest finite value of a dtype."""

LEAST_SCALE: Final = {x: float(torch.tensor(EPS, dtype=x)) for x in LARGEST}
"""The smallest scale, as an input's dtype has it."""


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 ``x`` rounded to ``dtype``, in float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def is_finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) < _INF


@triton.jit
def clamped(x, LARGEST: tl.constexpr):
    """``x`` within ``[-LARGEST, LARGEST]``; NaN stays NaN."""
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit
def largest_of(x, QMAX: tl.constexpr):
    """The largest magnitude of each row of finite ``x``; with a negative QMAX the element that has it."""
    if QMAX > 0:
        return tl.max(tl.abs(x), axis=1, keep_dims=True)
    top, bottom = tl.max(x, axis=1, keep_dims=True), tl.min(x, axis=1, keep_dims=True)
    return tl.where(top >= -bottom, top, bottom)


@triton.jit
def scale_of(largest, dtype: tl.constexpr, QMAX: tl.constexpr, LEAST: tl.constexpr):
    """Scale of groups with these largest elements, in the dtype of the input, as float32."""
    quotient = tl.div_rn(largest, tl.full(largest.shape, QMAX, tl.float32))
    scale = rounded(quotient, dtype)
    return tl.where(tl.abs(scale) < LEAST, LEAST, scale)


@triton.jit
def length_kept(x, largest, scale, finite, LEAST: tl.constexpr):
    """The float32 scale with which codes of 2 bits keep the length of each row of ``x``."""
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
def code_of(x, scale, finite, dtype: tl.constexpr, QMAX: tl.constexpr, BITS: tl.constexpr):
    """Codes of ``x``, int32; 0 where its group is not finite."""
    if BITS == 2:
        code = (tl.abs(x) >= 2 * scale).to(tl.int32) ^ (x.to(tl.int32, bitcast=True) >> 31)
        return tl.where(finite, code, 0)
    quotient = rounded(tl.div_rn(x, tl.broadcast_to(scale, x.shape)), dtype)
    quotient = tl.minimum(quotient, 7.0) if QMAX < 0 else clamped(quotient, QMAX)
    code = tl.where(finite, quotient, 0.0)
    return ((code + _ROUNDER) - _ROUNDER).to(tl.int32)


@triton.jit
def stored_scale(scale, finite, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """A scale as the cache keeps it: saturated, and NaN where its group is not finite."""
    kept = clamped(scale, LARGEST).to(dtype)
    return tl.where(finite, kept, tl.full(kept.shape, float("nan"), dtype))


@triton.jit
def dequantized(number, scale, dtype: tl.constexpr, LARGEST_SCALE: tl.constexpr, LARGEST: tl.constexpr):
    """``number * scale`` rounded to the dtype of the scale, then to ``dtype``; finite if the scale is."""
    product = rounded(number.to(tl.float32) * scale.to(tl.float32), scale.dtype)
    product = clamped(product, LARGEST_SCALE)
    return clamped(product, LARGEST).to(dtype)


@triton.jit
def number_in(byte, plane: tl.constexpr, BITS: tl.constexpr):
    """The number that the code of one plane in each int8 ``byte`` stands for, the lowest of plane 0; int8."""
    code = (byte << (8 - BITS * (plane + 1))) >> (8 - BITS)
    return code * 2 + 1 if BITS == 2 else code


@triton.jit
def packed(code, BITS: tl.constexpr):
    """Codes ``[rows, width]``, int32, as bytes ``[rows, width * BITS / 8]``."""
    if BITS == 2:
        even, odd = tl.split(code.reshape(code.shape[0], code.shape[1] // 2, 2))
        code = (even & 3) | ((odd & 3) << 2)
    if BITS < 8:
        low, high = tl.split(code.reshape(code.shape[0], code.shape[1] // 2, 2))
        code = (low & 0xF) | (high << 4)
    return code.to(tl.int8)


@triton.jit
def unpacked(byte, BITS: tl.constexpr):
    """The numbers that the codes in int8 bytes ``[rows, width]`` stand for, in order, int8."""
    if BITS == 8:
        numbers = byte
    elif BITS == 4:
        numbers = tl.join(number_in(byte, 0, BITS), number_in(byte, 1, BITS))
    else:
        even = tl.join(number_in(byte, 0, BITS), number_in(byte, 2, BITS))
        odd = tl.join(number_in(byte, 1, BITS), number_in(byte, 3, BITS))
        numbers = tl.join(even, odd)
    return numbers.reshape(byte.shape[0], 8 // BITS * byte.shape[1])
