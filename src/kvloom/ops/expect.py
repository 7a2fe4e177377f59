"""What the operators ask of their tensors."""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvloom.core.checks import FLOAT_DTYPES, INDEX_DTYPES, expect, expect_disjoint, expect_no_overlap
from kvloom.core.indexing import expect_slots
from kvloom.core.views import KVView, head_dim_of
from kvloom.errors import ArgumentError, ShapeError


def is_in_order(key: Tensor, value: Tensor | None, slots: Tensor, kv: KVView) -> bool:
    """Whether the commonest call fits, told in two microseconds; if not, ``expect_store`` looks closer."""
    if torch.compiler.is_compiling():
        return False
    if not (type(key) is type(value) is type(slots) is Tensor) or kv.value is None or slots.ndim != 1:
        return False
    tokens, heads, device = slots.shape[0], kv.key.shape[3], kv.key.device
    caches = (kv.key.untyped_storage().data_ptr(), kv.value.untyped_storage().data_ptr())
    return (
        kv.is_writable
        and key.shape == (tokens, heads, head_dim_of(kv.key, kv.key_scale))
        and value.shape == (tokens, heads, head_dim_of(kv.value, kv.value_scale))
        and key.dtype == value.dtype
        and key.dtype in FLOAT_DTYPES
        and slots.dtype in INDEX_DTYPES
        and (kv.key_scale is not None or kv.key.dtype in FLOAT_DTYPES)
        and (kv.value_scale is not None or kv.value.dtype in FLOAT_DTYPES)
        and device == key.device == value.device == slots.device
        and key.untyped_storage().data_ptr() not in caches
        and value.untyped_storage().data_ptr() not in caches
    )


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether these are tensors on the CPU, or ``None``, that ask nothing of autograd or of a compiler."""
    if torch.compiler.is_compiling():
        return False
    records = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and not (isinstance(x, Tensor) and x.is_cpu and not (records and x.requires_grad)):
            return False
    return True


def expect_store(key: Tensor, value: Tensor | None, slots: Tensor, kv: KVView) -> None:
    """Check everything that ``store`` promises to refuse but the values of ``slots``."""
    tokens = expect_side("key", key, kv.key, kv.key_scale)
    if (value is None) != (kv.value is None):
        raise ArgumentError(f"value must be {'None' if kv.value is None else 'given'} as in the cache")
    if value is not None and kv.value is not None:
        expect_side("value", value, kv.value, kv.value_scale)
        expect("value", value, "T H D", T=tokens, dtype=key.dtype)
    expect_slots("slots", slots, tokens, kv.device)
    expect_writable("kv", kv)
    for name, x in (("key", key), ("value", value)):
        for cache in (kv.key, kv.value):
            if x is not None and cache is not None:
                expect_disjoint(name, x, "kv", cache)


def expect_writable(name: str, kv: KVView) -> None:
    """Check that no two elements of ``kv`` share memory."""
    if kv.is_writable:
        return
    for side in ("key", "value", "key_scale", "value_scale"):
        x = getattr(kv, side)
        if x is not None:
            expect_no_overlap(f"{name}.{side}", x)


def expect_side(name: str, x: Tensor, cache: Tensor, scale: Tensor | None) -> int:
    """Check new keys or values ``[T, H, D]`` against their cache; returns T."""
    sizes = expect(name, x, "T H D", device=cache.device, H=cache.shape[3], D=head_dim_of(cache, scale))
    expect_dtypes(name, x.dtype, cache, scale)
    return sizes["T"]


def expect_dtypes(name: str, dtype: torch.dtype, cache: Tensor, scale: Tensor | None) -> None:
    """``dtype`` is the cache's own, or both are floats between which values are cast or quantised."""
    casts = dtype in FLOAT_DTYPES and (scale is not None or cache.dtype in FLOAT_DTYPES)
    if not casts and (scale is not None or dtype != cache.dtype):
        stored = f"{cache.dtype} codes" if scale is not None else str(cache.dtype)
        raise ShapeError(f"{name} must be a dtype that a cache of {stored} holds, got {dtype}")
