"""Checks of the arguments of operators, made before anything is written."""

from itertools import combinations
from typing import Final

import torch
from torch import Tensor

from kvloom.core.checks import INT64_END, expect, expect_range, expect_tensor
from kvloom.core.indexing import expect_slots
from kvloom.core.memory import expect_disjoint, expect_memory, expect_writable, shares_memory
from kvloom.core.views import KVView, Side
from kvloom.errors import ArgumentError, ShapeError

PARTS: Final = ("key.cache", "value.cache", "key.scale", "value.scale")
"""Names of ``KVView.tensors`` in errors."""


def expect_store(key: Tensor, value: Tensor | None, slots: Tensor, kv: KVView) -> bool:
    """Check the arguments of ``store``, without the values of ``slots``.

    Returns:
        Whether keys and values are before or after the cache in memory, not between its rows.
    """
    tokens = expect_rows("key", key, kv.key)
    if (value is None) != (kv.value is None):
        raise ArgumentError(f"value must be {'None' if kv.value is None else 'given'} as in the cache")
    if value is not None and kv.value is not None:
        rows = expect_rows("value", value, kv.value)
        if rows != tokens or value.dtype != key.dtype:
            expect("value", value, "T H D", T=tokens, dtype=key.dtype)
    expect_slots("slots", slots, tokens, kv.device)
    expect_writable_view("kv", kv)
    read = (key,) if value is None else (key, value)
    if torch.compiler.is_compiling() or kv.lies_apart_from(*read):
        return True
    for name, x in zip(("key", "value"), read, strict=False):
        for written in kv.tensors:
            if written is not None:
                expect_disjoint(name, x, "kv", written)
    return False


def expect_rows(name: str, x: Tensor, side: Side) -> int:
    """Check new keys or values ``[T, H, D]`` against their cache; returns T."""
    expect_tensor(name, x)
    shape = x.shape
    if shape[1:] != (side.num_heads, side.head_dim) or x.device != side.device:
        expect(name, x, "T H D", device=side.device, H=side.num_heads, D=side.head_dim)
    if x.dtype not in side.dtypes:
        expect_dtype(name, x.dtype, side)
    return shape[0]


def expect_dtype(name: str, dtype: torch.dtype, side: Side) -> None:
    """Check that ``dtype`` is the cache's own, or both are floats between which values are converted."""
    if dtype not in side.dtypes:
        stored = str(side.cache.dtype) if side.scale is None else f"{side.cache.dtype} codes"
        raise ShapeError(f"{name} must be a dtype that a cache of {stored} holds, got {dtype}")


def apart_from(kv: KVView, slots: Tensor) -> Tensor:
    """``slots``, or a copy if writing ``kv`` would change them; on the CPU every backend copies them."""
    if slots.is_cpu or torch.compiler.is_compiling() or kv.lies_apart_from(slots):
        return slots
    return slots.clone() if any(x is not None and shares_memory(slots, x) for x in kv.tensors) else slots


def expect_writable_view(name: str, kv: KVView) -> None:
    """Check that no two elements of ``kv`` share memory, and that none requires a gradient."""
    if kv.is_writable:
        return
    tensors = [(f"{name}.{part}", x) for part, x in zip(PARTS, kv.tensors, strict=True) if x is not None]
    for part, x in tensors:
        expect_writable(part, x)
    for (part, x), (other_part, other) in combinations(tensors, 2):
        expect_disjoint(part, x, other_part, other)


def expect_loadable(num_tokens: int, kv: KVView, dtype: torch.dtype, num_repeat: int) -> None:
    """Check the result of ``load`` of ``num_tokens`` tokens, for a call that writes before it loads.

    Raises:
        ArgumentError: ``num_repeat`` is below 1, or the size of the result does not fit 64 bits.
        OutOfMemory: the result cannot be allocated.
    """
    if torch.compiler.is_compiling():
        expect_range("num_repeat", num_repeat, 1)
        return
    what = f"keys and values of {num_tokens} tokens with num_repeat {num_repeat}"
    expect_memory(what, loaded_bytes(num_tokens, kv, dtype, num_repeat), kv.device)


def loaded_bytes(num_tokens: int, kv: KVView, dtype: torch.dtype, num_repeat: int) -> int:
    """Bytes of the keys and values that ``load`` returns.

    Raises:
        ArgumentError: ``num_repeat`` is below 1, or the bytes do not fit 64 bits.
    """
    expect_range("num_repeat", num_repeat, 1, INT64_END)
    width = sum(side.head_dim for side in kv.sides)
    each = max(kv.num_heads, 1) * max(width, 1) * dtype.itemsize
    once = max(num_tokens, 1) * each  # strides must fit, even without tokens
    if once * num_repeat >= 1 << 59:  # far beyond what can be allocated; sums of such do not overflow
        raise ArgumentError(
            f"num_repeat must be at most {(1 << 59) // once} for {once} bytes of keys and values, "
            f"got {num_repeat}"
        )
    return num_tokens * kv.num_heads * width * dtype.itemsize * num_repeat
