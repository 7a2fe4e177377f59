"""Five spellings of where a token lives give the slots of plain Python arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvloom.core.indexing import ENDLESS, CacheIndex, ragged_positions
from kvloom.errors import ArgumentError, ShapeError

PADDING = (-1, 2**63 - 1)
INDEX_DTYPES = (torch.int64, torch.int32)
dtypes = st.sampled_from(INDEX_DTYPES)
lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def all_tokens(counts: list[int]) -> list[tuple[int, int]]:
    """(sequence, position) of every token."""
    return [(b, t) for b, n in enumerate(counts) for t in range(n)]


def slots_of(index: CacheIndex, counts: list[int]) -> list[int]:
    """Slots of every token, from the index."""
    tokens = torch.tensor(all_tokens(counts), dtype=torch.int64).view(-1, 2)
    slots = index.slots(tokens[:, 0], tokens[:, 1])
    assert slots.dtype == torch.int64
    return slots.tolist()


def padded(rows: list[list[int]], dtype: torch.dtype, more: int = 0) -> Tensor:
    """Rows of pages as a table, short rows filled with the largest or a negative integer."""
    width = max(map(len, rows)) + more
    filler = [p if dtype == torch.int64 else max(-1, min(p, 2**31 - 1)) for p in PADDING]
    return torch.tensor(
        [[*row, *(filler[i % 2] for i in range(width - len(row)))] for row in rows], dtype=dtype
    )


@given(lengths, st.data(), dtypes)
def test_offset_mode_counts_from_the_start(
    counts: list[int], data: st.DataObject, dtype: torch.dtype
) -> None:
    starts = [data.draw(st.integers(0, 2**31 - 20)) for _ in counts]
    index = CacheIndex.offset(torch.tensor(starts, dtype=dtype))
    assert slots_of(index, counts) == [starts[b] + t for b, t in all_tokens(counts)]


@given(lengths, st.integers(1, 5), st.data(), dtypes)
def test_page_table_holds_first_slots(
    counts: list[int], size: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    rows = [[data.draw(st.integers(0, 2**31 - 6)) for _ in range(0, n, size)] for n in counts]
    index = CacheIndex.pages(padded(rows, dtype, data.draw(st.integers(0, 2))), size)
    assert slots_of(index, counts) == [rows[b][t // size] + t % size for b, t in all_tokens(counts)]


@given(lengths, st.integers(1, 5), st.data(), dtypes)
def test_block_table_holds_block_numbers(
    counts: list[int], size: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    rows = [[data.draw(st.integers(0, 2**31 - 1)) for _ in range(0, n, size)] for n in counts]
    index = CacheIndex.blocks(padded(rows, dtype), size)
    assert slots_of(index, counts) == [rows[b][t // size] * size + t % size for b, t in all_tokens(counts)]


@given(lengths, st.data(), dtypes)
def test_token_table_holds_a_slot_for_each_token(
    counts: list[int], data: st.DataObject, dtype: torch.dtype
) -> None:
    table = [data.draw(st.integers(0, 2**31 - 1)) for _ in range(sum(counts))]
    starts = [sum(counts[:b]) for b in range(len(counts) + 1)]
    index = CacheIndex.tokens(torch.tensor(table, dtype=dtype), torch.tensor(starts, dtype=dtype))
    assert slots_of(index, counts) == [table[starts[b] + t] for b, t in all_tokens(counts)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 5))
def test_one_placement_has_the_same_slots_in_every_spelling(blocks: list[int], size: int) -> None:
    tokens = len(blocks) * size
    slots = [b * size + s for b in blocks for s in range(size)]
    spellings = [
        CacheIndex.pages(torch.tensor([[b * size for b in blocks]]), size),
        CacheIndex.pages(torch.tensor([slots]), 1),
        CacheIndex.blocks(torch.tensor([blocks]), size),
        CacheIndex.tokens(torch.tensor(slots), torch.tensor([0, tokens])),
    ]
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        spellings.append(CacheIndex.offset(torch.tensor([blocks[0] * size])))
    assert [slots_of(index, [tokens]) for index in spellings] == [slots] * len(spellings)


def test_offset_mode_is_one_page_without_end() -> None:
    index = CacheIndex.offset(torch.tensor([7]))
    assert index.page_size == ENDLESS
    assert index.slots(torch.tensor([0]), torch.tensor([2**40])).tolist() == [2**40 + 7]


def test_int32_block_numbers_do_not_overflow() -> None:
    index = CacheIndex.blocks(torch.tensor([[2**31 - 1]], dtype=torch.int32), 1024)
    assert index.slots(torch.tensor([0]), torch.tensor([1023])).tolist() == [2**41 - 1]


def test_int32_first_slots_do_not_overflow() -> None:
    index = CacheIndex.pages(torch.tensor([[2**31 - 1]], dtype=torch.int32), 16)
    assert index.slots(torch.tensor([0]), torch.tensor([15])).tolist() == [2**31 + 14]


# --- refused ------------------------------------------------------------------------------------------------


FLAT, TABLE = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
STARTS = torch.tensor([0, 2])
# How each spelling is made of a table, a good table, one of another rank, and what errors call it.
SPELLINGS = {
    "offset": (CacheIndex.offset, FLAT, TABLE, "starts"),
    "pages": (lambda x, **name: CacheIndex.pages(x, 4, **name), TABLE, FLAT, "table"),
    "blocks": (lambda x: CacheIndex.blocks(x, 4), TABLE, FLAT, "table"),
    "tokens": (lambda x, **name: CacheIndex.tokens(x, STARTS, **name), FLAT, TABLE, "table"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tables_must_be_int64_or_int32(spelling: str, dtype: torch.dtype) -> None:
    make, table, _, name = SPELLINGS[spelling]
    with pytest.raises(ShapeError, match=f"^{name} must be torch.int64 or torch.int32, got {dtype}"):
        make(table.to(dtype))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tables_must_have_their_rank(spelling: str) -> None:
    make, table, other, name = SPELLINGS[spelling]
    for wrong in (other, table[0], table[None]):
        with pytest.raises(ShapeError, match=rf"^{name} must be \[[BPN, ]+\], got"):
            make(wrong)
    with pytest.raises(ShapeError, match=f"^{name} must be a tensor, got list"):
        make([0, 1])


@pytest.mark.parametrize("spelling", ["offset", "pages", "tokens"])
def test_tables_have_the_name_that_a_caller_gives_them(spelling: str) -> None:
    make, _, other, _ = SPELLINGS[spelling]
    with pytest.raises(ShapeError, match=r"^places must be"):
        make(other, name="places")


@pytest.mark.parametrize(
    ("row_starts", "message"),
    [
        (torch.tensor([0, 2], device="meta"), "row_starts must be on cpu, got meta"),
        (TABLE, r"row_starts must be \[B\+1\], got"),
        (FLAT.float(), "row_starts must be torch.int64 or torch.int32, got torch.float32"),
    ],
)
def test_row_starts_must_fit_the_table(row_starts: torch.Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=f"^{message}"):
        CacheIndex.tokens(torch.arange(2), row_starts)


@pytest.mark.parametrize(
    ("make", "name"), [(CacheIndex.pages, "page_size"), (CacheIndex.blocks, "block_size")]
)
def test_page_size_must_be_a_positive_int(make: Callable[..., CacheIndex], name: str) -> None:
    for size in (0, -1, True, 1.0, None, "4"):
        with pytest.raises(ArgumentError, match=f"^{name} must be at least 1, got {size!r}"):
            make(TABLE, size)
    with pytest.raises(ArgumentError, match=f"^{name} must be below {2**63}, got"):
        make(TABLE, 2**63)


# --- packed tokens ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=6), st.data(), dtypes, st.booleans())
def test_ragged_positions_are_those_of_nested_loops(
    counts: list[int], data: st.DataObject, dtype: torch.dtype, known: bool
) -> None:
    first = [data.draw(st.integers(0, 100)) for _ in counts]
    starts = torch.tensor([sum(counts[:b]) for b in range(len(counts) + 1)], dtype=dtype)
    total = sum(counts) if known else None
    sequence, position = ragged_positions(starts, torch.tensor(first, dtype=dtype), total=total)
    assert sequence.dtype == position.dtype == torch.int64
    tokens = all_tokens(counts)
    assert list(zip(sequence.tolist(), position.tolist(), strict=True)) == [
        (b, first[b] + t) for b, t in tokens
    ]


@pytest.mark.parametrize("counts", [[0], [0, 0], [2, 0, 0, 3], [0, 1], [1, 0], []], ids=str)
def test_empty_sequences_have_no_packed_tokens(counts: list[int]) -> None:
    starts = torch.tensor([sum(counts[:b]) for b in range(len(counts) + 1)])
    sequence, position = ragged_positions(starts)
    assert list(zip(sequence.tolist(), position.tolist(), strict=True)) == all_tokens(counts)


def test_ragged_positions_of_a_strided_tensor() -> None:
    starts = torch.tensor([0, 9, 2, 9, 5])[::2]
    sequence, position = ragged_positions(starts)
    assert (sequence.tolist(), position.tolist()) == ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2])
