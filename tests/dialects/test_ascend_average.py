"""The averaged token of Rope compression: accumulated wide, rounded once, exact for integers."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import FLOATS, INTEGERS, assert_within_one_ulp, dtype_id, soft
from torch import Tensor

from kvloom.conform.oracles import ascend as ascend_golden
from kvloom.dialects import ascend

NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)


def averaged(window: Tensor, dims: int = 3) -> Tensor:
    """The token that replaces the whole sequence ``window`` [n, D]."""
    key = window[None, :, None] if dims == 4 else window[:, None]
    caches = [torch.zeros(1, 1, 1, window.shape[1], dtype=window.dtype) for _ in range(2)]
    ascend.scatter_pa_kv_cache(
        key, key, *caches, torch.zeros(1, 1, dtype=torch.int64) if dims == 4 else torch.tensor([0]),
        compress_lens=torch.tensor([len(window)]), compress_seq_offset=torch.tensor([0]),
        seq_lens=torch.tensor([len(window)]), scatter_mode="Rope",
    )  # fmt: skip
    bits.assert_same_bits(caches[1], caches[0], "value_cache")
    return caches[0].flatten()


def integers(dtype: torch.dtype, *values: int) -> Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_float_average_is_rounded_once(dtype: torch.dtype, count: int, dims: int) -> None:
    window = soft((count, 50), dtype, bits.generator(count))
    assert_within_one_ulp(averaged(window, dims), ascend_golden.mean(window), "the average")


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("dtype", INTEGERS, ids=dtype_id)
def test_integer_average_truncates_toward_zero(dtype: torch.dtype, count: int, dims: int) -> None:
    window = bits.poison((count, 50), dtype, bits.generator(count))
    bits.assert_same_bits(averaged(window, dims), ascend_golden.mean(window), "the average")


@pytest.mark.parametrize("dtype", (torch.int8, torch.int16, torch.int32), ids=dtype_id)
def test_negative_averages_do_not_round_down(dtype: torch.dtype) -> None:
    assert averaged(integers(dtype, -1, 0)).tolist() == [0]
    assert averaged(integers(dtype, -3, -4)).tolist() == [-3]
    assert averaged(integers(dtype, -5, 0, 0)).tolist() == [-1]


@pytest.mark.parametrize("dtype", NARROW, ids=dtype_id)
def test_narrow_integers_do_not_overflow_in_the_sum(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    for extreme in (info.min, info.max):
        assert averaged(integers(dtype, *[extreme] * 1000)).tolist() == [extreme]


def test_wide_integers_wrap_in_their_own_type() -> None:
    assert averaged(integers(torch.int32, 2**31 - 1, 1)).tolist() == [-(2**30)]
    assert averaged(integers(torch.int32, -(2**31), -(2**31))).tolist() == [0]
    assert averaged(integers(torch.int32, -(2**31), -1)).tolist() == [2**30 - 1]
    assert averaged(integers(torch.uint32, 2**32 - 1, 3)).tolist() == [1]
    assert averaged(integers(torch.uint32, 2**31, 2**31 - 1)).tolist() == [2**31 - 1]


def test_long_half_precision_window_does_not_overflow() -> None:
    assert averaged(torch.full((3000, 2), 60000.0, dtype=torch.float16)).tolist() == [60000.0, 60000.0]


def test_long_bfloat16_window_does_not_stagnate() -> None:
    window = torch.ones(5000, 1, dtype=torch.bfloat16)
    window[::2] = 3.0
    assert averaged(window).tolist() == [2.0]


@pytest.mark.parametrize("dtype", (torch.float8_e5m2, torch.float8_e4m3fn), ids=dtype_id)
def test_long_float8_window_does_not_stagnate(dtype: torch.dtype) -> None:
    window = torch.tensor([[1.0], [3.0]] * 300).to(dtype)
    assert averaged(window).tolist() == [2.0]


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_largest_and_smallest_values_average_to_themselves(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    largest = info.max / 4 if info.max > 2.0**100 else info.max  # four of them must fit in float32
    smallest = info.smallest_normal * info.eps
    for value in (largest, -largest, smallest, -smallest):
        window = torch.tensor([[value]] * 4, dtype=torch.float64).to(dtype)
        bits.assert_same_bits(averaged(window), window[0], "the average")


@pytest.mark.parametrize("dtype", FLOATS[:4], ids=dtype_id)
def test_infinities_spread_and_cancel_to_nan(dtype: torch.dtype) -> None:
    inf = math.inf
    window = torch.tensor([[inf, -inf, inf, 1.0], [1.0, 2.0, -inf, math.nan]]).to(dtype)
    got = averaged(window).float()
    assert got[:2].tolist() == [inf, -inf]
    assert got[2:].isnan().all()


def test_nan_of_float8_without_infinities_spreads() -> None:
    got = averaged(torch.tensor([[math.nan, 1.0], [1.0, 1.0]]).to(torch.float8_e4m3fn)).float()
    assert got[0].isnan()
    assert got[1] == 1.0


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=dtype_id)
def test_realistic_windows_stay_within_one_unit(dtype: torch.dtype) -> None:
    window = (torch.randn(200, 64, generator=bits.generator(1)) * 3 + 5).to(dtype)
    assert_within_one_ulp(averaged(window), ascend_golden.mean(window), "the average")


def test_float32_window_is_as_good_as_float32_sums() -> None:
    window = torch.randn(200, 64, generator=bits.generator(2))
    error = (averaged(window).double() - window.double().mean(0)).abs()
    assert (error <= 200 * 2**-24 * window.double().abs().mean(0)).all()


def test_one_token_is_its_own_average() -> None:
    window = soft((1, 40), torch.float16, bits.generator(3))
    assert torch.equal(averaged(window), window[0])


def test_key_and_value_are_averaged_each_over_its_own_tokens() -> None:
    key, value = (
        torch.tensor([1.0, 3.0]).view(2, 1, 1),
        torch.tensor([[10.0, 20.0], [30.0, 50.0]]).view(2, 1, 2),
    )
    caches = torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 2)
    two = torch.tensor([2])
    ascend.scatter_pa_kv_cache(
        key, value, *caches, torch.tensor([1]), compress_lens=two, compress_seq_offset=two - 2, seq_lens=two,
        scatter_mode="Rope",
    )  # fmt: skip
    assert caches[0].flatten().tolist() == [0.0, 2.0]
    assert caches[1].flatten().tolist() == [0.0, 0.0, 20.0, 35.0]
