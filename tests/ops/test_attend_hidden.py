"""What a query does not see cannot reach it, whatever is stored there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ops.attention import make_case
from ops.cases import codes
from ops.native import native
from ops.pools import Kind
from oracles.bits import FLOATS, assert_same_bits

from kvloom import Batch, CacheIndex, CacheLayout, KVView, Scores, ops
from kvloom.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("each_backend")

TOKENS = 9
BATCH = Batch(CacheIndex.offset(torch.tensor([0])), torch.tensor([0, TOKENS]), torch.tensor([0, TOKENS]))


def filled() -> tuple[torch.Tensor, KVView]:
    """Query, and a cache of TOKENS tokens with 2 heads of 8."""
    query, cache = torch.randn(TOKENS, 4, 8), torch.randn(1, 2, TOKENS, 2, 8)
    return query, KVView.joint(CacheLayout("L 2 T H D"), cache)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("scores", "position", "sees"),
    [
        (Scores(), 6, [6, 7, 8]),
        (Scores(window=2), 3, [3, 4]),
        (Scores(is_causal=False, window=3), 2, [0, 1, 2, 3, 4]),
        (Scores(alibi_slopes=torch.ones(4)), 8, [8]),
    ],
    ids=["causal", "window", "window only", "alibi"],
)
def test_only_rows_that_see_a_broken_value_are_nan(
    scores: Scores, position: int, sees: list[int], bad: float
) -> None:
    query, kv = filled()
    whole = ops.attend(query, kv, BATCH, scores)
    assert kv.value is not None
    kv.value.cache[0, position, 0, 1, 0, 5] = bad
    out = ops.attend(query, kv, BATCH, scores)
    expected = torch.zeros(TOKENS, 4, 8, dtype=torch.bool)
    expected[sees, 2:, 5] = True  # the two query heads of head 1
    assert torch.equal(out.isnan(), expected)
    torch.testing.assert_close(out[~expected], whole[~expected])


def test_tokens_before_the_first_visible_one_may_be_broken() -> None:
    query, kv = filled()
    batch = replace(BATCH, first_visible=torch.tensor([3]))
    whole = ops.attend(query, kv, batch)
    for side in kv.sides:
        side.cache[0, :3] = math.nan
    assert torch.equal(ops.attend(query, kv, batch)[3:], whole[3:])
    assert not whole[:3].any()


@pytest.mark.parametrize("softcap", [0.0, -1.0, math.inf, math.nan])
def test_softcap_must_be_positive_and_finite(softcap: float) -> None:
    query, kv = filled()
    with pytest.raises(ArgumentError, match="softcap must be positive and finite"):
        ops.attend(query, kv, BATCH, Scores(softcap=softcap))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", [codes(8, 16), codes(4, 64), codes(2, 16)], ids=str)
@pytest.mark.parametrize("is_native", [False, True], ids=["rows", "native"])
def test_a_query_that_is_not_finite_is_nan_over_codes(
    is_native: bool, kind: Kind, dtype: torch.dtype, bad: float
) -> None:
    """Whatever kernels make of a query beforehand, and the other rows have their bits."""
    case = make_case([4], [70], axes="B S H D", kind=kind, dtype=dtype, head_dim=64, page_size=16,
                     block_size=16)  # fmt: skip
    if is_native:
        case = replace(case, kv=native(case))
    whole = ops.attend(case.query, case.kv, case.batch())
    case.query[2, 1, 37] = bad
    out = ops.attend(case.query, case.kv, case.batch())
    assert bool(out[2, 1].isnan().all())
    out[2, 1] = whole[2, 1]
    assert_same_bits(out, whole, "other rows")
