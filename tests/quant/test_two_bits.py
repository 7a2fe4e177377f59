"""Codes of two bits: -3, -1, 1 or 3 times a quarter of the largest magnitude, or what keeps the length."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from oracles import two_bits
from oracles.bits import FLOATS, assert_same_bits, generator, poison
from torch import Tensor

from kvloom.quant.affine import dequantize, quantize
from kvloom.quant.packing import unpack

every_range = pytest.mark.parametrize("full_range", [False, True], ids=["symmetric", "full"])
EXAMPLE = [0.1, -0.3, 0.7, 1.0, -2.0, 0.05, 0.0, 1.5]


def numbers_of(x: Tensor, group: int) -> Tensor:
    codes, _ = quantize(x, 2, group, torch.float32)
    return 2 * unpack(codes.view(torch.uint8), 2) + 1


def round_trip(
    x: Tensor, group: int, scale_dtype: torch.dtype, full_range: bool = False
) -> tuple[Tensor, Tensor]:
    """Stored scales and values."""
    codes, scale = quantize(x, 2, group, scale_dtype, full_range)
    return scale, dequantize(codes, scale, 2, x.dtype)


def test_an_example_by_hand() -> None:
    packed, scales = quantize(torch.tensor(EXAMPLE), 2, 8, torch.float32)
    assert packed.dtype == torch.bits2x4
    assert scales.tolist() == [0.5]
    assert packed.view(torch.uint8).tolist() == [0b01_00_11_00, 0b01_00_00_10]
    back = dequantize(packed, scales, 2, torch.float32)
    assert back.tolist() == [0.5, -0.5, 0.5, 1.5, -1.5, 0.5, 0.5, 1.5]


def test_an_example_of_a_full_range_by_hand() -> None:
    packed, scales = quantize(torch.tensor(EXAMPLE), 2, 8, torch.float32, full_range=True)
    parts = torch.tensor([13, 38, 89, 128, 255, 6, 0, 191])
    numbers = torch.tensor([1, 1, 1, 3, 3, 1, 1, 3])
    quotient = torch.tensor(float((parts * parts).sum())) / float((parts * numbers).sum())
    assert scales.tolist() == [float(torch.tensor(2.0) / 255 * quotient)]
    assert float(scales) == pytest.approx(2 / 255 * 127460 / 1868)
    assert packed.view(torch.uint8).tolist() == [0b01_00_11_00, 0b01_00_00_10]  # as by a quarter


@every_range
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
def test_groups_equal_a_plain_loop(dtype: torch.dtype, scale_dtype: torch.dtype, full_range: bool) -> None:
    rng = generator(1)
    powers = torch.randint(-18, 14, (5, 3, 4, 1), generator=rng).double().exp2()
    x = (torch.randn(5, 3, 4, 8, generator=rng, dtype=torch.float64) * powers).to(dtype).flatten(-2)
    codes, scales = quantize(x, 2, 8, scale_dtype, full_range)
    assert scales.shape == (5, 3, 4)
    back = dequantize(codes, scales, 2, dtype)
    for i, j in itertools.product(range(5), range(3)):
        want_codes = torch.zeros(1, 8, dtype=torch.uint8).view(torch.bits2x4)
        want_scales = torch.zeros(1, 4, dtype=scale_dtype)
        two_bits.store_vector(x[i, j], want_codes, want_scales, 0, 8, full_range)
        assert_same_bits(codes[i, j], want_codes[0], "codes")
        assert_same_bits(scales[i, j], want_scales[0], "scales")
        assert_same_bits(back[i, j], two_bits.load_vector(want_codes, want_scales, 0, 8, dtype), "values")


@pytest.mark.parametrize("dtype", FLOATS)
def test_two_scales_are_the_first_that_count_as_three(dtype: torch.dtype) -> None:
    x = torch.tensor([4.0, 2.0, 2.0, -2.0], dtype=dtype)
    x[1] = torch.nextafter(x[1], x[1] - 1)
    assert numbers_of(x, 4).tolist() == [3, 1, 3, -3]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_sign_is_the_sign_bit(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 4
    x = torch.tensor([1.0, 0.0, -0.0, tiny, -tiny, 1.0, -1.0, 0.4], dtype=dtype)
    assert numbers_of(x, 8).tolist() == [3, 1, -1, 1, -1, 3, -3, 1]


@every_range
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
def test_a_group_of_zeros_is_the_smallest_scale(
    dtype: torch.dtype, scale_dtype: torch.dtype, full_range: bool
) -> None:
    scale, back = round_trip(torch.zeros(2, 4, dtype=dtype), 4, scale_dtype, full_range)
    smallest = torch.tensor(1e-5, dtype=dtype).to(scale_dtype)
    assert_same_bits(scale, smallest.expand(2, 1), "scale")
    assert_same_bits(back, smallest.to(dtype).expand(2, 4), "value")


@every_range
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_that_cannot_be_represented_is_nan(
    dtype: torch.dtype, scale_dtype: torch.dtype, bad: float, full_range: bool
) -> None:
    x = torch.randn(8, 3, 8, generator=generator(1)).to(dtype)
    good_scale, good = round_trip(x, 8, scale_dtype, full_range)
    for place in range(8):
        x[place, 1, place] = bad
    codes, scale = quantize(x, 2, 8, scale_dtype, full_range)
    back = dequantize(codes, scale, 2, dtype)
    assert not codes.view(torch.uint8)[:, 1].any()
    assert bool(scale[:, 1].isnan().all())
    assert bool(back[:, 1].isnan().all())
    assert_same_bits(back[:, ::2], good[:, ::2], "value")
    assert_same_bits(scale[:, ::2], good_scale[:, ::2], "scale")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
def test_no_value_is_further_away_than_its_scale(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """But for rounding, of the scale by less than ``eps`` of it and of a product of up to three."""
    x = torch.randn(20_000, 16, generator=generator(2))
    x = (x * torch.rand(20_000, 1, generator=generator(3)).mul(20).sub(10).exp2()).to(dtype)
    scale, back = round_trip(x, 16, scale_dtype)
    error = (back.double() - x.double()).abs() / scale.double()
    eps = max(torch.finfo(dtype).eps, torch.finfo(scale_dtype).eps)
    assert 0.99 < float(error.max()) <= 1 + 6 * eps


@every_range
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
def test_any_bits_come_back_finite_or_the_whole_group_as_nan(
    dtype: torch.dtype, scale_dtype: torch.dtype, full_range: bool
) -> None:
    x = poison((20_000, 8), dtype, generator(4))
    scale, back = round_trip(x, 4, scale_dtype, full_range)
    finite = x.isfinite().unflatten(-1, (-1, 4)).all(-1)
    assert torch.equal(scale.isfinite(), finite)
    assert bool((scale[finite] > 0).all())
    wide = finite.repeat_interleave(4, -1)
    assert torch.equal(back.isfinite(), wide)
    assert torch.equal(back.isnan(), ~wide)
    assert torch.equal(back[wide].signbit(), x[wide].signbit())


def test_what_is_beyond_the_scale_dtype_becomes_its_largest() -> None:
    scale, back = round_trip(torch.tensor([1e30, -1e30, 4e29, -4e29]), 4, torch.float16)
    assert scale.tolist() == [65504.0]
    assert back.tolist() == [65504.0, -65504.0, 65504.0, -65504.0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group", [8, 64])
def test_a_full_range_keeps_the_length_along_the_group(dtype: torch.dtype, group: int) -> None:
    """Up to the rounding of magnitudes to integers, each by half a unit, and of what is read."""
    x = torch.randn(20_000, group, generator=generator(6))
    x = (x * torch.rand(20_000, 1, generator=generator(7)).mul(20).sub(8).exp2()).to(dtype)
    _, back = round_trip(x, group, torch.float32, full_range=True)
    wide, read = x.double().abs(), back.double().abs()
    parts, numbers = (
        wide * 255 / wide.amax(-1, keepdim=True),
        1 + 2 * (wide >= wide.amax(-1, keepdim=True) / 2),
    )
    rounding = (parts + 0.25).sum(-1) / parts.square().sum(-1) + numbers.sum(-1) / 2 / (parts * numbers).sum(
        -1
    )
    error = ((wide * read).sum(-1) / wide.square().sum(-1) - 1).abs()
    assert bool((error <= 1.1 * rounding + 2 * torch.finfo(dtype).eps).all())
    _, plain = round_trip(x, group, torch.float32)
    assert float(error.mean()) < 0.1 * float(
        ((wide * plain.double().abs()).sum(-1) / wide.square().sum(-1) - 1).abs().mean()
    )


def test_a_full_range_is_the_same_in_any_order() -> None:
    x = torch.randn(2_000, 64, generator=generator(8))
    order = torch.randperm(64, generator=generator(9))
    scale, back = round_trip(x, 64, torch.float32, full_range=True)
    other_scale, other = round_trip(x[:, order], 64, torch.float32, full_range=True)
    assert torch.equal(scale, other_scale)
    assert torch.equal(back[:, order], other)
