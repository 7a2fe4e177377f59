"""The table of special values, row by row, for every input and scale dtype."""

from __future__ import annotations

import math

import pytest
import torch
from oracles.bits import FLOATS, assert_same_bits, bits, generator
from torch import Tensor

from kvloom.quant.affine import dequantize, quantize
from kvloom.quant.packing import unpack

QMAX = {8: 127, 4: 7}
EPS = {torch.float32: 9.99999974737875e-06, torch.float16: 168 * 2.0**-24, torch.bfloat16: 168 * 2.0**-24}
INTEGER = {2: torch.int16, 4: torch.int32}

every_combination = pytest.mark.parametrize(
    ("dtype", "scale_dtype", "num_bits"),
    [(t1, t3, num_bits) for t1 in FLOATS for t3 in FLOATS for num_bits in (8, 4)],
    ids=lambda x: str(x).removeprefix("torch."),
)


def round_trip(
    x: Tensor, num_bits: int, group: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as int8, stored scales and dequantized values."""
    codes, scale = quantize(x, num_bits, group, scale_dtype)
    back = dequantize(codes, scale, num_bits, x.dtype)
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    return (codes if num_bits == 8 else unpack(codes, num_bits)), scale, back


def stored(scale: float, dtype: torch.dtype) -> float:
    """``scale`` as a cache with scales of ``dtype`` keeps it."""
    return float(torch.tensor(min(scale, torch.finfo(dtype).max), dtype=torch.float64).to(dtype))


def random_patterns(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Every bit pattern alike: subnormal, huge, infinite and NaN ones as well."""
    low, high = (-(2**15), 2**15) if dtype.itemsize == 2 else (-(2**31), 2**31)
    return (
        torch.randint(low, high, (count,), generator=generator(seed)).to(INTEGER[dtype.itemsize]).view(dtype)
    )


def code_of_maximum(x: float, dtype: torch.dtype, num_bits: int) -> int:
    """Code of the largest element of a group: qmax, or 126 where bfloat16 rounds its quotient to 126.5."""
    exact = torch.tensor(x, dtype=torch.float64).to(dtype)
    scale = (exact.double().abs() / QMAX[num_bits]).to(dtype)
    return max(
        -QMAX[num_bits], min(QMAX[num_bits], round(float((exact.double() / scale.double()).to(dtype))))
    )


def has_negative_zero(x: Tensor) -> bool:
    return bool(((x == 0) & x.signbit()).any())


# --- all zero, -0.0 or |x| < qmax * eps ---------------------------------------------------------------------


@every_combination
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_group(dtype: torch.dtype, scale_dtype: torch.dtype, num_bits: int, zero: float) -> None:
    codes, scale, back = round_trip(torch.full((3, 8), zero, dtype=dtype), num_bits, 8, scale_dtype)
    assert scale.unique().tolist() == [stored(EPS[dtype], scale_dtype)]
    assert not codes.any()
    assert not bits(back).any()


@every_combination
def test_group_below_the_smallest_scale(dtype: torch.dtype, scale_dtype: torch.dtype, num_bits: int) -> None:
    eps, qmax = EPS[dtype], QMAX[num_bits]
    tiny = torch.finfo(dtype).smallest_normal / 4
    wanted = [0.0, -0.0, tiny, -tiny, 0.4, -0.4, 0.6, -0.6, 1.7, -2.2, qmax * 0.9, -qmax * 0.9]
    x = (torch.tensor(wanted, dtype=torch.float64) * torch.tensor([1.0] * 4 + [eps] * 8)).to(dtype)
    codes, scale, back = round_trip(x, num_bits, 12, scale_dtype)
    assert scale.tolist() == [stored(EPS[dtype], scale_dtype)]
    assert codes.tolist() == [round(float(v) / eps) for v in x]
    assert (back.double() - x.double()).abs().max() <= 0.6 * eps
    assert not has_negative_zero(back)


# --- scale beyond the scale dtype ---------------------------------------------------------------------------


@every_combination
def test_scale_beyond_its_dtype(dtype: torch.dtype, scale_dtype: torch.dtype, num_bits: int) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[1.0, -1.0, 0.5, -0.25], [0.9, -0.9, 0.3, 0.0]], dtype=torch.float64) * largest
    codes, scale, back = round_trip(x.to(dtype), num_bits, 4, scale_dtype)
    exact_codes, exact_scale, _ = round_trip(x.to(dtype), num_bits, 4, torch.float32)
    assert scale.flatten().tolist() == [stored(float(s), scale_dtype) for s in exact_scale]
    assert torch.equal(codes, exact_codes)
    assert [row[0] for row in codes.tolist()] == [
        code_of_maximum(float(row[0]), dtype, num_bits) for row in x
    ]
    assert bool(back.isfinite().all())
    assert torch.equal(back.sign().double(), codes.sign().double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_bits", [8, 4])
def test_value_beyond_the_scale_dtype_saturates(dtype: torch.dtype, num_bits: int) -> None:
    x = torch.tensor([1e30, -1e30, 5e29, 0.0, 1e6, -1e6, 5e5, 0.0], dtype=dtype)
    codes, scale, back = round_trip(x, num_bits, 4, torch.float16)
    assert float(scale[0]) == 65504.0
    assert float(scale[1]) < 65504.0 or num_bits == 4
    top = float(torch.tensor(65504.0).to(dtype))
    assert back.tolist() == [top, -top, top, 0.0, top, -top, top, 0.0]
    assert int(codes[0]) == -int(codes[1]) == code_of_maximum(1e30, dtype, num_bits)


# --- largest finite input -----------------------------------------------------------------------------------


@every_combination
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_finite_input(
    dtype: torch.dtype, scale_dtype: torch.dtype, num_bits: int, sign: float
) -> None:
    largest, qmax = torch.finfo(dtype).max, QMAX[num_bits]
    x = torch.full((1, 8), sign * largest, dtype=dtype)
    codes, scale, back = round_trip(x, num_bits, 8, scale_dtype)
    by_formula = float(torch.tensor(largest / qmax, dtype=torch.float64).to(dtype))
    assert scale.tolist() == [[stored(by_formula, scale_dtype)]]
    code = code_of_maximum(largest, dtype, num_bits)
    assert code in (qmax, qmax - 1 if dtype == torch.bfloat16 else qmax)
    assert codes.unique().tolist() == [sign * code]
    product = min(stored(code * float(scale), scale_dtype), largest)
    assert back.unique().tolist() == [sign * float(torch.tensor(product, dtype=torch.float64).to(dtype))]
    assert bool(back.isfinite().all())


def test_largest_float16_comes_back_as_itself() -> None:
    """The formula alone would make it infinite: 127 * 516 is 65532."""
    _, scale, back = round_trip(torch.full((1, 8), 65504.0, dtype=torch.float16), 8, 8, torch.float16)
    assert float(scale) == 516.0
    assert back.unique().tolist() == [65504.0]


# --- any NaN or infinity in the group -----------------------------------------------------------------------


@every_combination
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_group_that_cannot_be_represented_is_nan(
    dtype: torch.dtype, scale_dtype: torch.dtype, num_bits: int, bad: float
) -> None:
    x = torch.randn(8, 3, 8, generator=generator(1)).to(dtype)
    good, good_scale, good_back = round_trip(x, num_bits, 8, scale_dtype)
    for place in range(8):
        x[place, 1, place] = bad
    codes, scale, back = round_trip(x, num_bits, 8, scale_dtype)
    assert not codes[:, 1].any()
    assert bool(scale[:, 1].isnan().all())
    assert bool(back[:, 1].isnan().all())
    for other in (0, 2):
        assert_same_bits(codes[:, other], good[:, other], "codes")
        assert_same_bits(scale[:, other], good_scale[:, other], "scale")
        assert_same_bits(back[:, other], good_back[:, other], "value")


@every_combination
def test_every_nan_is_stored_as_one_nan(dtype: torch.dtype, scale_dtype: torch.dtype, num_bits: int) -> None:
    """The scale of a damaged group has the same bits on every backend."""
    patterns = random_patterns(20_000, dtype, 3)
    bad = patterns[~patterns.isfinite()]
    assert len(bad) > 50
    x = torch.stack([bad, torch.ones_like(bad)], dim=-1)
    _, scale, _ = round_trip(x, num_bits, 2, scale_dtype)
    assert_same_bits(scale, torch.full((len(bad), 1), math.nan, dtype=scale_dtype), "scale")


# --- finite in, finite out ----------------------------------------------------------------------------------


def assert_sound(x: Tensor, num_bits: int, group: int, scale_dtype: torch.dtype) -> None:
    """A finite group stays finite, any other becomes NaN; scales are positive, codes within +-qmax, no -0."""
    codes, scale, back = round_trip(x, num_bits, group, scale_dtype)
    finite = x.isfinite().unflatten(-1, (-1, group)).all(-1)
    assert torch.equal(scale.isfinite(), finite)
    assert bool((scale[finite] > 0).all())
    assert torch.equal(back.isfinite(), finite.repeat_interleave(group, -1))
    assert torch.equal(back.isnan(), ~finite.repeat_interleave(group, -1))
    assert int(codes.abs().max()) == QMAX[num_bits]
    assert int(codes.min()) >= -QMAX[num_bits]
    assert not has_negative_zero(back)


@every_combination
def test_random_bit_patterns(dtype: torch.dtype, scale_dtype: torch.dtype, num_bits: int) -> None:
    x = random_patterns(96_000, dtype, 4)
    assert_sound(x.view(-1, 24), num_bits, 2, scale_dtype)
    finite = x[x.isfinite()][:72_000].view(-1, 24)
    for group in (4, 24):
        assert_sound(finite, num_bits, group, scale_dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("num_bits", [8, 4])
def test_every_bit_pattern_of_16_bits(dtype: torch.dtype, scale_dtype: torch.dtype, num_bits: int) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert_sound(torch.stack([every, every], dim=-1), num_bits, 2, scale_dtype)
    finite = every[every.isfinite()]
    shuffled = finite[torch.randperm(len(finite), generator=generator(5))]
    assert_sound(torch.stack([finite, shuffled], dim=-1), num_bits, 2, scale_dtype)
    assert_sound(torch.stack([finite, torch.zeros_like(finite)], dim=-1), num_bits, 2, scale_dtype)
