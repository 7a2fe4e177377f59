"""Load: keys and values from their slots, dequantized, each head repeated, in one launch.

Shapes: T tokens, H heads, D head dim, R repeats of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.core.checks import can_read
from kvloom.core.indexing import check_slots
from kvloom.core.views import sides_of
from kvloom.ops.impl import by_sequence
from kvloom.ops.impl.triton import sides
from kvloom.ops.impl.triton.configs import tile_of_moves
from kvloom.ops.impl.triton.launching import on_device
from kvloom.ops.impl.triton.numerics import LARGEST, dequantized, unpacked
from kvloom.ops.impl.triton.places import as_bits, place_of_element, place_of_vector
from kvloom.ops.impl.triton.sides import (
    arguments_of,
    elements_of,
    num_programs,
    numbers_of,
    rows_of,
)


@by_sequence
def load(
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    dtype: torch.dtype,
    num_repeat: int,
) -> tuple[Tensor, Tensor]:
    """Same contract as the reference. Slots are checked on the host if that is free, else by the kernel."""
    if can_read(slots):
        check_slots("slots", slots, key_cache.shape[:3].numel())
    tokens, heads = slots.shape[0], key_cache.shape[3]
    key_side, value_side = sides_of(key_cache, value_cache, key_scale, value_scale)
    value_dim = 0 if value_side is None else value_side.head_dim
    shape = (tokens, heads * num_repeat)
    key = key_cache.new_empty((*shape, key_side.head_dim), dtype=dtype)
    value = key_cache.new_empty((*shape, value_dim), dtype=dtype)
    if tokens == 0 or heads == 0:
        return key, value
    keeps_key = key_scale is None and key_cache.dtype == dtype
    keeps_value = value_cache is not None and value_scale is None and value_cache.dtype == dtype
    keys, key_form = arguments_of(key_side, as_bits=keeps_key)
    values, value_form = arguments_of(value_side, as_bits=keeps_value)
    with on_device(key_cache):
        _load_kernel[num_programs(tokens, key_form, value_form)](
            slots,
            slots.stride(0),
            tokens,
            num_repeat,
            key_cache.shape[:3].numel(),
            keys,
            values,
            as_bits(key) if keeps_key else key,
            as_bits(value) if keeps_value else value,
            KEY=key_form,
            VALUE=value_form,
            LARGEST=LARGEST.get(dtype, 0.0),
            num_warps=tile_of_moves().num_warps,
            enable_fp_fusion=False,
            debug=True,  # keeps the assertion that a slot is in the cache
            sanitize_overflow=False,
        )
    return key, value


def why_not(
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    *_: object,
) -> str | None:
    """Reason why these caches cannot be read here, or ``None``."""
    return sides.why_not(key_cache, key_scale) or sides.why_not(value_cache, value_scale)


@triton.jit(do_not_specialize=["tokens"])
def _load_kernel(
    slots,
    slots_stride,
    tokens,
    num_repeat,
    num_slots,
    keys,
    values,
    key,
    value,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    if tl.program_id(2) == 0:
        _load_rows(slots, slots_stride, tokens, num_repeat, num_slots, keys, key, KEY, LARGEST)
    elif values.cache is not None:
        _load_rows(slots, slots_stride, tokens, num_repeat, num_slots, values, value, VALUE, LARGEST)


@triton.jit
def _load_rows(
    slots,
    slots_stride,
    tokens,
    num_repeat,
    num_slots,
    side,
    out,
    FORM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Read the rows of one program, dequantize, and write each as often as heads are repeated."""
    CACHE: tl.constexpr = FORM.cache
    token, head, group, exists = rows_of(tokens, FORM)
    slot = tl.load(slots + token * slots_stride, mask=exists, other=0).to(tl.int64)
    in_cache = (slot >= 0) & (slot < num_slots)
    tl.device_assert(in_cache, "slots must be in the cache")
    kept = exists & in_cache
    element, in_group = elements_of(group, FORM)
    place = place_of_vector(side.cache, slot, head, CACHE)
    source = side.cache.data + place + place_of_element(side.cache, element, CACHE)
    stored = tl.load(source, mask=kept & in_group)
    dtype: tl.constexpr = out.dtype.element_ty
    if FORM.bits == 0:
        x = stored if stored.dtype == dtype else stored.to(tl.float32).to(dtype)
    else:
        SCALE: tl.constexpr = FORM.scale
        scale_place = place_of_vector(side.scale, slot, head, SCALE)
        scale_place += place_of_element(side.scale, group, SCALE)
        scale = tl.load(side.scale.data + scale_place, mask=kept)
        x = dequantized(unpacked(stored, FORM.bits), scale, dtype, FORM.largest_scale, LARGEST)
    number, is_there = numbers_of(group, FORM)
    for repeat in range(num_repeat):
        vector = (token * FORM.heads + head) * num_repeat + repeat
        target = out + vector * (FORM.groups * FORM.group * FORM.per_element) + number
        tl.store(target, x, mask=kept & is_there)
