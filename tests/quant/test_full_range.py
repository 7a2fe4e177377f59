"""Codes of four bits in full range: eighths of the largest element of their group, which has code -8.

Those of two bits are in ``test_two_bits.py``.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from oracles import full_range
from oracles.bits import FLOATS, assert_same_bits, generator, poison
from torch import Tensor

from kvloom.conform.oracles.pmx import dequantize_group
from kvloom.quant.affine import dequantize, quantize
from kvloom.quant.packing import unpack

EXAMPLE = [0.1, -0.3, 0.7, 1.0, -2.0, 0.05, 0.0, 1.5]
EPS = 1e-5


def round_trip(x: Tensor, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as int8, stored scales, and values."""
    codes, scale = quantize(x, 4, group, scale_dtype, full_range=True)
    return unpack(codes, 4), scale, dequantize(codes, scale, 4, x.dtype)


def test_an_example_by_hand() -> None:
    packed, scales = quantize(torch.tensor(EXAMPLE), 4, 8, torch.float32, full_range=True)
    assert packed.dtype == torch.uint8
    assert scales.tolist() == [0.25]
    assert unpack(packed, 4).tolist() == [0, -1, 3, 4, -8, 0, 0, 6]
    assert dequantize(packed, scales, 4, torch.float32).tolist() == [0, -0.25, 0.75, 1, -2, 0, 0, 1.5]


def test_the_largest_element_decides_the_sign_and_comes_back_exactly() -> None:
    codes, scales, back = round_trip(-torch.tensor(EXAMPLE), 8, torch.float32)
    assert scales.tolist() == [-0.25]
    assert codes.tolist() == [0, -1, 3, 4, -8, 0, 0, 6]
    assert back.tolist() == [0, 0.25, -0.75, -1, 2, 0, 0, -1.5]


@pytest.mark.parametrize("dtype", FLOATS)
def test_of_two_largest_the_positive_one_is_exact(dtype: torch.dtype) -> None:
    for x in itertools.permutations([1.0, -1.0, 0.5, -0.25]):
        codes, scale, back = round_trip(torch.tensor(x, dtype=dtype), 4, dtype)
        assert scale.tolist() == [-0.125]
        assert sorted(codes.tolist()) == [-8, -4, 2, 7]
        assert back.tolist() == [-0.875 if number == -1 else number for number in x]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
def test_groups_equal_a_plain_loop(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    rng = generator(1)
    powers = torch.randint(-18, 14, (5, 3, 4, 1), generator=rng).double().exp2()
    x = (torch.randn(5, 3, 4, 8, generator=rng, dtype=torch.float64) * powers).to(dtype)
    codes, scales, back = (y.view(5, 3, 4, -1) for y in round_trip(x.flatten(-2), 8, scale_dtype))
    for at in itertools.product(range(5), range(3), range(4)):
        want, scale = full_range.quantize_group(x[at])
        stored = full_range.saturated(full_range.rounded(scale, scale_dtype))
        assert codes[at].tolist() == want
        assert_same_bits(scales[at][0], stored, "scale")
        assert_same_bits(back[at], dequantize_group(want, stored, dtype), "values")


@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_round_to_even_and_eight_is_seven(dtype: torch.dtype) -> None:
    halves = [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.0]
    x = torch.tensor([-8, *halves, *(-half for half in halves[:8]), 0, 0], dtype=dtype)
    codes, scale, _ = round_trip(x, len(x), dtype)
    assert scale.tolist() == [-1.0]  # of 8, the positive one
    assert codes.tolist() == [7, 0, -2, -2, -4, -4, -6, -6, -8, -8, 0, 2, 2, 4, 4, 6, 6, 7, 0, 0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_small_group_has_the_smallest_scale_which_is_positive(
    dtype: torch.dtype, scale_dtype: torch.dtype, sign: int
) -> None:
    x = sign * torch.tensor([[0.0, -0.0, 0.0, -0.0], [4e-5, -2e-5, 1e-5, 0.0]]).to(dtype)
    codes, scale, back = round_trip(x, 4, scale_dtype)
    assert_same_bits(scale, torch.tensor(EPS, dtype=dtype).to(scale_dtype).expand(2, 1), "scale")
    assert codes.tolist() == [[0, 0, 0, 0], [4 * sign, -2 * sign, sign, 0]]
    assert not (back[0].signbit() | (back[0] != 0)).any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_finite_input_stays_finite(
    dtype: torch.dtype, scale_dtype: torch.dtype, sign: int
) -> None:
    largest, limit = torch.finfo(dtype).max, torch.finfo(scale_dtype).max
    x = sign * torch.tensor([largest, -largest / 2, largest / 8, 0], dtype=dtype)
    codes, scale, back = round_trip(x, 4, scale_dtype)
    assert codes.tolist() == [-8, 4, -1, 0]
    assert scale.sign().tolist() == [-sign]
    assert abs(float(scale)) == pytest.approx(min(largest / 8, limit), rel=2e-2)
    assert bool(back.isfinite().all())
    assert back.sign().tolist() == [sign, -sign, sign, 0]


def test_what_is_beyond_the_scale_dtype_becomes_its_largest_of_its_sign() -> None:
    _, scale, back = round_trip(torch.tensor([1e30, -5e29, 0, 0, -1e30, 5e29, 0, 0]), 4, torch.float16)
    assert scale.tolist() == [-65504.0, 65504.0]
    assert back.tolist() == [65504.0, -65504.0, 0, 0, -65504.0, 65504.0, 0, 0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_that_cannot_be_represented_is_nan(
    dtype: torch.dtype, scale_dtype: torch.dtype, bad: float
) -> None:
    x = torch.randn(8, 3, 8, generator=generator(1)).flatten(-2).to(dtype)
    _, good_scale, good = round_trip(x, 8, scale_dtype)
    for place in range(8):
        x[place, 8 + place] = bad
    codes, scale, back = round_trip(x, 8, scale_dtype)
    assert not codes[:, 8:16].any()
    assert bool(scale[:, 1].isnan().all())
    assert bool(back[:, 8:16].isnan().all())
    assert_same_bits(back.view(8, 3, 8)[:, ::2], good.view(8, 3, 8)[:, ::2], "values")
    assert_same_bits(scale[:, ::2], good_scale[:, ::2], "scales")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
def test_any_bits_come_back_finite_or_the_whole_group_as_nan(
    dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    x = poison((20_000, 8), dtype, generator(4))
    codes, scale, back = round_trip(x, 4, scale_dtype)
    finite = x.isfinite().unflatten(-1, (-1, 4)).all(-1)
    assert torch.equal(scale.isfinite(), finite)
    assert bool((scale[finite] != 0).all())
    assert torch.equal(back.isfinite(), finite.repeat_interleave(4, -1))
    assert codes.unique().tolist() == [*range(-8, 8)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
def test_a_value_is_within_half_a_step_or_cut_off_within_one(
    dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    """But for the rounding of the scale and of the product, of up to eight scales each."""
    x = torch.randn(40_000, 16, generator=generator(2))
    x = (x * torch.rand(40_000, 1, generator=generator(3)).mul(20).sub(10).exp2()).to(dtype)
    codes, scale, back = round_trip(x, 16, scale_dtype)
    error = (back.double() - x.double()).abs() / scale.double().abs()
    rounding = 16 * max(torch.finfo(dtype).eps, torch.finfo(scale_dtype).eps)
    is_cut = (x.double() / scale.double() > 7.5) & (codes == 7)
    assert is_cut.any()
    assert float(error[~is_cut].max()) <= 0.5 + rounding
    assert float(error[is_cut].max()) <= 1 + rounding
    assert bool((codes == -8).any(-1).all())


def test_errors_are_a_fifth_less_than_of_symmetric_codes() -> None:
    """Of the same bytes: steps are an eighth of the largest magnitude and not a seventh."""
    x = torch.randn(50_000, 64, generator=generator(5))
    errors = []
    for full in (False, True):
        codes, scale = quantize(x, 4, 64, torch.float16, full_range=full)
        errors.append(float((dequantize(codes, scale, 4, torch.float32) - x).square().mean()))
    assert 0.75 < errors[1] / errors[0] < 0.8


def test_eight_bits_have_no_such_range() -> None:
    x = torch.randn(9, 32, generator=generator(6))
    plain, full = (quantize(x, 8, 8, torch.float16, full_range=full) for full in (False, True))
    assert torch.equal(plain[0].view(torch.uint8), full[0].view(torch.uint8))
    assert torch.equal(plain[1], full[1])
