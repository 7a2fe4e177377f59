"""What a query does not see cannot reach it, whatever is stored there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

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
