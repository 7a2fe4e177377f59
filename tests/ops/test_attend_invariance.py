"""The result of a sequence has the same bits whatever it is batched with and wherever its tokens lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.attention import Case, make_case
from ops.cases import codes, waves
from ops.pools import ALL_AXES, INT2, INT4, INT8, PLAIN, Kind
from oracles.bits import assert_same_bits
from torch import Tensor

from kvloom import ops
from kvloom.core.entries import OF_BITS
from kvloom.ops import PositionalBias, Scores, alibi_slopes

pytestmark = pytest.mark.usefixtures("each_backend")

NEW, STORED = [3, 1, 6, 2], [7, 12, 11, 2]
KINDS = [PLAIN, Kind(torch.float16), INT8, INT4, INT2]
SOME_SCORES = {
    "default": Scores(),
    "alibi and sinks": Scores(alibi_slopes=alibi_slopes(4), sinks=torch.ones(4)),
    "window and softcap": Scores(window=3, softcap=5.0),
    "positional bias": Scores(positional_bias=waves(sum(NEW), 4, 2)),
}
some_scores = pytest.mark.parametrize("scores", SOME_SCORES.values(), ids=SOME_SCORES)


def attend(
    case: Case, scores: Scores = SOME_SCORES["default"], spelling: str = "pages", **how: object
) -> Tensor:
    return ops.attend(case.query, case.kv, case.batch(spelling, **how), scores)


def alone(case: Case, b: int) -> Case:
    """Sequence b without the others."""
    first = sum(case.new[:b])
    query = case.query[first : first + case.new[b]].clone()
    return Case(query, case.kv, [case.new[b]], [case.stored[b]], [case.slots[b]], case.page_size)


def of_sequence(scores: Scores, b: int) -> Scores:
    """The scores of sequence b."""
    bias, first = scores.positional_bias, sum(NEW[:b])
    if bias is None:
        return scores
    bias = replace(bias, coefficients=bias.coefficients[first : first + NEW[b]])
    return replace(scores, positional_bias=bias)


# --- batch --------------------------------------------------------------------------------------------------


@some_scores
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequence_alone_has_the_bits_of_the_batch(kind: Kind, dtype: torch.dtype, scores: Scores) -> None:
    case = make_case(NEW, STORED, kind=kind, dtype=dtype)
    parts = torch.cat([attend(alone(case, b), of_sequence(scores, b)) for b in range(len(NEW))])
    assert_same_bits(parts, attend(case, scores), "output")


@given(st.permutations(range(4)), st.integers(1, 4))
def test_order_and_choice_of_the_batch_do_not_matter(order: list[int], count: int) -> None:
    case = make_case(NEW, STORED)
    whole = attend(case).split(NEW)
    rows = case.query.split(NEW)
    chosen = order[:count]
    batch = Case(torch.cat([rows[b] for b in chosen]), case.kv, *zip(
        *((NEW[b], STORED[b], case.slots[b]) for b in chosen), strict=True), case.page_size)  # fmt: skip
    assert_same_bits(attend(batch), torch.cat([whole[b] for b in chosen]), "output")


def test_shared_tokens_give_each_sequence_its_own_result() -> None:
    case = make_case([2], [9])
    twice = Case(torch.cat([case.query, case.query]), case.kv, [2, 2], [9, 9], case.slots * 2, case.page_size)
    assert_same_bits(attend(twice), torch.cat([attend(case)] * 2), "output")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_damaged_sequence_leaves_the_others_alone(kind: Kind) -> None:
    case = make_case(NEW, STORED, kind=kind)
    before = attend(case).split(NEW)
    hurt = torch.full((STORED[1], 2, case.query.shape[2]), math.nan)
    ops.store(hurt, hurt, torch.tensor(case.slots[1]), case.kv)
    after = attend(case).split(NEW)
    assert bool(after[1].isnan().all())
    for b in (0, 2, 3):
        assert_same_bits(after[b], before[b], f"sequence {b}")


# --- place --------------------------------------------------------------------------------------------------


@some_scores
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_spelling_of_the_index_gives_the_same_bits(kind: Kind, scores: Scores) -> None:
    case = make_case(NEW, STORED, kind=kind, contiguous=True, page_size=4)
    expected = attend(case, scores)
    for spelling in ("offset", "pages", "blocks", "slots", "tokens"):
        for dtype, paddings in ((torch.int64, (-1, 2**63 - 1)), (torch.int32, (-1, 2**31 - 1))):
            for padding in paddings if spelling != "blocks" else paddings[:1]:
                got = attend(case, scores, spelling, dtype=dtype, padding=padding)
                assert_same_bits(got, expected, f"{spelling} {dtype}")


@some_scores
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_layout_gives_the_same_bits(kind: Kind, scores: Scores) -> None:
    expected = attend(make_case(NEW, STORED, kind=kind, block_size=6), scores)
    for axes in ALL_AXES:
        case = make_case(NEW, STORED, axes=axes, kind=kind, block_size=6)
        assert_same_bits(attend(case, scores), expected, axes)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["default", "positional bias"])
def test_every_page_and_block_size_gives_the_same_bits(name: str, kind: Kind, dtype: torch.dtype) -> None:
    scores = SOME_SCORES[name]
    expected = attend(make_case(NEW, STORED, kind=kind, dtype=dtype), scores)
    for page_size, block_size in ((1, 4), (2, 1), (3, 2), (5, 4), (16, 8), (4, 16)):
        case = make_case(NEW, STORED, kind=kind, dtype=dtype, page_size=page_size, block_size=block_size)
        assert_same_bits(attend(case, scores), expected, f"pages of {page_size} in blocks of {block_size}")


@pytest.mark.parametrize("each_backend", ["auto"], indirect=True)  # the reference reads no blocks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", OF_BITS)
@pytest.mark.parametrize("group", [8, 32, 64])
def test_every_grid_of_blocks_and_pages_of_codes_gives_the_same_bits(
    group: int, bits: int, dtype: torch.dtype
) -> None:
    """Kernels read 16 tokens at a time: in blocks and in pages of a multiple of it, and of others."""
    how = {"kind": codes(bits, group), "dtype": dtype, "head_dim": 64, "contiguous": True}
    new, stored = [2, 1], [64, 90]
    expected = attend(make_case(new, stored, page_size=1, block_size=1, **how))
    for axes in ("2 B H S D", "2 B S H D", "B H S D", "B H S/8 D S%8", "L H T 2 D"):
        for block_size in (8, 16, 24, 40, 48):
            for page_size in (8, 16, 48, 64):
                case = make_case(new, stored, axes=axes, page_size=page_size, block_size=block_size, **how)
                for spelling in ("pages", "blocks", "offset"):
                    place = f"{axes}, blocks of {block_size}, {spelling} of {page_size}"
                    assert_same_bits(attend(case, spelling=spelling), expected, place)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("spelling", ["pages", "tokens"])
def test_unread_slots_never_show(kind: Kind, spelling: str) -> None:
    expected = attend(make_case(NEW, STORED, kind=kind, poison=0.0), spelling=spelling)
    assert bool(expected.isfinite().all())
    for poison in (math.nan, math.inf, 1e4):
        case = make_case(NEW, STORED, kind=kind, poison=poison)
        assert_same_bits(attend(case, spelling=spelling), expected, f"poison {poison}")


def test_unread_columns_of_the_mask_never_show() -> None:
    case = make_case([2, 1], [3, 4])
    mask = torch.zeros(3, 9)
    expected = attend(case, Scores(mask=mask))
    mask[:2, 3:] = mask[2:, :3] = mask[2:, 7:] = math.nan
    assert_same_bits(attend(case, Scores(mask=mask)), expected, "output")


def test_strides_of_the_query_do_not_matter() -> None:
    case = make_case(NEW, STORED)
    expected = attend(case)
    case.query = case.query.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert_same_bits(attend(case), expected, "output")


def test_inputs_are_left_alone() -> None:
    case = make_case(NEW, STORED, kind=INT8)
    batch, ones = case.batch(), torch.ones(4)
    scores = Scores(mask=torch.ones(12, 32), sinks=ones, alibi_slopes=ones.clone())
    tensors = [case.query, *case.kv.tensors]
    tensors += [batch.index.table, batch.seqstarts, batch.kvstarts]
    tensors += [scores.mask, scores.sinks, scores.alibi_slopes]
    before = [x.clone() for x in tensors]
    ops.attend(case.query, case.kv, batch, scores)
    for x, old in zip(tensors, before, strict=True):
        assert_same_bits(x, old, "argument")


# --- threads ------------------------------------------------------------------------------------------------


@pytest.fixture
def any_threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("kind", [PLAIN, Kind(torch.bfloat16), INT8], ids=str)
@pytest.mark.parametrize("bias", [None, waves(39, 8, 5, kv_heads=4)], ids=["", "positional bias"])
def test_number_of_threads_does_not_matter(bias: PositionalBias | None, kind: Kind) -> None:
    scores = Scores(positional_bias=bias)
    case = make_case(
        [33, 1, 5], [140, 257, 64], kind=kind, kv_heads=4, head_dim=64, page_size=16, block_size=16
    )
    expected = attend(case, scores)
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        for _ in range(5):
            assert_same_bits(attend(case, scores), expected, f"{threads} threads")
