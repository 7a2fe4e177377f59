"""Triton's attention over what its kernels treat differently: against float64, and against what is hidden."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ops import kernels
from ops.attention import Case, float32_error, make_case, plain
from ops.cases import codes, golden, options
from ops.kernels import attend, there
from ops.pools import PLAIN, Kind
from oracles.attention import assert_as_good_as_plain
from oracles.bits import FLOATS, assert_same_bits
from oracles.pairs import pairwise
from torch import Tensor

from kvloom import ops
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError, ShapeError, UnsupportedError
from kvloom.ops import Scores

pytestmark = kernels.pytestmark

BF16 = Kind(torch.bfloat16)
PAGES = {"page_size": 16, "block_size": 16}


def assert_right(case: Case, scores: Scores | None = None, spelling: str = "pages") -> Tensor:
    scores = scores or Scores()
    out = attend(case, scores, spelling)
    assert bool(out.isfinite().all())
    assert_as_good_as_plain(out, golden(case, scores), plain(case, scores), float32_error(case, scores))
    return out


# --- numbers ------------------------------------------------------------------------------------------------

WIDTHS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (24, 24), (8, 40)]


@pytest.mark.parametrize(
    ("width", "kind", "dtype"),
    pairwise(WIDTHS, [PLAIN, BF16, codes(8, 8), codes(4, 8), codes(2, 8)], FLOATS),
    ids=str,
)
def test_head_dims(width: tuple[int, int], kind: Kind, dtype: torch.dtype) -> None:
    """One sequence of few new tokens, and one of many."""
    widths = {"head_dim": width[0], "value_dim": width[1], "kv_heads": 1}
    assert_right(make_case([2, 17], [70, 40], axes="B S H D", kind=kind, dtype=dtype, **widths, **PAGES))


GROUPS = [(8, 16), (8, 64), (4, 2), (4, 32), (4, 64), (4, 128), (2, 4), (2, 64), (2, 128)]


@pytest.mark.parametrize(("group", "dtype", "scale_dtype"), pairwise(GROUPS, FLOATS, FLOATS), ids=str)
def test_groups(group: tuple[int, int], dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Bits of codes, and how many share a scale."""
    kind = codes(*group, scale_dtype)
    assert_right(make_case([2, 18], [66, 30], kind=kind, dtype=dtype, head_dim=128, kv_heads=1, **PAGES))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kinds", [(codes(8, 64), codes(4, 32)), (codes(4, 64), codes(8, 16)),
                                   (codes(8, 64), BF16), (Kind(torch.float16), codes(4, 64)),
                                   (codes(4, 64), codes(2, 64)), (PLAIN, BF16)], ids=str)  # fmt: skip
def test_keys_and_values_of_different_kinds(kinds: tuple[Kind, Kind], dtype: torch.dtype) -> None:
    key, value = (make_case([3, 1], [70, 131], axes="B S H D", kind=kind, dtype=dtype, head_dim=64, **PAGES)
                  for kind in kinds)  # fmt: skip
    key.kv = KVView(key.kv.key, value.kv.value)
    assert_right(key)


@pytest.mark.parametrize("kind", [BF16, codes(8, 64)], ids=str)
@pytest.mark.parametrize(("kv_heads", "ratio"), [(1, 1), (1, 8), (1, 71), (2, 4), (3, 5), (8, 1)])
def test_query_heads_for_each_key_head(kv_heads: int, ratio: int, kind: Kind) -> None:
    assert_right(make_case([1, 17], [70, 40], kind=kind, dtype=torch.bfloat16, kv_heads=kv_heads, ratio=ratio,
                           head_dim=64, **PAGES))  # fmt: skip


@pytest.mark.parametrize("kind", [PLAIN, BF16, codes(4, 32)], ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 255, 256, 257, 520])
def test_lengths(length: int, kind: Kind) -> None:
    """Tiles are of 64 tokens or fewer, and runs of 256 at least: one less, exactly as many, one more."""
    dtype = torch.float32 if kind is PLAIN else torch.bfloat16
    case = make_case([1, min(length, 3), min(length, 33)], [length] * 3, kind=kind, dtype=dtype, head_dim=32,
                     kv_heads=1, **PAGES)  # fmt: skip
    assert_right(case)


def test_more_runs_than_splits_make_longer_runs() -> None:
    case = make_case([1], [64 * 256 + 70], kind=BF16, dtype=torch.bfloat16, kv_heads=1, head_dim=16, **PAGES)
    assert_right(case)


@pytest.mark.parametrize("new", [[0, 1, 0], [16, 17, 0], [0, 0], [40]])
def test_few_and_many_new_tokens_and_none(new: list[int]) -> None:
    assert_right(make_case(new, [n + 30 for n in new], head_dim=16, **PAGES))


OPTIONS = options(4, 26, 481)


@pytest.mark.parametrize(
    ("kind", "first_visible", "option"),
    pairwise([PLAIN, codes(8, 32)], [None, [3, 300, 41]], [*OPTIONS]),
    ids=str,
)
def test_scores(kind: Kind, first_visible: list[int] | None, option: str) -> None:
    dtype = torch.float32 if kind is PLAIN else torch.bfloat16
    case = make_case(
        [1, 5, 20], [70, 340, 71], kind=kind, dtype=dtype, head_dim=32, page_size=8, block_size=16
    )
    case.decoding_batches, case.first_visible = 1, first_visible
    assert_right(case, OPTIONS[option])


def test_decoding_batches_hide_no_later_token() -> None:
    case = make_case([3, 18, 2, 20], [30, 40, 20, 25], head_dim=16)
    case.decoding_batches = 2
    assert_right(case)


@pytest.mark.parametrize("stored", [100, 110, 119])
@pytest.mark.parametrize("new", [16, 17], ids=["few", "many"])
def test_windows_begin_before_and_behind_a_tile_for_different_rows(new: int, stored: int) -> None:
    assert_right(make_case([new], [stored], head_dim=16, **PAGES), Scores(window=40))


def test_more_new_tokens_than_stored_ones() -> None:
    case = make_case([5, 20], [3, 7], head_dim=16)
    assert_right(case, Scores(is_causal=False, sinks=torch.ones(4)))
    with pytest.raises(
        ArgumentError, match=r"^kvstarts must give sequence 0 at least its 5 new tokens, got 3$"
    ):
        attend(case)


# --- hidden -------------------------------------------------------------------------------------------------


def broken_case(position: int, bad: float, new: int, kind: Kind = PLAIN) -> Case:
    """A sequence of 90 tokens; element 5 of head 1 of the value at ``position`` is ``bad``."""
    case = make_case([new], [90], kind=kind, head_dim=16, **PAGES)
    case.keys_and_values()
    value = torch.zeros(1, 2, 16)
    value[0, 1, 5] = bad
    slot = torch.tensor([case.slots[0][position]])
    key = ops.load(slot, case.kv, dtype=torch.float32)[0]
    ops.store(key, value, slot, case.kv)
    return case


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("new", [9, 40], ids=["few", "many"])
@pytest.mark.parametrize(
    ("scores", "position", "sees"),
    [
        (Scores(), 86, range(86, 90)),
        (Scores(window=2), 84, range(84, 86)),
        (Scores(is_causal=False, window=3), 85, range(88)),
        (Scores(alibi_slopes=torch.ones(4)), 89, range(89, 90)),
    ],
    ids=["causal", "window", "window only", "alibi"],
)
def test_only_rows_that_see_a_broken_value_are_nan(
    scores: Scores, position: int, sees: range, new: int, bad: float
) -> None:
    whole = attend(broken_case(position, 0.0, new), scores)
    out = attend(broken_case(position, bad, new), scores)
    expected = torch.zeros(new, 4, 16, dtype=torch.bool)
    expected[[x - (90 - new) for x in sees if x >= 90 - new], 2:, 5] = True  # the query heads of head 1
    assert torch.equal(out.isnan(), expected)
    torch.testing.assert_close(out[~expected], whole[~expected])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [codes(8, 16), codes(4, 8)], ids=str)
def test_broken_groups_show_where_they_are_seen(kind: Kind, dtype: torch.dtype) -> None:
    case = broken_case(86, math.nan, 9, kind)
    case.query = case.query.to(dtype)
    out = attend(case).isnan()
    group = slice(0, 16) if kind.group == 16 else slice(0, 8)
    expected = torch.zeros(9, 4, 16, dtype=torch.bool)
    expected[5:, 2:, group] = True
    assert torch.equal(out, expected)


def test_weights_that_vanish_beside_others_hide_what_is_broken() -> None:
    """In a tile, and in a run, that comes before the one with all the weight."""
    for stored in (90, 600):
        case = make_case([1], [stored], head_dim=16, kv_heads=1, **PAGES)
        key = torch.zeros(stored, 1, 16)
        key[-1] = 400.0
        value = torch.zeros(stored, 1, 16)
        value[3] = math.nan
        value[-1] = 2.0
        ops.store(key, value, torch.tensor(case.slots[0]), case.kv)
        case.query = torch.ones(1, 2, 16)
        assert bool((attend(case) == 2.0).all()), stored


@pytest.mark.parametrize("side", ["query", "key", "sinks", "mask"])
@pytest.mark.parametrize("new", [2, 20])
def test_nan_scores_make_nan_rows(side: str, new: int) -> None:
    case = make_case([new], [40], head_dim=16, **PAGES)
    sinks, mask = torch.zeros(4), torch.zeros(new, 40)
    if side == "query":
        case.query[-1, 3, 2] = math.nan
    elif side == "key":
        bad = torch.full((1, 2, 16), math.nan)
        ops.store(bad, torch.ones(1, 2, 16), torch.tensor(case.slots[0][-1:]), case.kv)
    elif side == "sinks":
        sinks[3] = math.nan
    else:
        mask[-1, 7] = math.nan
    scores = Scores(sinks=sinks, mask=mask)
    got = attend(case, scores)
    want = ops.attend(case.query, case.kv, case.batch(), scores, backend="reference")
    assert bool(want.isnan().any())
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("new", [2, 20])
def test_rows_that_see_nothing_are_zero(new: int) -> None:
    case = make_case([new], [40], head_dim=16, **PAGES)
    hidden = Scores(mask=torch.full((new, 40), -math.inf))
    assert not attend(case, hidden).any()
    assert not attend(case, replace(hidden, sinks=torch.ones(4))).any()
    case.first_visible = [40]
    assert not attend(case).any()


def test_sequence_without_stored_tokens_gives_zero() -> None:
    assert not attend(make_case([2, 20], [0, 0], head_dim=16), Scores(is_causal=False)).any()


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["key", "value"])
def test_head_dims_beyond_the_limit_are_refused(side: str) -> None:
    widths = {"head_dim": 8, "value_dim": 8, f"{'head' if side == 'key' else 'value'}_dim": 264}
    case = make_case([2, 1], [7, 5], axes="B S H D", **widths)
    with pytest.raises(
        UnsupportedError, match="'triton' attends over head dims up to 256, got 264; use 'auto'"
    ):
        attend(case)


@pytest.mark.skipif(kernels.DEVICE != "cpu", reason="values are not read on a device")
def test_lengths_and_tables_are_refused_as_by_the_reference() -> None:
    case = make_case([2, 1], [7, 5])
    batch = case.batch()
    wrong = [
        (replace(batch, seqstarts=torch.tensor([0, 2, 4])), Scores(), ArgumentError),
        (replace(batch, seqstarts=torch.tensor([1, 2, 3])), Scores(), ArgumentError),
        (replace(batch, kvstarts=torch.tensor([0, 7, 6])), Scores(), ArgumentError),
        (replace(batch, kvstarts=torch.tensor([0, 7, 99])), Scores(), ArgumentError),
        (replace(batch, index=replace(batch.index, table=batch.index.table + 99)), Scores(), ArgumentError),
        (batch, Scores(mask=torch.zeros(3, 11)), ShapeError),
    ]
    for bad, scores, error in wrong:
        messages = []
        for backend in ("triton", "reference"):
            with pytest.raises(error) as raised:
                ops.attend(case.query, case.kv, bad, scores, backend=backend)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


def test_there_is_no_gradient() -> None:
    case = make_case([2, 1], [7, 5])
    with there(case.query, case.kv, case.batch()) as (query, kv, batch):
        query.requires_grad_()
        with pytest.raises(UnsupportedError, match="no gradient"):
            ops.attend(query, kv, batch, backend="triton").sum().backward()


def test_inputs_are_left_alone() -> None:
    case = make_case([2, 20], [30, 40], kind=codes(8, 8))
    tensors = [case.query, *case.kv.tensors]
    before = [x.clone() for x in tensors]
    attend(case)
    for x, old in zip(tensors, before, strict=True):
        assert_same_bits(x, old, "argument")
