"""Addresses of a pool of many bytes are 64-bit: it has offsets that no 32-bit product reaches."""

from __future__ import annotations

import pytest
import torch
from ops import kernels

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
places = pytest.importorskip("kvloom.ops.impl.triton.places")

pytestmark = kernels.pytestmark


@triton.jit
def write_places(view, numbers, out, SHAPE: tl.constexpr, COUNT: tl.constexpr):
    """Where the slot and the element of each number lie."""
    i = tl.arange(0, COUNT)
    number = tl.load(numbers + i)
    tl.store(out + i, places.place_of_vector(view, number, number, SHAPE))
    tl.store(out + COUNT + i, places.place_of_element(view, number, SHAPE))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_are_beyond_32_bits(dtype: torch.dtype) -> None:
    slots = torch.tensor([0, 5, 70_001, 2_000_003], dtype=dtype, device=kernels.DEVICE)
    out = torch.zeros(2, 4, dtype=torch.int64, device=kernels.DEVICE)
    strides = (1 << 20, 1 << 18, 4096, 1 << 13, 1 << 21, 3)
    view = places.View(torch.zeros(1, device=kernels.DEVICE), *strides)
    write_places[(1,)](view, slots, out, SHAPE=places.Shape(2, 3, 8), COUNT=4, enable_fp_fusion=False)
    block, outer, inner, head, chunk, element = strides
    for i, n in enumerate(slots.tolist()):
        assert int(out[0, i]) == n // 6 * block + n % 6 // 3 * outer + n % 3 * inner + n * head
        assert int(out[1, i]) == n // 8 * chunk + n % 8 * element


@pytest.mark.parametrize(("slot_stride", "is_wide"), [(1 << 21, False), (1 << 22, True)])
def test_offsets_take_64_bits_where_they_must(slot_stride: int, is_wide: bool) -> None:
    """The last of 513 slots begins at 2^30 and at 2^31."""
    view = torch.empty_strided((513, 1, 1, 2, 1, 64), (slot_stride, 1, 1, 64, 64, 1), device="meta")
    assert places.describe(view)[1].is_wide == is_wide
