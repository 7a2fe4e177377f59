"""Page tables of tensors are those of the pages, however texts grow, and cost what is new."""

from __future__ import annotations

from functools import partial

import torch
from oracles.interrupts import interrupted

from kvloom.caches import CacheFormat, Pages, PrefixCache
from kvloom.caches.prefixes.cache import PrefixSequence
from kvloom.caches.rows.page_slots import PageSlots
from kvloom.caches.rows.sequences import Sequences
from kvloom.paging import PageTable

PAGE = 4
SIZES = (50, 100, 200)


def made(num_tables: int) -> tuple[Pages, list[PageTable]]:
    pages = Pages(CacheFormat(page_size=PAGE))
    tables = [PageTable(pages.pool, PAGE) for _ in range(num_tables)]
    pages.append(tables, [1 + 5 * i for i in range(num_tables)])
    pages.add_layers([0], 1, (8, 8), torch.float32, torch.device("cpu"))
    return pages, tables


def test_slots_are_those_of_the_tables_and_what_was_returned_stays() -> None:
    pages, tables = made(2)
    before, returned = [0, 3], []
    storage = pages.storages[0]
    slots = PageSlots(pages, tables, storage, before)
    for step in range(60):
        grown = [3 * (step % 2), 2 + step % 5]
        if step == 30:
            twin = tables[1].fork()  # the next to write copies the last page
            assert twin.num_tokens % PAGE
        pages.append(tables, grown)
        now = slots.follow()
        assert torch.equal(now, pages.table(tables, storage, before))
        returned.append((now, now.clone()))
    for tensor, copy in returned:
        assert torch.equal(tensor, copy)


def test_a_page_more_costs_the_same_behind_any_number_of_pages() -> None:
    lines = []
    for num_pages in SIZES:
        sequences = Sequences(CacheFormat(page_size=PAGE))
        sequences.reserve(1, num_pages * PAGE)
        sequences.pages.add_layers([0], 1, (8, 8), torch.float32, torch.device("cpu"))
        sequences.pages.pool.grow(8)
        sequences.place(0, num_pages * PAGE, sequences.storages[0], 1)
        sequences.run()
        lines.append(interrupted(0, partial(grow, sequences)))
    assert len(set(lines)) == 1


def grow(sequences: Sequences) -> None:
    end = sequences.num_positions + 1
    sequences.reserve(1, end)
    sequences.place(0, end, sequences.storages[0], 1)
    assert sequences.run() is not None


class Read(list[int]):
    """Tokens that count how many of them were read."""

    num_read = 0

    def __getitem__(self, at: int | slice) -> int | list[int]:  # type: ignore[override]
        found = super().__getitem__(at)
        Read.num_read += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> None:  # type: ignore[override]
        raise AssertionError("all tokens are read")


def test_a_commit_costs_what_is_new_behind_any_number_of_tokens() -> None:
    lines = []
    for num_pages in SIZES:
        form = CacheFormat(page_size=PAGE, max_tokens=300 * PAGE)
        cache = PrefixCache(form, num_layers=1, heads=1, head_dim=8, dtype=torch.float32)
        sequence = cache.begin(range(num_pages * PAGE))
        write(cache, sequence, num_pages * PAGE)
        sequence.tokens = Read(sequence.tokens)
        write_and_commit = partial(write, cache, sequence, PAGE + 1)
        cache.extend(sequence, range(PAGE + 1))
        Read.num_read = 0
        lines.append(interrupted(0, write_and_commit))
        assert Read.num_read == 2 * PAGE  # the new page, and the last one before it
        cache.check()
        assert cache.begin([*range(num_pages * PAGE), *range(PAGE + 1)]).num_cached == (num_pages + 1) * PAGE
    assert max(lines) - min(lines) < 40  # pages may share an entry of the tree's table


def write(cache: PrefixCache, sequence: PrefixSequence, num_tokens: int) -> None:
    new = torch.zeros(num_tokens, 1, 8)
    cache.append(sequence, 0, new, new)
    cache.commit(sequence)
