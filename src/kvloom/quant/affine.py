"""Group quantization: ``x ~ number * scale``, with 8 and 4 bits as PMX defines it, and kvloom's own codes.

``group`` consecutive elements along D share a scale. Every operation is rounded to the dtype of the input,
because the codes are part of the standard.

=======  =====================  ======================================  ==================
bits     scale                  code                                    number
=======  =====================  ======================================  ==================
8        ``max|x| / 127``       ``x / scale``, ties to even             the code
4        ``max|x| / 7``         ``x / scale``, ties to even             the code
4, full  ``e / -8``             ``x / scale``, ties to even, 7 for 8    the code
2        ``max|x| / 4``         0 below ``2 scale``, else 1; of a       ``2 code + 1``: -3,
                                negative x its complement, -1 or -2     -1, 1 or 3
2, full  ``sum x x / sum x n``  the same, by ``max|x| / 4``             n, the same
=======  =====================  ======================================  ==================

For 4 bits in full range, e is the element of the largest magnitude; of two with different signs, the positive
one. Its code is -8, which has no opposite, so a positive e makes the scale negative. A step is an eighth of
the largest magnitude, not a seventh. Only elements nearer to ``-e`` than to 7 steps err by more than half a
step, by a whole one at most.

Two bits are the midpoints of four equal parts of the range between the largest magnitude and its negative;
the sign of an x is its sign bit. In full range the scale makes the dot product of the group with its
dequantized numbers the sum of squares of the group: noise averages out over the tokens that attention reads,
but a bias toward small numbers does not. Both sums are of magnitudes as integers, 255 for the largest, so
they are the same in any order. The scale, ``max|x| / 255`` times their quotient, is float32.

Special values:

====================================  =======================  ==============  =================
input group                           stored scale             codes           dequantized
====================================  =======================  ==============  =================
all zero, -0.0 or scale below eps     eps = 1e-5, positive     as the formula  about x, never -0
largest finite input                  as the formula           as the formula  saturates, finite
product beyond the scale dtype        as the formula           as the formula  its largest finite
scale beyond the scale dtype          its largest finite, of   as the formula  saturates, finite
                                      the sign of the scale
any NaN or infinity in the group      NaN                      0               NaN, whole group
code 0 of a negative scale            as the formula           0               -0
====================================  =======================  ==============  =================

A scale is below eps if its magnitude is below eps.

A finite input never becomes infinite: the formula alone would turn float16 65504 into inf. A group that
cannot be represented is NaN as a whole, so that the error is visible and not rounded to zero.
"""

from typing import Final

import torch
from torch import Tensor

from kvloom.core.entries import OF_BITS
from kvloom.core.specs import CODE_DTYPE
from kvloom.quant.packing import pack, unpack

EPS: Final = 1e-5


def quantize(
    x: Tensor, bits: int, group: int, scale_dtype: torch.dtype, full_range: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize along the last axis, with scales whose magnitude is at least eps.

    Codes are computed with the scale before it is rounded to ``scale_dtype``.

    Args:
        x: ``[..., D]`` float32, float16 or bfloat16; ``group`` divides D.
        bits: 8, 4 or 2.
        group: Elements that share a scale.
        scale_dtype: float32, float16 or bfloat16.
        full_range: Whether 4-bit codes use all sixteen numbers, and 2-bit scales keep the length of their
            group; ignored for 8 bits.

    Returns:
        Codes ``[..., D * bits / 8]`` of ``CODE_DTYPE``, and scales ``[..., D / group]``.
    """
    qmax = OF_BITS[bits].largest
    groups = x.unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True)
    finite = amax.isfinite()  # the maximum with a NaN is NaN, so this covers the whole group
    # A tensor divisor: with a Python number CUDA multiplies by its reciprocal, which changes codes.
    scale = (amax / amax.new_full((), qmax)).clamp_min(EPS)
    if full_range and bits == 4:
        top, bottom = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        scale = top.where(top >= -bottom, bottom) / amax.new_full((), -8)
        eps = scale.new_full((), EPS)
        scale = scale.where(scale.abs() >= eps, eps)
        codes = (groups / scale).round().clamp(-8, 7)
    elif bits == 2:
        is_large = groups.abs() >= 2 * scale
        codes = is_large.to(torch.int8) ^ -groups.signbit().to(torch.int8)
        if full_range:
            scale = _length_kept(groups, amax, is_large).where(scale > scale.new_full((), EPS), scale.float())
    else:
        codes = (groups / scale).round().clamp(-qmax, qmax)
    codes = codes.where(finite, 0).to(torch.int8).flatten(-2)
    stored = saturate(scale, scale_dtype).where(finite, float("nan")).squeeze(-1)
    return codes if bits == 8 else pack(codes, bits).view(CODE_DTYPE[bits]), stored


def _length_kept(groups: Tensor, amax: Tensor, is_large: Tensor) -> Tensor:
    """Float32 scale, at least eps, with which 2-bit codes keep the length of a group."""
    largest = amax.float()
    parts = (groups.float().abs() * (largest.new_full((), 255) / largest)).round()
    parts = parts.where(parts.isfinite(), 0).long()
    squares = (parts * parts).sum(-1, keepdim=True).float()
    products = (parts * (1 + 2 * is_large)).sum(-1, keepdim=True).float()
    return (largest / largest.new_full((), 255) * (squares / products)).clamp_min(EPS)


def dequantize(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Inverse of ``quantize``: the product is rounded to the dtype of ``scale``, then to ``dtype``.

    Args:
        codes: Codes as of ``quantize``.
        scale: ``[..., D / group]``.
        bits: 8, 4 or 2.
        dtype: Dtype of the result, ``[..., D]``.
    """
    numbers = codes if bits == 8 else unpack(codes.view(torch.uint8), bits)
    if bits == 2:
        numbers = 2 * numbers + 1
    groups = numbers.unflatten(-1, (scale.shape[-1], -1)).to(scale.dtype)
    largest = torch.finfo(scale.dtype).max
    product = (groups * scale.unsqueeze(-1)).flatten(-2).clamp(-largest, largest)
    return saturate(product, dtype)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast with saturation: values beyond the largest finite one become that value. NaN stays NaN."""
    largest = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= largest:
        return x.to(dtype)
    # Clamped in float32, since 65504 is not a bfloat16 number.
    return x.float().clamp(-largest, largest).to(dtype)
