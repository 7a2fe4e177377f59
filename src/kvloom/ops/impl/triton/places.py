"""Addresses of elements of a canonical view ``[B, S/s, s, H, D/d, d]``, for all kernels.

Shapes as in ``core/views.py``. Indices are int64 before a multiplication, or int32 if all offsets fit.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.core.views import raw, slot_stride


class View(NamedTuple):
    """Canonical view for kernels: a pointer and a stride for each axis, in elements."""

    data: Any
    block: int
    outer: int
    inner: int
    head: int
    chunk: int
    element: int


@dataclass(frozen=True)
class Shape:
    """Compile-time constants of a view: the divisors ``S/s``, ``s`` and ``d``, and the width of offsets.

    A view whose blocks and slots have one stride counts as blocks of one slot, without divisions.
    """

    outer: int
    inner: int
    chunk: int  # 0 if a head vector has one stride
    is_wide: bool = True  # whether some offset needs 64 bits


def as_bits(x: Tensor) -> Tensor:
    """View of ``x`` as signed integers of its width, which kernels move unchanged."""
    bits = raw(x)
    return bits.view(torch.int8) if bits.dtype in (torch.bool, torch.uint8) else bits


def describe(x: Tensor | None, bits: bool = False) -> tuple[View | None, Shape]:
    """Arguments for a canonical view; with ``bits`` its elements are moved unchanged."""
    if x is None:
        return None, Shape(1, 1, 0)
    is_wide = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) >= 1 << 31
    _, outer, inner, _, chunks, chunk = x.shape
    block_stride, outer_stride, inner_stride, head_stride, chunk_stride, stride = x.stride()
    if chunk == 1:
        chunks, chunk, stride = 1, chunks, chunk_stride
    if chunks == 1 or chunk_stride == chunk * stride:
        chunk, chunk_stride = 0, 0
    if (one_stride := slot_stride(x)) is not None:
        outer, inner, block_stride, outer_stride, inner_stride = 1, 1, one_stride, 0, 0
    strides = (block_stride, outer_stride, inner_stride, head_stride, chunk_stride, stride)
    return View(as_bits(x) if bits else x, *strides), Shape(outer, inner, chunk, is_wide)


@triton.jit
def place_of_vector(view, slot, head, SHAPE: tl.constexpr):
    """Offset of a head vector."""
    # Unsigned numbers are divided by fewer instructions.
    unsigned = slot.to(tl.uint64 if SHAPE.is_wide else tl.uint32)
    block = _of_offsets(unsigned // (SHAPE.outer * SHAPE.inner), SHAPE)
    within = unsigned % (SHAPE.outer * SHAPE.inner)
    outer, inner = _of_offsets(within // SHAPE.inner, SHAPE), _of_offsets(within % SHAPE.inner, SHAPE)
    return block * view.block + outer * view.outer + inner * view.inner + _of_offsets(head, SHAPE) * view.head


@triton.jit
def place_of_element(view, element, SHAPE: tl.constexpr):
    """Offset within a head vector."""
    element = _of_offsets(element, SHAPE)
    if SHAPE.chunk == 0:
        return element * view.element
    return element // SHAPE.chunk * view.chunk + element % SHAPE.chunk * view.element


@triton.jit
def _of_offsets(place, SHAPE: tl.constexpr):
    """Cast to the integer dtype of offsets."""
    return place.to(tl.int64) if SHAPE.is_wide else place.to(tl.int32)
