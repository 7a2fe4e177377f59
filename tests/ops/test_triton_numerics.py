"""Quotients of 16-bit numbers by one reciprocal are those of division."""

from __future__ import annotations

import pytest
import torch
from ops import kernels
from oracles.bits import assert_same_bits

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
numerics = pytest.importorskip("kvloom.ops.impl.triton.numerics")

pytestmark = kernels.pytestmark


@triton.jit
def divide(numbers, scales, out, SCALES: tl.constexpr, NUMBERS: tl.constexpr):
    """Quotients of all numbers by some scales."""
    i = tl.arange(0, NUMBERS)[None, :]
    j = tl.program_id(0) * SCALES + tl.arange(0, SCALES)[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    x, scale = tl.load(numbers + i).to(tl.float32), tl.load(scales + j).to(tl.float32)
    tl.store(out + j * NUMBERS + i, numerics.quotients(x, scale, dtype).to(dtype))


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float16, 10), (torch.bfloat16, 7)])
@pytest.mark.parametrize("power", [-13, 0, 3])
def test_every_significand_over_every_other(dtype: torch.dtype, digits: int, power: int) -> None:
    """Both are from 1 to 2, scales times a power of two, which changes nothing in normal numbers."""
    count = 1 << digits
    numbers = (1 + torch.arange(count) / count).to(dtype)
    scales = (numbers.double() * 2.0**power).to(dtype)
    out = torch.zeros(count, count, dtype=dtype)
    with kernels.there(numbers, scales, out) as moved:
        divide[(count // 32,)](*moved, SCALES=32, NUMBERS=count, num_warps=8, enable_fp_fusion=False)
    assert_same_bits(out, numbers / scales[:, None], "quotients")
