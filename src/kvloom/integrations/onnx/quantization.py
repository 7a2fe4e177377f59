"""The PMX quantizer in standard operators: computed in float32, with the roundings of the document.

A float32 quotient or product that is rounded to a 16-bit type is correctly rounded, since float32 has more
than twice the digits. Nibbles are split by arithmetic, for which every runtime has kernels.
"""

from typing import Final

import ml_dtypes
import numpy as np
from onnx import TensorProto

from kvloom.core.entries import OF_BITS
from kvloom.integrations.onnx.builder import BOOL, FLOAT, INT32, Builder
from kvloom.quant.affine import EPS

_NUMPY: Final = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
}


def largest(dtype: int) -> float:
    """The largest finite value of an ONNX float type."""
    return float(ml_dtypes.finfo(_NUMPY[dtype]).max)


def rounded(b: Builder, x: str, dtype: int) -> str:
    """Float32 ``x`` rounded to ``dtype``, as float32."""
    return x if dtype == FLOAT else b.cast(b.cast(x, dtype), FLOAT)


def saturated(b: Builder, x: str, dtype: int, of: int) -> str:
    """Float32 ``x``, whose values fit ``of``, cast to ``dtype``; a finite value stays finite."""
    if largest(of) > largest(dtype):
        x = b.clip(x, largest(dtype))
    return b.cast(x, dtype)


def quantize(b: Builder, x: str, dtype: int, bits: int, group: int, scale_dtype: int) -> tuple[str, str]:
    """Codes ``[2, N, H, D]`` (4 bits: ``D / 2``) and scales ``[2, N, H, D / group]`` of ``x``."""
    sides, tokens, heads, dim = (b.size(x, axis) for axis in range(4))
    groups = b.Div(dim, [group])
    x = b.reshape(b.cast(x, FLOAT), sides, tokens, heads, groups, group)
    last = [4]  # not -1, which fails in ONNX Runtime without elements
    nonfinite = b.ReduceMax(b.cast(b.is_nonfinite(x), INT32), last, keepdims=1)
    nonfinite = b.cast(nonfinite, BOOL)
    x = b.Where(nonfinite, 0.0, x)
    largest_code = float(OF_BITS[bits].largest)
    eps = float(np.asarray(EPS, dtype=_NUMPY[dtype]))
    amax = b.ReduceMax(b.Abs(x), last, keepdims=1)
    scale = b.Max(rounded(b, b.Div(amax, largest_code), dtype), eps)
    quotient = rounded(b, b.Div(x, scale), dtype)
    codes = b.clip(b.Round(quotient), largest_code)
    stored = b.clip(scale, largest(scale_dtype)) if largest(dtype) > largest(scale_dtype) else scale
    stored = b.Where(nonfinite, float("nan"), stored)
    stored = b.reshape(b.cast(stored, scale_dtype), sides, tokens, heads, groups)
    if bits == 8:
        return b.reshape(b.cast(codes, TensorProto.INT8), sides, tokens, heads, dim), stored
    pairs = b.reshape(codes, sides, tokens, heads, b.Div(dim, [2]), 2)
    nibbles = b.Where(b.Less(pairs, 0.0), b.Add(pairs, 16.0), pairs)
    weights = b.tensor([1.0, 16.0], [2])
    packed = b.ReduceSum(b.Mul(nibbles, weights), last, keepdims=0)
    return b.cast(packed, TensorProto.UINT8), stored


def dequantize(
    b: Builder, codes: str, scale: str, dtype: int, bits: int, group: int, scale_dtype: int
) -> str:
    """Inverse of ``quantize``: ``[2, N, H, D]`` in ``dtype``."""
    sides, tokens, heads, groups = (b.size(scale, axis) for axis in range(4))
    x = b.cast(codes, FLOAT)
    if bits == 4:
        x = b.unsqueeze(x, -1)
        high = b.Floor(b.Div(x, 16.0))
        low = b.Sub(x, b.Mul(high, 16.0))
        x = b.Concat(low, high, axis=-1)
        negative = b.Greater(x, 7.0)
        x = b.Where(negative, b.Sub(x, 16.0), x)
    x = b.reshape(x, sides, tokens, heads, groups, group)
    product = rounded(b, b.Mul(x, b.unsqueeze(b.cast(scale, FLOAT), -1)), scale_dtype)
    product = b.clip(product, largest(scale_dtype))
    dim = b.Mul(groups, [group])
    return saturated(b, b.reshape(product, sides, tokens, heads, dim), dtype, scale_dtype)
