"""What the operators ask of their tensors."""

from collections.abc import Iterable
from itertools import combinations

import torch
from torch import Tensor

from kvloom.core.checks import FLOAT_DTYPES, INDEX_DTYPES, INT64_END, expect, expect_range
from kvloom.core.indexing import expect_slots
from kvloom.core.memory import expect_disjoint, expect_memory, expect_writable, shares_memory
from kvloom.core.views import KVView, head_dim_of
from kvloom.errors import ArgumentError, ShapeError


def is_in_order(key: Tensor, value: Tensor | None, slots: Tensor, kv: KVView) -> bool:
    """Whether the commonest call fits, told in two microseconds; if not, ``expect_store`` looks closer."""
    if torch.compiler.is_compiling():
        return False
    if not (type(key) is type(value) is type(slots) is Tensor) or kv.value is None or slots.ndim != 1:
        return False
    tokens, heads, device = slots.shape[0], kv.key.shape[3], kv.key.device
    written = (kv.key, kv.value, kv.key_scale, kv.value_scale)
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
        # On the CPU slots are copied before anything is written.
        and _are_apart((key, value) if slots.is_cpu else (key, value, slots), written)
    )


def _are_apart(read: Iterable[Tensor], written: Iterable[Tensor | None]) -> bool:
    """Whether the storages have no address in common; if they have, the tensors may still have none."""
    spans = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (x.untyped_storage() for x in read)]
    for x in written:
        if x is None:
            continue
        storage = x.untyped_storage()
        start = storage.data_ptr()
        end = start + storage.nbytes()
        for first, last in spans:
            if first < end and start < last:
                return False
    return True


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
    expect_writable_view("kv", kv)
    for name, x in (("key", key), ("value", value)):
        for cache in (kv.key, kv.value, kv.key_scale, kv.value_scale):
            if x is not None and cache is not None:
                expect_disjoint(name, x, "kv", cache)


def apart_from(kv: KVView, slots: Tensor) -> Tensor:
    """``slots``, or a copy where writing ``kv`` would change them; on the CPU every backend copies them."""
    written = (kv.key, kv.value, kv.key_scale, kv.value_scale)
    if torch.compiler.is_compiling() or slots.is_cpu or _are_apart((slots,), written):
        return slots
    return slots.clone() if any(x is not None and shares_memory(slots, x) for x in written) else slots


def expect_writable_view(name: str, kv: KVView) -> None:
    """Check that no two elements of ``kv`` share memory, and that autograd does not watch them."""
    sides = ("key", "value", "key_scale", "value_scale")
    tensors = [(f"{name}.{side}", x) for side in sides if (x := getattr(kv, side)) is not None]
    for side, x in tensors:
        expect_writable(side, x)
    if kv.is_writable:
        return
    for (side, x), (other_side, other) in combinations(tensors, 2):
        expect_disjoint(side, x, other_side, other)


def expect_loadable(num_tokens: int, kv: KVView, dtype: torch.dtype, num_repeat: int) -> None:
    """Check what ``load`` of so many tokens returns, for a call that writes before it loads.

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
    width = head_dim_of(kv.key, kv.key_scale)
    if kv.value is not None:
        width += head_dim_of(kv.value, kv.value_scale)
    once = num_tokens * kv.num_heads * width * dtype.itemsize
    if once * num_repeat >= 1 << 59:  # nowhere near what can be allocated, nor overflows when summed up
        raise ArgumentError(
            f"num_repeat must be at most {(1 << 59) // once} for {once} bytes of keys and values, "
            f"got {num_repeat}"
        )
    return once * num_repeat


def expect_side(name: str, x: Tensor, cache: Tensor, scale: Tensor | None) -> int:
    """Check new keys or values ``[T, H, D]`` against their cache; returns T."""
    sizes = expect(name, x, "T H D", device=cache.device, H=cache.shape[3], D=head_dim_of(cache, scale))
    expect_dtypes(name, x.dtype, cache, scale)
    return sizes["T"]


def expect_dtypes(name: str, dtype: torch.dtype, cache: Tensor, scale: Tensor | None) -> None:
    """``dtype`` is the cache's own, or both are floats between which values are cast or quantized."""
    casts = dtype in FLOAT_DTYPES and (scale is not None or cache.dtype in FLOAT_DTYPES)
    if not casts and (scale is not None or dtype != cache.dtype):
        stored = f"{cache.dtype} codes" if scale is not None else str(cache.dtype)
        raise ShapeError(f"{name} must be a dtype that a cache of {stored} holds, got {dtype}")
