"""Attention over codes of 2 bits is attention over codes of 4 bits that stand for the same numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ops.attention import Case, make_case
from ops.cases import codes
from ops.native import native
from oracles.bits import FLOATS, assert_same_bits
from torch import Tensor

from kvloom import ops
from kvloom.core.specs import CODE_DTYPE
from kvloom.core.views import KVView, Side
from kvloom.ops import Scores
from kvloom.quant.packing import pack, unpack

pytestmark = pytest.mark.usefixtures("each_backend")


def with_four_bits(case: Case) -> Case:
    """The same numbers in the slots that the case has, of a cache by rows."""
    sides = []
    for side in case.kv.sides:
        assert side.scale is not None
        stored = side.cache.contiguous().view(torch.uint8).flatten(4)
        numbers = 2 * unpack(stored, 2) + 1
        cache = pack(numbers, 4).view(CODE_DTYPE[4]).unsqueeze(4)
        sides.append(Side(cache, side.scale.contiguous().flatten(4).unsqueeze(4)))
    return dataclasses.replace(case, kv=KVView(*sides), loaded=[])


def attend(case: Case) -> Tensor:
    return ops.attend(case.query, case.kv, case.batch(), Scores(softcap=4.0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group", [8, 16, 64])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 192), (192, 64)])
def test_attention_is_that_over_four_bits(
    head_dim: int, value_dim: int, group: int, dtype: torch.dtype
) -> None:
    case = make_case([1, 40, 5], [90, 70, 16], axes="B S H D", kind=codes(2, group), dtype=dtype,
                     head_dim=head_dim, value_dim=value_dim, page_size=16, block_size=16)  # fmt: skip
    expected = attend(with_four_bits(case))
    assert bool(expected.isfinite().all())
    assert_same_bits(attend(case), expected, "rows")
    in_order = dataclasses.replace(case, kv=native(case))
    assert_same_bits(attend(in_order), expected, "native")


def test_a_value_that_is_not_finite_is_seen_by_weight() -> None:
    """The slow path reads codes of 2 bits on its own."""
    case = make_case([3], [40], axes="B H S D", kind=codes(2, 16), head_dim=64, page_size=16, block_size=16)
    scale = case.kv.tensors[3]
    assert scale is not None
    block, within = divmod(case.slots[0][38], 16)
    scale.flatten(1, 2)[block, within, 1, 0, 2] = torch.nan
    out = attend(case)
    expected = attend(with_four_bits(case))
    assert torch.equal(out.isnan(), expected.isnan())
    assert out.isnan().sum() == 2 * 2 * 16  # of two rows that see it and two heads, one group
    assert_same_bits(out, expected, "output", any_nan=True)
