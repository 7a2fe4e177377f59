"""Codes and scales are those of the document: divided, each step rounded to the input dtype, ties to even."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles.bits import FLOATS, assert_same_bits, generator
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.quant.affine import dequantize, quantize, saturate
from kvloom.quant.packing import unpack

QMAX = {8: 127, 4: 7}
EXAMPLE = [0.1, -0.3, 0.7, 1.0, -2.0, 0.05, 0.0, 1.5]


def codes_of(x: Tensor, bits: int, group: int, scale_dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes as int8, also of 4 bits."""
    codes, _ = quantize(x, bits, group, scale_dtype)
    return codes if bits == 8 else unpack(codes, bits)


def magnitudes(num_groups: int, group: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal values, each group with a power of two and a factor of its own."""
    rng = generator(seed)
    powers = torch.randint(-5, 5, (num_groups, 1), generator=rng).double().exp2()
    factors = 1 + torch.rand(num_groups, 1, generator=rng, dtype=torch.float64)
    return (torch.randn(num_groups, group, generator=rng, dtype=torch.float64) * powers * factors).to(dtype)


# --- published vectors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 0.0157480314), (torch.float16, 0.0157470703)])
def test_published_int8_vector(dtype: torch.dtype, scale: float) -> None:
    codes, scales = quantize(torch.tensor(EXAMPLE, dtype=dtype), 8, 8, dtype)
    assert codes.dtype == torch.int8
    assert codes.tolist() == [6, -19, 44, 64, -127, 3, 0, 95]
    assert_same_bits(scales, torch.tensor([scale], dtype=dtype), "scale")


def test_published_int4_vector() -> None:
    packed, scales = quantize(torch.tensor(EXAMPLE), 4, 8, torch.float32)
    assert packed.dtype == torch.uint8
    assert bytes(packed.tolist()).hex() == "f0320950"
    assert_same_bits(scales, torch.tensor([0.285714298]), "scale")
    assert unpack(packed, 4).tolist() == [0, -1, 2, 3, -7, 0, 0, 5]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
def test_groups_equal_a_plain_loop(bits: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    x = magnitudes(60, 8, dtype).view(5, 3, 32)
    codes, scales = quantize(x, bits, 8, scale_dtype)
    wide = codes if bits == 8 else unpack(codes, bits)
    assert scales.shape == (5, 3, 4)
    back = dequantize(codes, scales, bits, dtype)
    for i, j, g in itertools.product(range(5), range(3), range(4)):
        part = slice(8 * g, 8 * g + 8)
        want_codes, want_scale = pmx_golden.quantize_group(x[i, j, part], bits)
        stored = pmx_golden.rounded(want_scale, scale_dtype)
        assert wide[i, j, part].tolist() == want_codes
        assert_same_bits(scales[i, j, g], stored, "scale")
        assert_same_bits(back[i, j, part], pmx_golden.dequantize_group(want_codes, stored, dtype), "value")


# --- rounding to an integer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sign", [1, -1])
def test_int8_ties_round_to_even(dtype: torch.dtype, sign: int) -> None:
    halves = sign * (torch.arange(127) + 0.5)
    x = torch.stack([torch.full_like(halves, 127.0), halves], dim=-1).to(dtype)
    assert torch.equal(x[:, 1].double(), halves.double())
    codes, scales = quantize(x, 8, 2, dtype)
    assert scales.unique().tolist() == [1.0]
    assert codes[:, 1].tolist() == [sign * 2 * ((k + 1) // 2) if k < 126 else sign * 126 for k in range(127)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("step", [0.25, 1.0, 32.0])
def test_int4_ties_round_to_even(dtype: torch.dtype, step: float) -> None:
    x = torch.tensor(
        [7, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, -0.5, -1.5, -2.5, -3.5, -4.5, -5.5, -6.5, 0], dtype=dtype
    )
    assert codes_of(x * step, 4, 16).tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 0, -2, -2, -4, -4, -6, -6, 0]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_maximum_of_a_16_bit_dtype_gives_a_code_beyond_qmax(bits: int, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    codes = codes_of(torch.stack([finite, -finite], dim=-1), bits, 2)
    assert int(codes.min()) == -QMAX[bits]
    assert int(codes.max()) == QMAX[bits]


@pytest.mark.parametrize(
    ("dtype", "smallest"), [(torch.float32, 127), (torch.float16, 127), (torch.bfloat16, 126)]
)
def test_largest_element_has_the_largest_code(dtype: torch.dtype, smallest: int) -> None:
    """bfloat16 rounds some quotients to 126.5, a tie, and some to 127.5, which the clamp brings back."""
    x = magnitudes(20_000, 4, dtype, seed=1)
    codes = codes_of(x, 8, 4).gather(-1, x.abs().argmax(-1, keepdim=True)).abs()
    assert (int(codes.min()), int(codes.max())) == (smallest, 127)
    assert int(codes_of(x, 4, 4).abs().amax(-1).min()) == 7


# --- division -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_scale_is_divided_and_not_multiplied_by_a_reciprocal(bits: int, dtype: torch.dtype) -> None:
    amax = (1 + torch.arange(2000, dtype=torch.float64) / 1024).to(dtype)
    divided = (amax.double() / QMAX[bits]).to(dtype)  # float64 has room enough for one exact rounding
    by_reciprocal = amax * torch.tensor(1 / QMAX[bits], dtype=dtype)
    assert bool((divided != by_reciprocal).any()), "no example in which the two differ"
    _, scales = quantize(amax.unsqueeze(-1).expand(-1, 2), bits, 2, dtype)
    assert_same_bits(scales, divided.unsqueeze(-1), "scale")


@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_are_divided_and_not_multiplied_by_a_reciprocal(dtype: torch.dtype) -> None:
    amax = magnitudes(20_000, 1, dtype, seed=2).abs() + 0.01
    scale = (amax.double() / 127).to(dtype)
    ties = scale * (torch.arange(100) + 0.5)[::9].to(dtype)  # as near to a tie as this dtype comes
    x = torch.cat((amax, ties), dim=-1)
    divided = (x.double() / scale.double()).to(dtype).round().clamp(-127, 127)
    by_reciprocal = (x * (torch.ones((), dtype=dtype) / scale)).round().clamp(-127, 127)
    assert bool((divided != by_reciprocal).any()), "no example in which the two differ"
    assert torch.equal(codes_of(x, 8, x.shape[-1]), divided.to(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quotient_is_rounded_to_the_input_dtype_before_the_integer(dtype: torch.dtype) -> None:
    x = magnitudes(40_000, 8, dtype, seed=3)
    scale = (x.abs().amax(-1, keepdim=True).double() / 127).to(dtype)
    quotient = x.double() / scale.double()
    once = quotient.round().clamp(-127, 127)
    twice = quotient.to(dtype).double().round().clamp(-127, 127)
    assert bool((once != twice).any()), "no example in which the two differ"
    assert torch.equal(codes_of(x, 8, 8), twice.to(torch.int8))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_do_not_depend_on_the_dtype_of_the_stored_scale(bits: int, dtype: torch.dtype) -> None:
    x = magnitudes(2000, 16, dtype, seed=4)
    first, *others = (codes_of(x, bits, 16, scale_dtype) for scale_dtype in FLOATS)
    assert all(torch.equal(first, other) for other in others)


# --- dequantize ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
def test_product_is_rounded_to_the_scale_dtype_and_then_to_the_output(
    dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    codes = torch.arange(-127, 128, dtype=torch.int8).expand(200, -1)
    scale = magnitudes(200, 1, scale_dtype, seed=5).abs()
    product = (codes.double() * scale.double()).to(scale_dtype)
    assert_same_bits(dequantize(codes, scale, 8, dtype), product.to(dtype) + 0.0, "value")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [2, 4, 16])
def test_each_group_has_its_own_scale(bits: int, group: int) -> None:
    x = magnitudes(6, 16, torch.float32, seed=6)
    codes, scales = quantize(x, bits, group, torch.float32)
    back = dequantize(codes, scales, bits, torch.float32)
    for g in range(16 // group):
        part = slice(g * group, (g + 1) * group)
        alone_codes, alone_scale = quantize(x[:, part].contiguous(), bits, group, torch.float32)
        assert_same_bits(scales[:, g : g + 1], alone_scale, "scale")
        assert_same_bits(back[:, part], dequantize(alone_codes, alone_scale, bits, torch.float32), "value")


@pytest.mark.parametrize("bits", [8, 4])
def test_strides_of_the_input_do_not_matter(bits: int) -> None:
    x = magnitudes(12, 16, torch.float16, seed=7).view(3, 4, 16)
    codes, scales = quantize(x, bits, 8, torch.float16)
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    again_codes, again_scales = quantize(strided, bits, 8, torch.float16)
    assert_same_bits(again_codes, codes, "codes")
    assert_same_bits(again_scales, scales, "scale")


@pytest.mark.parametrize("bits", [8, 4])
def test_no_rows_give_no_codes(bits: int) -> None:
    codes, scales = quantize(torch.empty(0, 3, 16), bits, 8, torch.float16)
    assert codes.shape == (0, 3, 16 if bits == 8 else 8)
    assert scales.shape == (0, 3, 2)
    assert dequantize(codes, scales, bits, torch.float32).shape == (0, 3, 16)


# --- saturate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_saturate_is_a_cast_that_never_makes_an_infinity(source: torch.dtype, target: torch.dtype) -> None:
    largest, top = torch.finfo(target).max, torch.finfo(source).max
    x = torch.tensor([0.0, -0.0, 1.5, -3.0, 1e-7, 65504, -65504, top, -top, top / 2, -top / 3], dtype=source)
    expected = x.double().clamp(-largest, largest).to(target)
    assert_same_bits(saturate(x, target), expected, "value")
    assert bool(saturate(torch.tensor([torch.nan], dtype=source), target).isnan().all())
