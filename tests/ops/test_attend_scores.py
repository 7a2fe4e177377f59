"""Every way to form and hide scores, alone and together, against the float64 loop; and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.attention import Case, exact, float32_error, make_case, plain
from ops.cases import waves
from ops.pools import INT4, INT8, PLAIN, Kind
from oracles.attention import assert_as_good_as_plain
from oracles.bits import FLOATS, assert_same_bits, generator
from oracles.pairs import pairwise
from torch import Tensor

from kvloom import ops
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView
from kvloom.ops import Scores, alibi_slopes

pytestmark = pytest.mark.usefixtures("each_backend")

HEADS, NEW, STORED = 4, [3, 1, 5], [7, 6, 5]
ROWS, COLUMNS = sum(NEW), sum(STORED)


def uniform(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=generator(seed)) * 2 - 1


def holes(*shape: int, seed: int = 2) -> Tensor:
    """A mask with -inf in a third of its places."""
    return uniform(*shape, seed=seed).masked_fill(uniform(*shape, seed=seed + 1) < -0.4, -math.inf)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "scale": {"scale": 0.9},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.5},
    "not causal": {"is_causal": False},
    "mask": {"mask": uniform(ROWS, COLUMNS)},
    "wide mask": {"mask": uniform(ROWS, COLUMNS + 3)},
    "mask of heads": {"mask": uniform(HEADS, ROWS, COLUMNS + 1)},
    "mask with holes": {"mask": holes(ROWS, COLUMNS)},
    "mask of heads with holes": {"mask": holes(HEADS, ROWS, COLUMNS), "is_causal": False},
    "alibi": {"alibi_slopes": alibi_slopes(HEADS)},
    "alibi not causal": {"alibi_slopes": alibi_slopes(HEADS), "is_causal": False},
    "window 1": {"window": 1},
    "window 3": {"window": 3},
    "window larger than all": {"window": 100},
    "window not causal": {"window": 2, "is_causal": False},
    "softcap": {"softcap": 0.5},
    "softcap with mask": {"softcap": 0.5, "mask": 4 * uniform(ROWS, COLUMNS)},
    "softcap with alibi": {"softcap": 0.3, "alibi_slopes": alibi_slopes(HEADS)},
    "positional bias": {"positional_bias": waves(ROWS, HEADS, 2)},
    "positional bias not causal": {"positional_bias": waves(ROWS, HEADS, 17), "is_causal": False},
    "softcap with positional bias": {"softcap": 0.5, "positional_bias": waves(ROWS, HEADS, 1), "scale": -0.8},
    "sinks": {"sinks": 2 * uniform(HEADS)},
    "sinks with scale": {"sinks": 2 * uniform(HEADS), "scale": 0.1},
    "sinks with holes": {"sinks": uniform(HEADS), "mask": holes(ROWS, COLUMNS)},
    "sink of -inf": {"sinks": torch.tensor([-math.inf, 0.0, -math.inf, 1.0]), "mask": holes(ROWS, COLUMNS)},
    "all": {"scale": 0.6, "mask": holes(HEADS, ROWS, COLUMNS), "alibi_slopes": alibi_slopes(HEADS),
            "window": 4, "softcap": 1.5, "sinks": uniform(HEADS), "positional_bias": waves(ROWS, HEADS, 5)},
}  # fmt: skip


def assert_right(case: Case, scores: Scores) -> None:
    actual = ops.attend(case.query, case.kv, case.batch(), scores)
    assert_as_good_as_plain(actual, exact(case, scores), plain(case, scores), float32_error(case, scores))


@pytest.mark.parametrize(("name", "dtype", "decoding"), pairwise([*OPTIONS], FLOATS, [0, 2, 9]), ids=str)
def test_option_equals_the_loop(name: str, dtype: torch.dtype, decoding: int) -> None:
    case = make_case(NEW, STORED, dtype=dtype)
    case.decoding_batches = decoding
    assert_right(case, Scores(**OPTIONS[name]))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("first", [[0, 2, 4], [7, -3, 99]], ids=str)
def test_hidden_first_tokens_equal_the_loop(options: dict[str, Any], first: list[int]) -> None:
    case = make_case(NEW, STORED)
    case.first_visible = first
    assert_right(case, Scores(**options))


@given(st.data())
def test_any_options_together_equal_the_loop(data: st.DataObject) -> None:
    stored = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4), label="stored")
    new = [data.draw(st.integers(0, n), label="new") for n in stored]
    ratio, kv_heads = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (4, 1), (3, 2)]), label="heads")
    kind = data.draw(st.sampled_from([PLAIN, Kind(torch.bfloat16), INT8, INT4]), label="kind")
    dtype = data.draw(st.sampled_from(FLOATS), label="dtype")
    heads, rows, columns = ratio * kv_heads, sum(new), sum(stored)
    given_options = {
        "scale": data.draw(st.sampled_from([None, 0.3])),
        "is_causal": data.draw(st.booleans()),
        "mask": data.draw(st.sampled_from([None, uniform(rows, columns), holes(heads, rows, columns + 2)])),
        "alibi_slopes": data.draw(st.sampled_from([None, alibi_slopes(heads)])),
        "window": data.draw(st.sampled_from([None, 1, 2, 5])),
        "softcap": data.draw(st.sampled_from([None, 0.8, 30.0])),
        "sinks": data.draw(st.sampled_from([None, uniform(heads)])),
        "positional_bias": data.draw(st.sampled_from([None, waves(rows, heads, 3, kv_heads)])),
    }
    case = make_case(new, stored, kind=kind, dtype=dtype, kv_heads=kv_heads, ratio=ratio,
                     page_size=data.draw(st.integers(1, 3)), seed=data.draw(st.integers(0, 9)))  # fmt: skip
    case.decoding_batches = data.draw(st.integers(0, 4))
    if data.draw(st.booleans()):
        case.first_visible = [data.draw(st.integers(-1, n + 1)) for n in stored]
    assert_right(case, Scores(**given_options))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masks_slopes_and_sinks_may_be_of_another_float_dtype(dtype: torch.dtype) -> None:
    slopes, mask = alibi_slopes(HEADS).to(dtype), uniform(ROWS, COLUMNS).to(dtype)
    assert_right(
        make_case(NEW, STORED), Scores(mask=mask, alibi_slopes=slopes, sinks=uniform(HEADS).to(dtype))
    )


@pytest.mark.parametrize(("kv_heads", "ratio"), [(1, 1), (1, 4), (2, 3), (4, 1), (3, 2)])
@pytest.mark.parametrize("kind", [PLAIN, INT8, INT4], ids=str)
def test_query_heads_share_a_key_head_in_runs(kv_heads: int, ratio: int, kind: Kind) -> None:
    assert_right(make_case(NEW, STORED, kv_heads=kv_heads, ratio=ratio, kind=kind), Scores())


@pytest.mark.parametrize("kind", [PLAIN, Kind(torch.float16), INT8, INT4], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 16), (16, 8), (24, 4)])
def test_keys_and_values_may_differ_in_width(kind: Kind, head_dim: int, value_dim: int) -> None:
    case = make_case(NEW, STORED, axes="B H S D", kind=kind, head_dim=head_dim, value_dim=value_dim)
    assert ops.attend(case.query, case.kv, case.batch()).shape == (ROWS, HEADS, value_dim)
    assert_right(case, Scores())


def test_more_new_tokens_than_stored_ones() -> None:
    """Without a causal mask, in which they would stand before the first stored token."""
    assert_right(make_case([4, 1], [2, 3]), Scores(is_causal=False))


# --- by hand ------------------------------------------------------------------------------------------------


def counting(new: list[int], stored: list[int]) -> Case:
    """Zero queries and keys, so that scores are 0; token j has value 1 at element j: results are weights."""
    slots = [[8 * b + j for j in range(n)] for b, n in enumerate(stored)]
    value = torch.eye(8).repeat(len(stored), 1).view(1, -1, 1, 8)
    kv = KVView.split(CacheLayout("B S H D"), torch.zeros(1, 8 * len(stored), 1, 1), value)
    return Case(torch.zeros(sum(new), 1, 1), kv, new, stored, slots)


def weights(case: Case, scores: Scores) -> Tensor:
    """Weight of each key for each query, ``[rows, 8]``."""
    return ops.attend(case.query, case.kv, case.batch("tokens"), scores).squeeze(1)


def seen(case: Case, scores: Scores) -> list[list[int]]:
    """For each query, the positions of the keys that it sees."""
    return [row.nonzero().flatten().tolist() for row in weights(case, scores)]


def test_causal_is_aligned_at_the_bottom_right() -> None:
    assert seen(counting([3], [5]), Scores()) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_decoding_sequences_have_no_causal_mask() -> None:
    case = counting([2, 2], [3, 3])
    case.decoding_batches = 1
    assert seen(case, Scores()) == [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1, 2]]
    assert seen(case, Scores(alibi_slopes=torch.zeros(1))) == [[0, 1], [0, 1, 2]] * 2


def test_window_counts_the_query_itself() -> None:
    assert seen(counting([3], [5]), Scores(window=1)) == [[2], [3], [4]]
    assert seen(counting([3], [5]), Scores(window=2)) == [[1, 2], [2, 3], [3, 4]]


def test_window_holds_for_decoding_sequences() -> None:
    case = counting([2], [5])
    case.decoding_batches = 1
    assert seen(case, Scores(window=2)) == [[2, 3, 4], [3, 4]]


def test_first_visible_counts_in_each_sequence() -> None:
    case = counting([1, 2], [3, 4])
    case.first_visible = [1, 3]
    assert seen(case, Scores()) == [[1, 2], [], [3]]


def test_mask_columns_follow_the_stored_tokens() -> None:
    case = counting([1, 2], [2, 3])
    mask = torch.zeros(3, 5)
    mask[0, 1] = mask[1, 2] = mask[2, 3] = -math.inf
    assert seen(case, Scores(mask=mask)) == [[0], [1], [0, 2]]


def test_row_that_sees_nothing_is_zero() -> None:
    case = make_case([3], [5])
    mask = torch.zeros(3, 5)
    mask[1] = -math.inf
    out = ops.attend(case.query, case.kv, case.batch(), Scores(mask=mask))
    assert_same_bits(out[1], torch.zeros(HEADS, 8), "row")
    assert bool(out[0].any()) and bool(out[2].any())


def test_row_with_a_sink_only_is_zero() -> None:
    case = make_case([2], [4])
    nothing = torch.full((2, 4), -math.inf)
    out = ops.attend(case.query, case.kv, case.batch(), Scores(mask=nothing, sinks=torch.ones(4)))
    assert_same_bits(out, torch.zeros(2, HEADS, 8), "row")


def test_sequence_without_stored_tokens_gives_zero() -> None:
    case = make_case([2], [0])
    for scores in (Scores(is_causal=False), Scores(is_causal=False, sinks=torch.ones(4), softcap=2.0)):
        assert_same_bits(
            ops.attend(case.query, case.kv, case.batch(), scores), torch.zeros(2, HEADS, 8), "row"
        )


def test_sink_takes_its_share() -> None:
    """Three keys of score 0 and a sink of log 3: half of the weight has no value."""
    found = weights(counting([1], [3]), Scores(sinks=torch.tensor([math.log(3.0)])))
    torch.testing.assert_close(found[0, :4], torch.tensor([1 / 6, 1 / 6, 1 / 6, 0]))


def test_softcap_comes_before_the_mask() -> None:
    """A capped score cannot outweigh a mask of 50: only the key that the mask favours is seen."""
    case = counting([1], [2])
    case.query.fill_(1000.0)
    case.kv.key.cache[0, 0].fill_(1.0)
    found = weights(case, Scores(softcap=1.0, mask=torch.tensor([[0.0, 50.0]])))
    torch.testing.assert_close(found[0, :2], torch.tensor([0.0, 1.0]))


def test_alibi_prefers_near_keys() -> None:
    """Weights of distances -2, -1, 0 with slope log 2 are 1 : 2 : 4."""
    found = weights(counting([1], [3]), Scores(alibi_slopes=torch.tensor([math.log(2.0)])))
    torch.testing.assert_close(found[0, :3], torch.tensor([1 / 7, 2 / 7, 4 / 7]))
