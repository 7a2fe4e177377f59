"""Codes, scales and dequantized values: the published vectors, ties, extremes and special values."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import bits
from oracles.pmx_cases import Call, Numerics, assert_matches_golden, random_input
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import pmx

EXAMPLE = [0.1, -0.3, 0.7, 1.0, -2.0, 0.05, 0.0, 1.5]
EXAMPLE_CODES = [6, -19, 44, 64, -127, 3, 0, 95]
NAN_BITS = {torch.float32: b"\x00\x00\xc0\x7f", torch.float16: b"\x00\x7e", torch.bfloat16: b"\xc0\x7f"}
EPS_IN = {torch.float32: 9.99999974737875e-06, torch.float16: 168 * 2.0**-24, torch.bfloat16: 168 * 2.0**-24}


def vectors_call(x: Tensor, scale_dtype: torch.dtype, bit: int, group: int) -> Call:
    """A call that stores the rows of ``x`` as keys and their negation as values."""
    tokens, head_dim = x.shape
    width = head_dim if bit == 8 else head_dim // 2
    return {
        "current_key": x.reshape(1, tokens, 1, head_dim),
        "current_value": -x.reshape(1, tokens, 1, head_dim),
        "start_pos": 0,
        "cache": torch.full((1, 1, 2, tokens, 1, width), 99, dtype=torch.int8 if bit == 8 else torch.uint8),
        "scale": torch.full((1, 1, 2, tokens, 1, head_dim // group), 99.0, dtype=scale_dtype),
        "quant_bit": bit,
        "quant_group": group,
    }


def round_trip(
    x: Tensor, scale_dtype: torch.dtype, bit: int = 8, group: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Stored codes or bytes, stored scales and returned keys of the rows of ``x``, as the golden has them."""
    call = vectors_call(x, scale_dtype, bit, group)
    assert_matches_golden(pmx.key_value_cache, pmx_golden.key_value_cache, dict(call), any_nan=True)
    key, _ = pmx.key_value_cache(**call)
    return call["cache"][0, 0, 0, :, 0], call["scale"][0, 0, 0, :, 0], key[0, :, 0]


def byte_string(x: Tensor) -> bytes:
    return bytes(bits.bits(x).flatten().tolist())


def grouped(rows: list[list[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


# --- published vectors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 0.0157480314), (torch.float16, 0.0157470703)])
def test_published_int8_example(dtype: torch.dtype, scale: float) -> None:
    codes, scales, _ = round_trip(torch.tensor([EXAMPLE], dtype=dtype), dtype)
    assert codes.tolist() == [EXAMPLE_CODES]
    assert torch.equal(scales, torch.tensor([[scale]], dtype=dtype))


def test_published_int4_example() -> None:
    packed, scales, key = round_trip(torch.tensor([EXAMPLE]), torch.float32, bit=4)
    assert byte_string(packed).hex() == "f0320950"
    assert torch.equal(scales, torch.tensor([[0.285714298]]))
    assert torch.equal(key, torch.tensor([[0.0, -1, 2, 3, -7, 0, 0, 5]]) * 0.285714298)


def test_dequantizes_in_the_dtype_of_the_scale() -> None:
    codes, scales, key = round_trip(torch.tensor([EXAMPLE]), torch.float16)
    assert codes.tolist() == [EXAMPLE_CODES]
    assert float(scales) == 0.0157470703125
    assert float(key[0, 7]) == 1.49609375  # 95 * 0.0157470703125 = 1.4959716796875, rounded to float16


# --- rounding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", bits.FLOATS)
def test_ties_round_to_even(dtype: torch.dtype) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5]], dtype=dtype)
    codes, scales, _ = round_trip(x, dtype)
    assert float(scales) == 1.0
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, 4]]


@pytest.mark.parametrize("dtype", bits.FLOATS)
def test_int4_ties_round_to_even(dtype: torch.dtype) -> None:
    x = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5]], dtype=dtype)
    packed, _, _ = round_trip(x, dtype, bit=4)
    assert pmx_golden.unpack_nibbles(packed[0].tolist()) == [7, 0, 2, 2, 0, -2, -2, 4]


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("scale_dtype", bits.FLOATS)
@pytest.mark.parametrize("bit", [8, 4])
def test_many_random_groups(dtype: torch.dtype, scale_dtype: torch.dtype, bit: int) -> None:
    round_trip(random_input((48, 64), dtype, bits.generator(11)), scale_dtype, bit, group=16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bit", [8, 4])
def test_every_magnitude_of_a_16_bit_dtype(dtype: torch.dtype, bit: int) -> None:
    finite = [
        p for p in range(0, 0x7F80, 61) if bool(torch.tensor(p, dtype=torch.int16).view(dtype).isfinite())
    ]
    largest = torch.tensor(finite, dtype=torch.int16).view(dtype)
    x = torch.stack([largest, -largest, largest * 0.4999, largest * 0.0123], dim=-1)
    codes, _, key = round_trip(x, dtype, bit, group=4)
    assert bool(key.isfinite().all())
    if bit == 8:
        assert int(codes.min()) >= -127


def test_largest_code_is_clamped_when_the_quotient_rounds_up() -> None:
    exponents = torch.arange(-6, 7, dtype=torch.float32)
    steps = torch.arange(128, dtype=torch.float32)
    amax = (2.0 ** exponents[:, None] * (1 + steps / 128)).flatten().to(torch.bfloat16)
    rounds_up = (amax / (amax / 127)).float() > 127.49
    assert bool(rounds_up.any()), "no example of a quotient of 127.5"
    x = torch.stack([amax[rounds_up], -amax[rounds_up]], dim=-1)[:40]
    codes, _, _ = round_trip(x, torch.bfloat16, group=2)
    assert codes.tolist() == [[127, -127]] * len(x)


# --- special values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("scale_dtype", bits.FLOATS)
@pytest.mark.parametrize("bit", [8, 4])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_group_has_the_smallest_scale(
    dtype: torch.dtype, scale_dtype: torch.dtype, bit: int, zero: float
) -> None:
    codes, scales, key = round_trip(torch.full((1, 8), zero, dtype=dtype), scale_dtype, bit)
    assert not bool(codes.any())
    assert float(scales) == float(torch.tensor(EPS_IN[dtype], dtype=torch.float64).to(scale_dtype))
    assert byte_string(key) == bytes(key.numel() * key.element_size())


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("bit", [8, 4])
def test_subnormal_group_is_zero(dtype: torch.dtype, bit: int) -> None:
    tiny = 2.0**-24 if dtype == torch.float16 else 2.0**-133
    x = grouped([[tiny, -tiny, 3 * tiny, 0.0, -0.0, 5 * tiny, tiny, -7 * tiny]], dtype)
    assert bool((x != 0).any())
    codes, _, key = round_trip(x, dtype, bit)
    assert not bool(codes.any())
    assert byte_string(key) == bytes(key.numel() * key.element_size())


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("scale_dtype", bits.FLOATS)
@pytest.mark.parametrize("bit", [8, 4])
def test_finite_input_stays_finite(dtype: torch.dtype, scale_dtype: torch.dtype, bit: int) -> None:
    top = torch.finfo(dtype).max
    rows = [[top, -top, top / 2, 0, 1, -1, top / 127, 2], [65504.0, -65504, 3e4, 1, 2, 3, 4, 5]]
    _, scales, key = round_trip(grouped(rows, dtype), scale_dtype, bit)
    assert bool(scales.isfinite().all())
    assert bool(key.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_saturates_in_a_narrow_dtype(dtype: torch.dtype) -> None:
    top = 127 * 2.0**90
    codes, scales, key = round_trip(
        torch.tensor([[top, -top, 0, top / 2, 1, 2, 3, 4]], dtype=dtype), torch.float16
    )
    assert float(scales) == 65504.0
    assert codes[0, :3].tolist() == [127, -127, 0]
    assert key[0, :3].tolist() == [float(torch.tensor(v).to(dtype)) for v in (65504.0, -65504.0, 0.0)]


def test_product_saturates_in_the_input_dtype() -> None:
    _, scales, key = round_trip(torch.full((1, 8), 65504.0, dtype=torch.float16), torch.float16)
    assert float(scales) == 516.0
    assert key.tolist() == [[65504.0] * 8]


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("scale_dtype", bits.FLOATS)
@pytest.mark.parametrize("bit", [8, 4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 7])
def test_group_with_a_special_value_becomes_nan(
    dtype: torch.dtype, scale_dtype: torch.dtype, bit: int, bad: float, place: int
) -> None:
    x = random_input((1, 24), dtype, bits.generator(2))
    x[0, 8 + place] = bad
    codes, scales, key = round_trip(x, scale_dtype, bit)
    per_group = 8 if bit == 8 else 4
    assert codes[0, per_group : 2 * per_group].tolist() == [0] * per_group
    assert byte_string(scales[0, 1]) == NAN_BITS[scale_dtype]
    assert key[0].isnan().tolist() == [False] * 8 + [True] * 8 + [False] * 8


@pytest.mark.parametrize("dtype", bits.FLOATS)
def test_nan_with_a_payload_is_stored_as_the_canonical_nan(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 8, dtype=dtype)
    bits.bits(x)  # the two bytes below are the sign, the exponent and every mantissa bit of the last element
    x.view(torch.uint8)[0, -2:] = 255
    assert bool(x[0, 7].isnan())
    _, scales, _ = round_trip(x, dtype)
    assert byte_string(scales) == NAN_BITS[dtype]


# --- without a quantizer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*bits.FLOATS, torch.int8])
def test_same_dtype_passes_every_bit_pattern(dtype: torch.dtype) -> None:
    rng = bits.generator(9)
    key, value = (bits.poison((1, 6, 1, 32), dtype, rng) for _ in range(2))
    cache = torch.zeros(1, 1, 2, 6, 1, 32, dtype=dtype)
    got_key, got_value = pmx.key_value_cache(key, value, 0, cache)
    for name, got, want in (("key", got_key, key), ("value", got_value, value)):
        bits.assert_same_bits(got, want, name)
    bits.assert_same_bits(cache[:, 0, 0], key, "cache")
    bits.assert_same_bits(cache[:, 0, 1], value, "cache")


@pytest.mark.parametrize("how", [Numerics(a, b) for a in bits.FLOATS for b in bits.FLOATS if a != b], ids=str)
def test_other_float_dtype_is_cast_there_and_back(how: Numerics) -> None:
    key = random_input((1, 6, 1, 32), how.inputs, bits.generator(9))
    cache = torch.zeros(1, 1, 2, 6, 1, 32, dtype=how.cache)
    got_key, _ = pmx.key_value_cache(key, key, 0, cache)
    bits.assert_same_bits(cache[:, 0, 0], key.to(how.cache), "cache")
    bits.assert_same_bits(got_key, key.to(how.cache).to(how.inputs), "key")
