"""Symmetric group quantization as PMX defines it: ``x ~ code * scale``.

One scale serves ``group`` consecutive elements along D. Every operation is rounded to the dtype of the input,
because the codes are part of the standard. Special values:

====================================  =======================  ==============  =================
input group                           stored scale             codes           dequantized
====================================  =======================  ==============  =================
all zero, -0.0 or ``|x| < qmax*eps``  eps = 1e-5               round(x / eps)  about x, never -0
largest finite input                  as the formula           as the formula  saturates, finite
product beyond the scale dtype        as the formula           as the formula  its largest finite
scale beyond the scale dtype          its largest finite       as the formula  saturates, finite
any NaN or infinity in the group      NaN                      0               NaN, whole group
====================================  =======================  ==============  =================

A finite input never becomes infinite: the formula alone would turn float16 65504 into inf. A group that
cannot be represented is NaN as a whole, so that the error is visible and not rounded to zero.
"""

from typing import Final

import torch
from torch import Tensor

from kvloom.quant.packing import pack, unpack

EPS: Final = 1e-5
QMAX: Final = {8: 127, 4: 7}


def quantize(x: Tensor, bits: int, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize along the last axis.

    ``scale = max(max|x| / qmax, eps)``, ``code = clamp(round_half_even(x / scale), -qmax, qmax)``. The codes
    come from the scale before it is stored as ``scale_dtype``.

    Args:
        x: ``[..., D]`` float32, float16 or bfloat16; ``group`` divides D.
        bits: 8 or 4.
        group: Elements that share a scale.
        scale_dtype: float32, float16 or bfloat16.

    Returns:
        Codes, int8 ``[..., D]`` or (4 bits) uint8 ``[..., D / 2]``, and scales ``[..., D / group]``.
    """
    qmax = QMAX[bits]
    groups = x.unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True)
    finite = amax.isfinite()  # a maximum with a NaN is NaN, so this covers the whole group
    # A tensor divisor: with a Python number CUDA multiplies by its reciprocal, which changes codes.
    scale = (amax / amax.new_full((), qmax)).clamp_min(EPS)
    codes = (groups / scale).round().clamp(-qmax, qmax).where(finite, 0).to(torch.int8).flatten(-2)
    stored = saturate(scale, scale_dtype).where(finite, float("nan")).squeeze(-1)
    return codes if bits == 8 else pack(codes, bits), stored


def dequantize(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Inverse of ``quantize``: the product is rounded to the dtype of ``scale``, then to ``dtype``.

    Args:
        codes: int8 ``[..., D]`` or (4 bits) uint8 ``[..., D / 2]``.
        scale: ``[..., D / group]``.
        bits: 8 or 4.
        dtype: Of the result, ``[..., D]``.
    """
    wide = codes if bits == 8 else unpack(codes, bits)
    groups = wide.unflatten(-1, (scale.shape[-1], -1)).to(scale.dtype)
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
