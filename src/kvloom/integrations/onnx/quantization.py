"""The PMX quantizer in standard operators: computed in float32, rounded where the document rounds.

A float32 quotient or product that is rounded to a 16-bit type is correctly rounded, since float32 has more
than twice the digits. Nibbles are split by arithmetic, for which every runtime has kernels.
"""

from typing import Final

import ml_dtypes
import numpy as np
from onnx import TensorProto

from kvloom.integrations.onnx.builder import BOOL, FLOAT, INT32, Builder
from kvloom.quant.affine import EPS, QMAX

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
    groups = b.op("Div", dim, b.int_vector(group))
    x = b.reshape(b.cast(x, FLOAT), sides, tokens, heads, groups, group)
    last = b.int_vector(4)  # not -1, which ONNX Runtime does not understand where there are no elements
    nonfinite = b.op("ReduceMax", b.cast(b.is_nonfinite(x), INT32), last, keepdims=1)
    nonfinite = b.cast(nonfinite, BOOL)
    x = b.op("Where", nonfinite, b.float_scalar(0.0), x)
    eps = float(np.asarray(EPS, dtype=_NUMPY[dtype]))
    amax = b.op("ReduceMax", b.op("Abs", x), last, keepdims=1)
    scale = b.op("Max", rounded(b, b.op("Div", amax, b.float_scalar(QMAX[bits])), dtype), b.float_scalar(eps))
    quotient = rounded(b, b.op("Div", x, scale), dtype)
    codes = b.clip(b.op("Round", quotient), QMAX[bits])
    stored = b.clip(scale, largest(scale_dtype)) if largest(dtype) > largest(scale_dtype) else scale
    stored = b.op("Where", nonfinite, b.float_scalar(float("nan")), stored)
    stored = b.reshape(b.cast(stored, scale_dtype), sides, tokens, heads, groups)
    if bits == 8:
        return b.reshape(b.cast(codes, TensorProto.INT8), sides, tokens, heads, dim), stored
    pairs = b.reshape(codes, sides, tokens, heads, b.op("Div", dim, b.int_vector(2)), 2)
    nibbles = b.op(
        "Where", b.op("Less", pairs, b.float_scalar(0.0)), b.op("Add", pairs, b.float_scalar(16.0)), pairs
    )
    weights = b.tensor([1.0, 16.0], [2])
    packed = b.op("ReduceSum", b.op("Mul", nibbles, weights), last, keepdims=0)
    return b.cast(packed, TensorProto.UINT8), stored


def dequantize(
    b: Builder, codes: str, scale: str, dtype: int, bits: int, group: int, scale_dtype: int
) -> str:
    """Inverse of ``quantize``: ``[2, N, H, D]`` in ``dtype``."""
    sides, tokens, heads, groups = (b.size(scale, axis) for axis in range(4))
    x = b.cast(codes, FLOAT)
    if bits == 4:
        x = b.unsqueeze(x, -1)
        high = b.op("Floor", b.op("Div", x, b.float_scalar(16.0)))
        low = b.op("Sub", x, b.op("Mul", high, b.float_scalar(16.0)))
        x = b.op("Concat", low, high, axis=-1)
        negative = b.op("Greater", x, b.float_scalar(7.0))
        x = b.op("Where", negative, b.op("Sub", x, b.float_scalar(16.0)), x)
    x = b.reshape(x, sides, tokens, heads, groups, group)
    product = rounded(b, b.op("Mul", x, b.unsqueeze(b.cast(scale, FLOAT), -1)), scale_dtype)
    product = b.clip(product, largest(scale_dtype))
    dim = b.op("Mul", groups, b.int_vector(group))
    return saturated(b, b.reshape(product, sides, tokens, heads, dim), dtype, scale_dtype)
