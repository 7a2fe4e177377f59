"""Store: new keys and values to their slots, quantized, in one launch.

Shapes: T tokens, H heads, D head dim.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.core.checks import can_read
from kvloom.core.entries import OF_BITS
from kvloom.core.indexing import check_slots
from kvloom.core.views import Side, sides_of
from kvloom.ops.impl.triton import sides
from kvloom.ops.impl.triton.configs import tile_of_moves
from kvloom.ops.impl.triton.launching import Launcher, on_device
from kvloom.ops.impl.triton.numerics import (
    LEAST_SCALE,
    code_of,
    largest_of,
    length_kept,
    packed,
    scale_of,
    stored_scale,
)
from kvloom.ops.impl.triton.places import as_bits, place_of_element, place_of_vector
from kvloom.ops.impl.triton.sides import (
    Form,
    SideViews,
    arguments_of,
    elements_of,
    num_programs,
    numbers_of,
    rows_of,
)


class New(NamedTuple):
    """New keys or values ``[T, H, D]`` and their strides in elements."""

    data: Any
    token: int
    head: int
    element: int


def store(
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    full_range: bool = False,
) -> None:
    """Same contract as the reference. Slots are checked on the host if that is free, else by the kernel."""
    if can_read(slots):
        check_slots("slots", slots, key_cache.shape[:3].numel(), skip_negative=True)
    if slots.numel() == 0 or key.shape[1] == 0:
        return
    launch = StoreLaunch(key_cache, value_cache, key_scale, value_scale, key.dtype, full_range)
    launch(key, value, slots)


class StoreLaunch:
    """Launches of stores to one cache, of vectors of one dtype.

    Args:
        key_cache: As of the operator.
        value_cache: The same.
        key_scale: The same.
        value_scale: The same.
        dtype: Dtype of new keys and values.
        full_range: As of the operator.
    """

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor | None,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
        dtype: torch.dtype,
        full_range: bool,
    ) -> None:
        key_side, value_side = sides_of(key_cache, value_cache, key_scale, value_scale)
        self._key, keys, key_form = _side(key_side, dtype)
        self._value, values, value_form = _side(value_side, dtype)
        self._forms = key_form, value_form
        self._caches = key_cache.shape[:3].numel(), keys, values, LEAST_SCALE.get(dtype, 0.0)
        self._constants = (
            key_form, value_form, _qmax(key_form, full_range), _qmax(value_form, full_range), full_range,
        )  # fmt: skip
        self._launch = Launcher(
            _store_kernel,
            num_warps=tile_of_moves().num_warps,
            enable_fp_fusion=False,
            debug=True,  # keeps the assertion that a slot is in the cache
            sanitize_overflow=False,
        )

    def __call__(self, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """Store ``[T, H, D]`` to slots ``[T]``, or ``[B, H, N, D]`` to ``[B, N]`` with B or N of 1."""
        tokens, (num_slots, keys, values, least_scale) = slots.numel(), self._caches
        slot_stride = slots.stride(0 if slots.ndim == 1 or slots.shape[1] == 1 else 1)
        new_value = None if value is None else self._new(value, self._value)
        with on_device(key):
            self._launch(
                num_programs(tokens, *self._forms), slots, slot_stride, tokens, num_slots,
                self._new(key, self._key), new_value, keys, values, least_scale, *self._constants,
            )  # fmt: skip

    @staticmethod
    def _new(x: Tensor, keeps: bool) -> New:
        """Arguments for new vectors; elements whose dtype does not change are moved as bits."""
        strides = x.stride()
        if len(strides) == 4:
            strides = (strides[0 if x.shape[2] == 1 else 2], strides[1], strides[3])
        return New(as_bits(x) if keeps else x, *strides)


def why_not(
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    full_range: bool = False,
) -> str | None:
    """Reason why these caches cannot be written here, or ``None``."""
    return sides.why_not(key_cache, key_scale) or sides.why_not(value_cache, value_scale)


def _side(side: Side | None, dtype: torch.dtype) -> tuple[bool, SideViews, Form]:
    """Whether elements of one side keep their dtype, and its arguments."""
    keeps = side is not None and side.scale is None and dtype == side.cache.dtype
    return keeps, *arguments_of(side, as_bits=keeps)


def _qmax(form: Form, full_range: bool) -> int:
    """Largest element of a group in scales, -8 for codes in full range; 0 without codes."""
    if full_range and form.bits == 4:
        return -8
    return OF_BITS[form.bits].largest if form.bits else 0


@triton.jit(do_not_specialize=["tokens"])
def _store_kernel(
    slots,
    slots_stride,
    tokens,
    num_slots,
    key,
    value,
    keys,
    values,
    least_scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_QMAX: tl.constexpr,
    VALUE_QMAX: tl.constexpr,
    FULL_RANGE: tl.constexpr,
):
    if tl.program_id(2) == 0:
        _store_rows(slots, slots_stride, tokens, num_slots, key, keys, least_scale, KEY, KEY_QMAX, FULL_RANGE)
    elif value is not None:
        _store_rows(
            slots, slots_stride, tokens, num_slots, value, values, least_scale, VALUE, VALUE_QMAX, FULL_RANGE
        )


@triton.jit
def _store_rows(
    slots,
    slots_stride,
    tokens,
    num_slots,
    new,
    side,
    least_scale,
    FORM: tl.constexpr,
    QMAX: tl.constexpr,
    FULL_RANGE: tl.constexpr,
):
    """Read the rows of one program, beside their slots, quantize and write them."""
    CACHE: tl.constexpr = FORM.cache
    token, head, group, exists = rows_of(tokens, FORM)
    slot = tl.load(slots + token * slots_stride, mask=exists, other=-1).to(tl.int64)
    tl.device_assert(slot < num_slots, "slots must be in the cache")
    kept = (slot >= 0) & (slot < num_slots)
    element, in_group = elements_of(group, FORM)
    source = new.data + token * new.token + head.to(tl.int64) * new.head
    place = place_of_vector(side.cache, slot, head, CACHE)
    target = side.cache.data + place + place_of_element(side.cache, element, CACHE)
    if FORM.bits == 0:
        x = tl.load(source + element.to(tl.int64) * new.element, mask=exists & in_group)
        if x.dtype != target.dtype.element_ty:
            x = x.to(tl.float32).to(target.dtype.element_ty)
        tl.store(target, x, mask=kept & in_group)
    else:
        dtype: tl.constexpr = new.data.dtype.element_ty
        SCALE: tl.constexpr = FORM.scale
        number, is_there = numbers_of(group, FORM)
        read = tl.load(source + number.to(tl.int64) * new.element, mask=exists & is_there, other=0.0)
        x = read.to(tl.float32)
        largest, finite = largest_of(x, QMAX)
        scale = scale_of(largest, dtype, QMAX, least_scale)
        code = code_of(x, scale, finite, dtype, QMAX, FORM.bits)
        if FORM.bits == 2 and FULL_RANGE:
            scale = length_kept(x, largest, scale, finite, least_scale)
        tl.store(target, packed(code, FORM.bits), mask=kept & in_group)
        scale_place = place_of_vector(side.scale, slot, head, SCALE)
        scale_target = side.scale.data + scale_place + place_of_element(side.scale, group, SCALE)
        stored = stored_scale(scale, finite, scale_target.dtype.element_ty, FORM.largest_scale)
        tl.store(scale_target, stored, mask=kept)
