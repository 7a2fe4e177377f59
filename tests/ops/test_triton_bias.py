"""Triton's attention with a positional bias, and its load of keys that had an offset."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ops import kernels
from ops.attention import Case, float32_error, make_case, plain
from ops.cases import codes, golden, offset_of, waves
from ops.kernels import attend, there
from ops.pools import INT8, PLAIN, Kind
from oracles.attention import assert_as_good_as_plain
from oracles.bits import FLOATS, assert_same_bits
from oracles.pairs import pairwise

from kvloom import ops
from kvloom.ops import Scores

pytestmark = kernels.pytestmark

NEW, STORED = [3, 20, 1], [300, 70, 9]


def case_of(kind: Kind, dtype: torch.dtype = torch.float32) -> Case:
    return make_case(NEW, STORED, kind=kind, dtype=dtype, head_dim=32, page_size=16, block_size=16)


@pytest.mark.parametrize(
    ("pairs", "kind", "dtype"), pairwise([1, 4, 17], [PLAIN, codes(4, 32)], FLOATS), ids=str
)
def test_numbers_of_pairs(pairs: int, kind: Kind, dtype: torch.dtype) -> None:
    case, scores = case_of(kind, dtype), Scores(positional_bias=waves(24, 4, pairs))
    out = attend(case, scores)
    assert_as_good_as_plain(out, golden(case, scores), plain(case, scores), float32_error(case, scores))


@pytest.mark.parametrize("first", [[0, 1, 63], [2**20, 2**30, -5]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_positions_that_sequences_begin_at(first: list[int], dtype: torch.dtype) -> None:
    case, bias = case_of(PLAIN), replace(waves(24, 4, 3), first_position=torch.tensor(first, dtype=dtype))
    scores = Scores(positional_bias=bias, softcap=20.0)
    out = attend(case, scores)
    assert_as_good_as_plain(out, golden(case, scores), plain(case, scores), 4 * float32_error(case, scores))


def test_dtypes_and_strides_do_not_matter() -> None:
    case, bias = case_of(INT8), waves(24, 4, 3)
    bias = replace(bias, coefficients=bias.coefficients.bfloat16(), frequencies=bias.frequencies.float())
    strided = replace(
        bias,
        coefficients=bias.coefficients.float().permute(2, 0, 1).contiguous().permute(1, 2, 0),
        frequencies=bias.frequencies.double().t().contiguous().t(),
        first_position=torch.zeros(3, dtype=torch.int32),
    )
    out = attend(case, Scores(positional_bias=strided))
    assert_same_bits(out, attend(case, Scores(positional_bias=bias)), "output")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_frequency_that_is_not_finite_breaks_the_rows_of_its_head(bad: float) -> None:
    case, bias = case_of(PLAIN), waves(24, 4, 3)
    expected = attend(case, Scores(positional_bias=bias))
    bias.frequencies[1, 2] = bad
    out = attend(case, Scores(positional_bias=bias))
    assert bool(out[:, 2:].isnan().all())
    assert_same_bits(out[:, :2], expected[:, :2], "the other head")


def test_sequences_alone_have_the_bits_of_the_batch() -> None:
    case, bias = case_of(INT8), waves(24, 4, 3)
    whole, row = attend(case, Scores(positional_bias=bias)), 0
    for b, count in enumerate(NEW):
        alone = Case(case.query[row : row + count], case.kv, [count], [STORED[b]], [case.slots[b]], 16)
        of_rows = replace(bias, coefficients=bias.coefficients[row : row + count])
        out = attend(alone, Scores(positional_bias=of_rows))
        assert_same_bits(out, whole[row : row + count], f"sequence {b}")
        row += count


@pytest.mark.parametrize("num_repeat", [1, 2])
def test_gathered_keys_have_their_offset(num_repeat: int) -> None:
    case = make_case([1], [12], kind=INT8, head_dim=16)
    slots, positions, offset = torch.tensor(case.slots[0]), torch.arange(12), offset_of()
    how = {"dtype": torch.bfloat16, "num_repeat": num_repeat}
    expected = ops.load(slots, case.kv, offset=offset, positions=positions, backend="reference", **how)
    with there(slots, case.kv, offset, positions) as (slots, kv, offset, positions):
        found = ops.load(slots, kv, offset=offset, positions=positions, backend="triton", **how)
        for name, x, want in zip(("key", "value"), found, expected, strict=True):
            assert_same_bits(x.cpu(), want, name)
