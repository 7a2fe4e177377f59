"""Group quantization: ``x ~ number * scale``, of 8 and 4 bits as PMX defines it, and kvloom's own ways.

One scale serves ``group`` consecutive elements along D. Every operation is rounded to the dtype of the input,
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

In full range of 4 bits e is the element of the largest magnitude, of two of different signs the positive one.
Its code is -8, the one that has no opposite, and a positive e makes the scale negative. So a step is an
eighth of the largest magnitude and not a seventh, and only what is nearer to ``-e`` than to 7 steps errs by
more than half a step, by a whole one at most.

Two bits are the middles of four equal parts of what lies between the largest magnitude and its negative; the
sign of an x is its sign bit. In full range the scale is the one with which the product of the group and of
what comes back is the sum of squares of the group: noise averages out over the tokens that attention reads,
and numbers that are too small do not. Both sums are of magnitudes as integers, 255 for the largest, and so
the same in any order. The scale, ``max|x| / 255`` by their quotient, is of float32.

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

A scale is below eps if its magnitude is.

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
    """Quantize along the last axis, by scales of a magnitude of at least eps.

    The codes come from the scale before it is stored as ``scale_dtype``.

    Args:
        x: ``[..., D]`` float32, float16 or bfloat16; ``group`` divides D.
        bits: 8, 4 or 2.
        group: Elements that share a scale.
        scale_dtype: float32, float16 or bfloat16.
        full_range: Whether codes of 4 bits have all sixteen numbers, and a scale of codes of 2 bits keeps the
            length of its group; of no meaning for 8.

    Returns:
        Codes ``[..., D * bits / 8]`` of ``CODE_DTYPE``, and scales ``[..., D / group]``.
    """
    qmax = OF_BITS[bits].largest
    groups = x.unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True)
    finite = amax.isfinite()  # a maximum with a NaN is NaN, so this covers the whole group
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
    """The float32 scale with which codes of 2 bits keep the length of a group, at least eps."""
    largest = amax.float()
    parts = (groups.float().abs() * (largest.new_full((), 255) / largest)).round()
    parts = parts.where(parts.isfinite(), 0).long()
    squares = (parts * parts).sum(-1, keepdim=True).float()
    products = (parts * (1 + 2 * is_large)).sum(-1, keepdim=True).float()
    return (largest / largest.new_full((), 255) * (squares / products)).clamp_min(EPS)


def dequantize(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Inverse of ``quantize``: the product is rounded to the dtype of ``scale``, then to ``dtype``.

    Args:
        codes: As ``quantize`` gives them.
        scale: ``[..., D / group]``.
        bits: 8, 4 or 2.
        dtype: Of the result, ``[..., D]``.
    """
    numbers = codes if bits == 8 else unpack(codes.view(torch.uint8), bits)
    if bits == 2:
        numbers = 2 * numbers + 1
    groups = numbers.unflatten(-1, (scale.shape[-1], -1)).to(scale.dtype)
    largest = torch.finfo(scale.dtype).max
    product = (groups * scale.unsqueeze(-1)).flatten(-2).clamp(-largest, largest)
    return saturate(product, dtype)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, but what would round beyond the largest finite value becomes that value. NaN stays NaN."""
    largest = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= largest:
        return x.to(dtype)
    # In float32, since 65504 is not a bfloat16 number.
    return x.float().clamp(-largest, largest).to(dtype)
