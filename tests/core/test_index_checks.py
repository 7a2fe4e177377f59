"""Slots outside the cache are refused, exactly those, and padding is never looked at."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.core.indexing import CacheIndex, check_distinct, check_index, check_slots, expect_slots
from kvloom.errors import ArgumentError, ShapeError

NUM_SLOTS = 12
LARGEST = 2**63 - 1
dtypes = st.sampled_from([torch.int64, torch.int32])
counts_of = st.lists(st.integers(0, 7), min_size=1, max_size=4)
# Mostly inside the cache, sometimes just outside or far away.
entries = st.one_of(
    st.integers(0, NUM_SLOTS - 1), st.integers(-2, NUM_SLOTS + 1), st.sampled_from([-(2**31), 2**31 - 1])
)


def refused(index: CacheIndex, lengths: torch.Tensor) -> bool:
    """Whether ``check_index`` refuses; it must name the argument then."""
    try:
        check_index("table", index, lengths, NUM_SLOTS)
    except ArgumentError as error:
        assert str(error).startswith("table must "), error
        return True
    return False


def inside(slots: list[int]) -> bool:
    return all(0 <= slot < NUM_SLOTS for slot in slots)


def test_int32_slots_of_a_pool_beyond_int32() -> None:
    """torch compares an int32 tensor with 2**31 as if it were -2**31."""
    slots = torch.tensor([5, 0, -3], dtype=torch.int32)
    for num_slots in (2**31, 2**31 + 4, 2**32, 2**33 + 1):
        check_slots("slots", slots, num_slots, skip_negative=True)
        with pytest.raises(ArgumentError, match="got -3 for token 2"):
            check_slots("slots", slots, num_slots)


# --- check_index --------------------------------------------------------------------------------------------


@given(counts_of, st.integers(1, 4), st.data(), dtypes, dtypes)
def test_page_table_is_refused_exactly_when_a_token_is_outside(
    counts: list[int], size: int, data: st.DataObject, table_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    width = data.draw(st.integers(0, 8))
    table = [[data.draw(entries) for _ in range(width)] for _ in counts]
    index = CacheIndex.pages(torch.tensor(table, dtype=table_dtype).view(len(counts), width), size)
    fits = all(-(-n // size) <= width for n in counts)
    wrong = not fits or not inside(
        [table[b][t // size] + t % size for b, n in enumerate(counts) for t in range(n)]
    )
    assert refused(index, torch.tensor(counts, dtype=dtype)) == wrong


@given(counts_of, st.data())
def test_offset_table_is_refused_exactly_when_a_token_is_outside(
    counts: list[int], data: st.DataObject
) -> None:
    starts = [data.draw(entries) for _ in counts]
    wrong = not inside([starts[b] + t for b, n in enumerate(counts) for t in range(n)])
    assert refused(CacheIndex.offset(torch.tensor(starts)), torch.tensor(counts)) == wrong


@given(counts_of, st.data(), dtypes)
def test_offset_table_takes_int32_lengths(counts: list[int], data: st.DataObject, dtype: torch.dtype) -> None:
    starts = [data.draw(entries) for _ in counts]
    wrong = not inside([starts[b] + t for b, n in enumerate(counts) for t in range(n)])
    index = CacheIndex.offset(torch.tensor(starts, dtype=dtype))
    assert refused(index, torch.tensor(counts, dtype=torch.int32)) == wrong


@given(counts_of, st.data(), dtypes)
def test_token_table_is_refused_exactly_when_a_token_is_outside(
    counts: list[int], data: st.DataObject, dtype: torch.dtype
) -> None:
    table = [data.draw(entries) for _ in range(data.draw(st.integers(0, 20)))]
    starts = [data.draw(st.integers(0, 15)) for _ in range(len(counts) + 1)]
    index = CacheIndex.tokens(torch.tensor(table, dtype=dtype), torch.tensor(starts))
    fits = all(n == 0 or starts[b] + n <= len(table) for b, n in enumerate(counts))
    wrong = not fits or not inside([table[starts[b] + t] for b, n in enumerate(counts) for t in range(n)])
    assert refused(index, torch.tensor(counts)) == wrong


def test_token_table_rows_must_not_begin_before_it() -> None:
    index = CacheIndex.tokens(torch.arange(6), torch.tensor([-2, 0]))
    assert refused(index, torch.tensor([2]))


@pytest.mark.parametrize("padding", [-1, -LARGEST - 1, LARGEST, NUM_SLOTS])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4])
def test_padding_of_a_page_table_is_not_looked_at(padding: int, tokens: int) -> None:
    row = [8, 2, padding, padding] if tokens > 2 else [8, *[padding] * 3] if tokens else [padding] * 4
    assert not refused(CacheIndex.pages(torch.tensor([row]), 2), torch.tensor([tokens]))


def test_of_a_wide_page_table_only_what_is_used_is_checked() -> None:
    """Two rows of one page each, as often as no memory holds it."""
    table = torch.zeros(2, 1, dtype=torch.int64).expand(2, 1 << 48)
    assert not refused(CacheIndex.pages(table, 4), torch.tensor([9, 0]))
    assert refused(CacheIndex.pages(table, 13), torch.tensor([9, 13]))


@pytest.mark.parametrize("padding", [-1, LARGEST])
def test_start_of_an_empty_sequence_is_not_looked_at(padding: int) -> None:
    assert not refused(CacheIndex.offset(torch.tensor([padding, 3])), torch.tensor([0, 9]))


@pytest.mark.parametrize("padding", [-1, LARGEST])
def test_padding_of_a_token_table_is_not_looked_at(padding: int) -> None:
    index = CacheIndex.tokens(torch.tensor([padding, 3, 11, padding]), torch.tensor([1, 3]))
    assert not refused(index, torch.tensor([2]))


@pytest.mark.parametrize("first", [LARGEST, LARGEST - 3, -LARGEST - 1, -1])
def test_extreme_first_slot_does_not_wrap_around(first: int) -> None:
    assert refused(CacheIndex.pages(torch.tensor([[first]]), 4), torch.tensor([4]))


@pytest.mark.parametrize("block", [2**62, -(2**62), 2**63 - 1, 2**61 + 1, NUM_SLOTS // 4, -1])
def test_extreme_block_number_does_not_wrap_around(block: int) -> None:
    assert refused(CacheIndex.blocks(torch.tensor([[0, block]]), 4), torch.tensor([8]))


@pytest.mark.parametrize(
    ("first", "tokens", "wrong"), [(8, 4, False), (9, 4, True), (9, 3, False), (11, 1, False)]
)
def test_last_page_is_judged_by_the_tokens_it_holds(first: int, tokens: int, wrong: bool) -> None:
    assert refused(CacheIndex.pages(torch.tensor([[first]]), 4), torch.tensor([tokens])) == wrong


def test_short_row_is_reported_with_its_sequence() -> None:
    index = CacheIndex.pages(torch.zeros(3, 2, dtype=torch.int64), 4)
    with pytest.raises(
        ArgumentError, match=r"table must have 3 pages of 4 for the 9 tokens of sequence 1, got 2"
    ):
        check_index("table", index, torch.tensor([8, 9, 0]), NUM_SLOTS)


def test_outside_page_is_reported_with_its_sequence() -> None:
    index = CacheIndex.pages(torch.tensor([[0, 4], [8, 11]]), 4)
    with pytest.raises(ArgumentError, match=r"got first slot 11 for the 2 tokens of page 1 of sequence 1"):
        check_index("table", index, torch.tensor([8, 6]), NUM_SLOTS)


# --- check_slots --------------------------------------------------------------------------------------------


@given(st.lists(entries, max_size=6), st.booleans(), dtypes)
def test_slots_are_refused_exactly_when_outside(slots: list[int], skip: bool, dtype: torch.dtype) -> None:
    wrong = [i for i, slot in enumerate(slots) if slot >= NUM_SLOTS or (slot < 0 and not skip)]
    given_slots = torch.tensor(slots, dtype=dtype)
    if not wrong:
        assert check_slots("slots", given_slots, NUM_SLOTS, skip_negative=skip) is None
        return
    with pytest.raises(ArgumentError, match=rf"^slots must .*got {slots[wrong[0]]} for token {wrong[0]}$"):
        check_slots("slots", given_slots, NUM_SLOTS, skip_negative=skip)


@pytest.mark.parametrize("slot", [LARGEST, -LARGEST - 1, NUM_SLOTS, -1])
def test_extreme_slots_are_refused(slot: int) -> None:
    with pytest.raises(ArgumentError, match="slots must be in"):
        check_slots("slots", torch.tensor([0, slot]), NUM_SLOTS)


def test_most_negative_slot_is_skipped_where_negative_ones_are() -> None:
    assert check_slots("slots", torch.tensor([-LARGEST - 1, 0]), NUM_SLOTS, skip_negative=True) is None


# --- check_distinct -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(-3, 8), max_size=8))
def test_slots_are_refused_exactly_when_one_occurs_twice(slots: list[int]) -> None:
    kept = [slot for slot in slots if slot >= 0]
    twice = sorted({slot for slot in kept if kept.count(slot) > 1})
    if not twice:
        assert check_distinct("slots", torch.tensor(slots, dtype=torch.int64)) is None
        return
    with pytest.raises(ArgumentError, match=rf"slots must be distinct, got slot {twice[0]} more"):
        check_distinct("slots", torch.tensor(slots))


# --- expect_slots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), r"slots must be \[T\]"),
        (torch.zeros((), dtype=torch.int64), r"slots must be \[T\]"),
        (torch.zeros(3), "slots must be torch.int64 or torch.int32, got torch.float32"),
        (torch.zeros(3, dtype=torch.int16), "slots must be torch.int64 or"),
        (torch.zeros(3, dtype=torch.bool), "slots must be torch.int64 or"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), "slots must be on cpu, got meta"),
        (torch.zeros(4, dtype=torch.int64), r"slots must be \[3\], one slot for each token, got \[4\]"),
        ([0, 1, 2], "slots must be a tensor, got list"),
    ],
    ids=["2-D", "0-D", "float", "int16", "bool", "device", "length", "list"],
)
def test_slots_that_do_not_fit_are_refused_by_name(slots: torch.Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        expect_slots("slots", slots, 3, torch.device("cpu"))
