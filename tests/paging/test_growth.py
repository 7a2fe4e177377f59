"""A batch grows in all tables or in none, and only copies pages that two tables would write."""

from __future__ import annotations

import tracemalloc

import pytest
from paging.world import append, append_all

from kvloom.errors import ArgumentError, OutOfPages, StateError
from kvloom.paging import Copy, Growth, PagePool, PageTable, PrefixTree, check


def forks(num_tables: int, num_tokens: int, num_pages: int = 8) -> tuple[PagePool, list[PageTable]]:
    """Tables with pages of 4 tokens, all of them shared."""
    pool = PagePool(num_pages)
    table = PageTable(pool, 4)
    append(table, num_tokens)
    return pool, [table, *(table.fork() for _ in range(num_tables - 1))]


def rows(tables: list[PageTable]) -> list[tuple[int, list[int]]]:
    return [(table.num_tokens, [ref.id for ref in table.pages]) for table in tables]


def test_empty_batch_needs_nothing() -> None:
    assert append_all([], []) == []


def test_each_table_grows_by_its_own_number() -> None:
    pool = PagePool(8)
    tables = [PageTable(pool, 4) for _ in range(3)]
    assert append_all(tables, [5, 0, 4]) == []
    assert rows(tables) == [(5, [0, 1]), (0, []), (4, [2])]


def test_last_of_the_forks_writes_in_place() -> None:
    pool, tables = forks(3, 6)
    assert append_all(tables, [1, 1, 1]) == [Copy(1, 2), Copy(1, 3)]
    assert rows(tables) == [(7, [0, 2]), (7, [0, 3]), (7, [0, 1])]
    assert all(pool.is_writable(table.pages[1]) for table in tables)


def test_tables_are_as_they_were_when_copies_cannot_be_run() -> None:
    """Pages go back in the order in which they would be handed out again."""
    pool, tables = forks(3, 6)
    tree, before = PrefixTree(pool, 4), rows(tables)
    for _ in range(2):
        growth = Growth(tables, [1, 1, 7])
        assert growth.num_pages == 4
        with pytest.raises(MemoryError), growth.made() as copies:
            assert copies == [Copy(1, 4), Copy(1, 5)]
            assert rows(tables) == before
            raise MemoryError
        assert rows(tables) == before
        assert pool.num_free == 6
        check(pool, tree, tables)
    assert append_all(tables, [1, 1, 7]) == [Copy(1, 4), Copy(1, 5)]
    assert rows(tables) == [(7, [0, 4]), (7, [0, 5]), (13, [0, 1, 2, 3])]
    check(pool, tree, tables)


def test_every_fork_copies_a_page_with_another_holder() -> None:
    _, tables = forks(3, 6)
    assert append_all(tables[:2], [1, 1]) == [Copy(1, 2), Copy(1, 3)]
    assert rows(tables)[2] == (6, [0, 1])


def test_every_fork_copies_a_page_that_one_of_them_only_reads() -> None:
    _, tables = forks(3, 6)
    assert append_all(tables, [1, 0, 1]) == [Copy(1, 2), Copy(1, 3)]
    assert rows(tables)[1] == (6, [0, 1])


def test_every_fork_copies_a_sealed_page() -> None:
    pool, tables = forks(2, 4)
    tree = PrefixTree(pool, 4)
    tables[0].replace(tree.insert(range(4), tables[0].pages))
    for table in tables:
        table.truncate(3)
    assert append_all(tables, [1, 1]) == [Copy(0, 1), Copy(0, 2)]
    assert len(tree.match(range(4))) == 1


def test_forks_of_different_length_share_the_rule() -> None:
    _, tables = forks(2, 7)
    tables[0].truncate(5)
    assert append_all(tables, [1, 1]) == [Copy(1, 2)]
    assert rows(tables) == [(6, [0, 2]), (8, [0, 1])]


def test_forks_at_a_page_boundary_copy_nothing() -> None:
    _, tables = forks(2, 4)
    assert append_all(tables, [1, 1]) == []
    assert rows(tables) == [(5, [0, 1]), (5, [0, 2])]


def test_two_groups_of_forks_are_kept_apart() -> None:
    pool = PagePool(8)
    first, second = PageTable(pool, 4), PageTable(pool, 4)
    append_all([first, second], [2, 2])
    tables = [first, second, first.fork(), second.fork()]
    assert append_all(tables, [1] * 4) == [Copy(0, 2), Copy(1, 3)]


@pytest.mark.parametrize("num_pages", [2, 3, 4])
def test_batch_that_finds_no_room_changes_nothing(num_pages: int) -> None:
    pool, tables = forks(3, 6, num_pages)
    before = rows(tables)
    with pytest.raises(OutOfPages, match=f"3 pages wanted, {num_pages - 2} free"):
        append_all(tables, [1, 3, 1])
    assert rows(tables) == before
    assert [pool.count(ref) for ref in tables[0].pages] == [3, 3]
    assert pool.num_free == num_pages - 2


def test_batch_that_finds_no_room_evicts_nothing() -> None:
    pool = PagePool(2)
    tree = PrefixTree(pool, 4)
    pool.release(tree.insert(range(4), pool.take(1))[0])
    with pytest.raises(OutOfPages, match="3 pages wanted, 1 free and 1 evictable of 2"):
        append_all([PageTable(pool, 4), PageTable(pool, 4)], [4, 8])
    assert len(tree.match(range(4))) == 1


def test_copied_page_is_not_evicted_for_its_own_copy() -> None:
    pool, [table] = forks(1, 4, num_pages=1)
    table.replace(PrefixTree(pool, 4).insert(range(4), table.pages))
    table.truncate(3)
    with pytest.raises(OutOfPages, match="1 pages wanted, 0 free and 0 evictable of 1"):
        append(table, 1)
    assert rows([table]) == [(3, [0])]


def test_table_twice_is_refused() -> None:
    _, tables = forks(1, 6)
    with pytest.raises(ArgumentError, match="tables must be distinct, got one of them twice"):
        append_all(tables * 2, [1, 1])


def test_numbers_must_be_as_many_as_tables() -> None:
    _, tables = forks(2, 6)
    with pytest.raises(ArgumentError, match="num_tokens must have a number for each of 2 tables, got 1"):
        append_all(tables, [1])


def test_tables_of_two_pools_are_refused() -> None:
    _, tables = forks(1, 6)
    with pytest.raises(ArgumentError, match="tables must be of one pool, got tables of several"):
        append_all([*tables, *forks(1, 6)[1]], [1, 1])
    assert rows(tables) == [(6, [0, 1])]


@pytest.mark.parametrize("bad", [-1])
def test_negative_number_changes_no_table(bad: int) -> None:
    _, tables = forks(2, 6)
    with pytest.raises(ArgumentError, match="num_tokens must be at least 0, got -1"):
        append_all(tables, [1, bad])
    assert rows(tables) == [(6, [0, 1])] * 2


def test_released_table_changes_no_table() -> None:
    _, tables = forks(2, 6)
    tables[1].release()
    with pytest.raises(StateError, match="a table must not be used after release"):
        append_all(tables, [1, 1])
    assert rows(tables[:1]) == [(6, [0, 1])]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_page_that_can_be_found_takes_200_bytes_beside_its_tokens(page_size: int) -> None:
    num_pages, per_text = 4000, 40
    texts = [[*range(i, i + per_text * page_size)] for i in range(num_pages // per_text)]
    tracemalloc.start()
    pool = PagePool(num_pages)
    tree = PrefixTree(pool, page_size)
    for text in texts:
        for ref in reversed(tree.insert(text, pool.take(per_text))):
            pool.release(ref)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.num_evictable == num_pages
    assert used <= num_pages * (200 + 8 * page_size)
