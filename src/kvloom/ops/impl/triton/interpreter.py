"""Fixes of Triton's interpreter: it truncates to bfloat16 instead of rounding, and multiplies its bits.

A comparison of scalars becomes a mask of integers, and a reduction that keeps NaN takes long.

Importing this under ``TRITON_INTERPRET=1`` installs it, so that kernels need no special cases.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle


def to_float32(bits: Any) -> Any:
    """Convert bfloat16 bits, uint16, to numpy float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: Any) -> Any:
    """Convert numpy float32 to bfloat16 bits, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    nearest = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), nearest).astype(np.uint16)


def _is_bfloat16(x: Any) -> bool:
    return bool(x.dtype.scalar == tl.bfloat16)


def install() -> None:
    """Replace the interpreter's casts and products by ones that support bfloat16."""
    cast, product = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    multiply = InterpreterBuilder.create_fmul

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        with np.errstate(all="ignore"):
            if _is_bfloat16(source):
                source = TensorHandle(to_float32(source.data), tl.float32)
            if dtype.scalar == tl.bfloat16:
                wide = cast(self, source, tl.float32)
                return TensorHandle(to_bfloat16(wide.data), tl.bfloat16)
            return cast(self, source, dtype)

    def create_fp_to_fp(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        return cast_impl(self, source, dtype)

    def create_dot(self: Any, a: Any, b: Any, *how: Any) -> Any:
        a, b = (TensorHandle(to_float32(x.data), tl.float32) if _is_bfloat16(x) else x for x in (a, b))
        return product(self, a, b, *how)

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        if not _is_bfloat16(a):
            return multiply(self, a, b)
        wide = to_float32(a.data) * to_float32(b.data)
        return TensorHandle(to_bfloat16(wide), tl.bfloat16)

    def get_bf16(self: Any, value: float) -> Any:
        return TensorHandle(to_bfloat16(np.array([value], dtype=np.float32)), tl.bfloat16)

    reduce = ReduceOps.apply_impl

    def apply_impl(self: Any, parts: Any) -> Any:
        if self.combine_fn.fn.__name__ == "larger":  # of numerics
            return self.min_max(parts[0], val_reduce_op=np.max)
        return reduce(self, parts)

    ReduceOps.apply_impl = apply_impl
    splat = InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, x: Any) -> Any:
        filled = splat(self, kind, x)
        return TensorHandle(filled.data.astype(bool), tl.int1) if x.data.dtype == bool else filled

    InterpreterBuilder.create_splat = create_splat
    InterpreterBuilder.get_bf16 = get_bf16
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_fmul = create_fmul
