"""Triton smooths and rotates head vectors as the reference, bit for bit but for the waves of an offset."""

from __future__ import annotations

import pytest
import torch
from ops import kernels
from ops.kernels import there
from ops.test_smoothing import (
    HEADS,
    arrays_of,
    assert_near,
    by_reference,
    error_of_offset,
    keys,
    positions_of,
    smoothing_of,
)
from oracles.bits import FLOATS, assert_same_bits, generator
from oracles.pairs import pairwise
from torch import Tensor

from kvloom.ops.impl import reference
from kvloom.ops.impl.triton import operator
from kvloom.quant.rotation import block_of

pytestmark = kernels.pytestmark

DIMS = (16, 20, 64, 80, 128)


@pytest.mark.parametrize(
    ("head_dim", "pairs", "dtype", "order", "is_rotated", "is_restored"),
    [
        case
        for case in pairwise(
            DIMS, (0, 1, 4, 9), FLOATS, ("3-D", "by head", "by token", "apart"), (False, True), (False, True)
        )
        if 2 * case[1] <= case[0]
    ],
)
def test_keys_are_smoothed_as_by_the_reference(
    head_dim: int, pairs: int, dtype: torch.dtype, order: str, is_rotated: bool, is_restored: bool
) -> None:
    smoothing, block = smoothing_of(head_dim, pairs), block_of(head_dim) if is_rotated else 0
    sizes = (9, HEADS, head_dim) if order == "3-D" else (2, HEADS, 7, head_dim)
    x = keys(*sizes, dtype=dtype, is_by_token=order == "by token")
    if order == "apart":
        x = torch.stack((x, x), -1)[..., 0]
    positions = positions_of(x, largest=10**6) if pairs else None
    inverse, *arrays = smoothing.numbers
    factor = smoothing.gain if is_restored else inverse
    with there(x, positions, factor, *arrays) as moved:
        found = operator("smooth")(*moved, block, is_restored).cpu()
    expected = by_reference(smoothing, x, positions, block, is_restored)
    assert found.stride() == (x.contiguous() if order == "apart" else x).stride()
    assert_near(found, expected, error_of_offset(smoothing, block, is_restored))
    if not pairs:
        assert_same_bits(found, expected, "keys")


@pytest.mark.parametrize(
    ("head_dim", "pairs", "dtype", "ratio", "is_rotated"),
    pairwise(DIMS, (0, 1, 4), FLOATS, (1, 4), (False, True)),
)
def test_queries_are_those_of_the_reference(
    head_dim: int, pairs: int, dtype: torch.dtype, ratio: int, is_rotated: bool
) -> None:
    smoothing, block = smoothing_of(head_dim, pairs), block_of(head_dim) if is_rotated else 0
    query = keys(5, HEADS * ratio, head_dim, dtype=dtype)
    mean, channels, _ = arrays_of(smoothing)
    with there(query, smoothing.gain, mean, channels) as moved:
        found, coefficients = operator("smooth_query")(*moved, block)
    expected = reference.smooth_query(query, smoothing.gain, mean, channels, block)
    assert_same_bits(found.cpu(), expected[0], "query")
    assert_same_bits(coefficients.cpu(), expected[1], "coefficients")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rotations_have_the_bits_of_the_reference_with_special_values_too(dtype: torch.dtype) -> None:
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    special = torch.tensor([0.0, -0.0, tiny, tiny / 2, largest, -largest, 1.0, -3.0], dtype=dtype)
    x = special[torch.randint(8, (12, 2, 80), generator=generator(1))]
    x[7, 1, 3], x[8, 0, 60], x[9, 1, 0] = float("nan"), float("inf"), float("-inf")
    for block in (1, 2, 16):
        with there(x) as moved:
            found: Tensor = operator("rotate")(*moved, block).cpu()
        expected = reference.rotate(x, block)
        assert torch.equal(found.isnan(), expected.isnan())
        assert_same_bits(found.nan_to_num(), expected.nan_to_num(), "rotated")


@pytest.mark.parametrize("shape", [(0, 3, 64), (2, 3, 0, 64)])
def test_no_tokens_are_smoothed_to_none(shape: tuple[int, ...]) -> None:
    smoothing, x = smoothing_of(64, 4), torch.zeros(shape)
    inverse, *arrays = smoothing.numbers
    with there(x, positions_of(x), inverse, *arrays) as moved:
        assert operator("smooth")(*moved, 0, False).shape == shape
