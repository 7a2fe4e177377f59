"""The reference of rotation against the matrix, written out; its bounds, and what it does for outliers."""

from __future__ import annotations

import math

import pytest
import torch
from oracles.bits import FLOATS, generator
from torch import Tensor

from kvloom.quant.affine import dequantize, quantize
from kvloom.quant.rotation import block_of, rotate

DIMS = {2: 2, 6: 2, 64: 64, 72: 8, 80: 16, 96: 32, 128: 128, 576: 64, 2048: 1024, 7: 1}
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half a unit in the last place of 1."""


def matrix(dim: int, block: int) -> Tensor:
    """Block diagonal, element (i, j) of a block is -1 to the number of bits that i and j share."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    return torch.block_diag(*[torch.tensor(signs, dtype=torch.float64)] * (dim // block)) / math.sqrt(block)


@pytest.mark.parametrize(("dim", "block"), DIMS.items())
def test_the_block_is_the_largest_power_of_two_that_divides(dim: int, block: int) -> None:
    assert block_of(dim) == block


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", DIMS)
def test_it_multiplies_by_the_matrix(dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, dim, generator=generator(dim)).to(dtype)
    block = block_of(dim)
    expected = x.double() @ matrix(dim, block)
    # One rounding to the dtype, and one in float32 for each sum and each factor.
    steps = math.log2(block) + 2
    bound = expected.abs() * ROUNDING[dtype] * 1.01 + steps * 2.0**-24 * x.double().norm() + 1e-7
    assert ((rotate(x, block).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_scores_of_rotated_vectors_are_those_of_the_vectors(dim: int) -> None:
    query, key = torch.randn(2, 50, dim, generator=generator(1))
    block = block_of(dim)
    scores = rotate(query, block).double() @ rotate(key, block).double().T
    norms = query.double().norm(dim=-1)[:, None] * key.double().norm(dim=-1)
    bound = 2 * (math.log2(block) + 2) * 2.0**-24 * norms * 2
    assert ((scores - query.double() @ key.double().T).abs() <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_rotating_again_turns_back(dtype: torch.dtype) -> None:
    x = torch.randn(9, 64, generator=generator(2)).to(dtype)
    error = (rotate(rotate(x, 64), 64).double() - x.double()).norm(dim=-1)
    assert (error <= 4 * ROUNDING[dtype] * x.double().norm(dim=-1)).all()


def test_a_vector_has_the_same_bits_alone_and_among_others() -> None:
    x = torch.randn(300, 128, generator=generator(3))
    together = rotate(x, 128)
    assert all(torch.equal(rotate(row[None], 128)[0], each) for row, each in zip(x, together, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_finite_stays_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.full((2, 64), largest, dtype=dtype)
    x[1, ::2] = -largest
    turned = rotate(x, 64)
    assert turned.isfinite().all()
    assert turned[0, 0] == largest
    assert rotate(torch.full((1, 64), torch.finfo(dtype).tiny, dtype=dtype), 64).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_nan_or_infinity_is_nan_and_no_other(bad: float) -> None:
    x = torch.ones(2, 96)
    x[1, 40] = bad
    turned = rotate(x, 32)
    assert turned[0].isfinite().all()
    assert turned[1, 32:64].isnan().all()
    assert turned[1, :32].isfinite().all()
    assert turned[1, 64:].isfinite().all()


def test_outliers_cost_other_elements_less() -> None:
    x = torch.randn(400, 64, generator=generator(4))
    x[:, 5] *= 20
    query = torch.randn(64, 400, generator=generator(5))
    query[5] /= 20

    def error(stored: Tensor) -> float:
        codes, scales = quantize(stored, 4, 64, torch.float16)
        return float((dequantize(codes, scales, 4, torch.float32) - stored).norm())

    assert error(rotate(x, 64)) < 0.6 * error(x)
