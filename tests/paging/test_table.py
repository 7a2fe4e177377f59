"""One sequence: pages taken as it grows, copied when a shared one is written, given back when it shrinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from paging.world import append

from kvloom.errors import ArgumentError, OutOfPages, StateError
from kvloom.paging import Copy, PagePool, PageRef, PageTable, PrefixTree


def make(num_tokens: int, num_pages: int = 8, page_size: int = 4) -> tuple[PagePool, PageTable]:
    pool = PagePool(num_pages)
    table = PageTable(pool, page_size)
    assert append(table, num_tokens) == []
    return pool, table


def ids(table: PageTable) -> list[int]:
    return [ref.id for ref in table.pages]


def test_new_table_is_empty() -> None:
    _, table = make(0)
    assert (table.num_tokens, table.pages) == (0, ())


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_append_takes_as_many_pages_as_tokens_need(num_tokens: int, num_pages: int) -> None:
    pool, table = make(num_tokens)
    assert (table.num_tokens, len(table.pages), pool.num_active) == (num_tokens, num_pages, num_pages)


def test_append_fills_the_last_page_first() -> None:
    pool, table = make(3)
    assert (append(table, 1), ids(table)) == ([], [0])
    assert (append(table, 1), ids(table)) == ([], [0, 1])
    assert pool.num_free == 6


def test_append_of_nothing_copies_nothing() -> None:
    pool, table = make(3)
    twin = table.fork()
    assert append(table, 0) == []
    assert twin.pages == table.pages
    assert pool.num_active == 1


def test_append_to_an_empty_pool_changes_nothing() -> None:
    pool, table = make(6, num_pages=2)
    with pytest.raises(OutOfPages, match="1 pages wanted, 0 free and 0 evictable of 2"):
        append(table, 3)
    assert (table.num_tokens, ids(table), pool.num_active) == (6, [0, 1], 2)


def test_append_of_a_negative_number_is_refused() -> None:
    _, table = make(1)
    with pytest.raises(ArgumentError, match="num_tokens must be at least 0, got -1"):
        append(table, -1)


def test_fork_shares_every_page() -> None:
    pool, table = make(6)
    twin = table.fork()
    assert (twin.pages, twin.num_tokens) == (table.pages, 6)
    assert [pool.count(ref) for ref in table.pages] == [2, 2]


def test_fork_grows_apart() -> None:
    _, table = make(8)
    twin = table.fork()
    append(twin, 1)
    assert (table.num_tokens, ids(table)) == (8, [0, 1])
    assert (twin.num_tokens, ids(twin)) == (9, [0, 1, 2])


def test_first_to_append_copies_the_shared_page() -> None:
    pool, table = make(6)
    twin = table.fork()
    assert append(twin, 1) == [Copy(1, 2)]
    assert (ids(table), ids(twin)) == ([0, 1], [0, 2])
    assert pool.is_writable(table.pages[1]) and pool.is_writable(twin.pages[1])


def test_last_holder_appends_in_place() -> None:
    _, table = make(6)
    twin = table.fork()
    append(twin, 1)
    assert append(table, 1) == []
    assert ids(table) == [0, 1]


def test_holder_left_alone_appends_in_place() -> None:
    _, table = make(6)
    table.fork().release()
    assert append(table, 1) == []


def test_full_shared_page_is_not_copied() -> None:
    _, table = make(4)
    twin = table.fork()
    assert append(twin, 1) == []
    assert ids(twin) == [0, 1]


def test_copy_and_new_pages_in_one_append() -> None:
    _, table = make(2)
    twin = table.fork()
    assert append(twin, 7) == [Copy(0, 1)]
    assert ids(twin) == [1, 2, 3]


def test_truncate_releases_pages_past_the_end() -> None:
    pool, table = make(11)
    table.truncate(5)
    assert (table.num_tokens, ids(table), pool.num_active) == (5, [0, 1], 2)


def test_truncate_to_a_page_boundary_keeps_no_empty_page() -> None:
    pool, table = make(6)
    table.truncate(4)
    assert (ids(table), pool.num_active) == ([0], 1)


def test_truncate_to_nothing_empties_the_table() -> None:
    pool, table = make(6)
    table.truncate(0)
    assert (table.pages, pool.num_free) == ((), 8)


def test_truncate_to_the_same_length_changes_nothing() -> None:
    _, table = make(6)
    table.truncate(6)
    assert (table.num_tokens, ids(table)) == (6, [0, 1])


@pytest.mark.parametrize("num_tokens", [-1, 7])
def test_truncate_beyond_the_tokens_is_refused(num_tokens: int) -> None:
    _, table = make(6)
    with pytest.raises(ArgumentError, match=rf"num_tokens must be in \[0, 6\], got {num_tokens}"):
        table.truncate(num_tokens)
    assert table.num_tokens == 6


def test_truncated_fork_leaves_the_pages_of_the_other() -> None:
    pool, table = make(11)
    twin = table.fork()
    twin.truncate(2)
    assert [pool.count(ref) for ref in table.pages] == [2, 1, 1]


def test_pages_dropped_in_front_are_given_back_and_the_next_token_is_the_first() -> None:
    pool, table = make(11)
    table.drop_front(2)
    assert (table.num_tokens, ids(table), pool.num_active) == (3, [2], 1)
    assert (append(table, 2), ids(table)) == ([], [2, 3])


def test_pages_dropped_in_front_stay_with_a_fork() -> None:
    pool, table = make(11)
    twin = table.fork()
    table.drop_front(1)
    assert [pool.count(ref) for ref in twin.pages] == [1, 2, 2]
    assert (ids(table), table.num_tokens, ids(twin), twin.num_tokens) == ([1, 2], 7, [0, 1, 2], 11)


@pytest.mark.parametrize("num_pages", [-1, 3])
def test_only_full_pages_can_be_dropped_in_front(num_pages: int) -> None:
    pool, table = make(11)
    with pytest.raises(ArgumentError, match=rf"num_pages must be in \[0, 2\], got {num_pages}"):
        table.drop_front(num_pages)
    assert (ids(table), table.num_tokens, pool.num_active) == ([0, 1, 2], 11, 3)


def test_append_after_truncate_in_a_shared_full_page_copies_it() -> None:
    _, table = make(8)
    twin = table.fork()
    twin.truncate(6)
    assert append(twin, 1) == [Copy(1, 2)]
    assert (ids(table), ids(twin)) == ([0, 1], [0, 2])


def test_append_after_truncate_in_an_own_page_writes_in_place() -> None:
    _, table = make(8)
    table.truncate(6)
    assert (append(table, 1), ids(table)) == ([], [0, 1])


def test_append_after_truncate_in_a_sealed_page_copies_it() -> None:
    pool, table = make(8)
    tree = PrefixTree(pool, 4)
    table.replace(tree.insert(range(8), table.pages))
    sealed = table.pages[1]
    table.truncate(6)
    assert append(table, 1) == [Copy(1, 2)]
    assert (pool.count(sealed), pool.num_evictable) == (0, 1)
    assert len(tree.match(range(8))) == 2


def test_adopted_pages_are_the_first_tokens() -> None:
    pool = PagePool(8)
    tree = PrefixTree(pool, 4)
    refs = tree.insert(range(8), pool.take(2))
    table = PageTable(pool, 4)
    table.adopt(tree.match(range(9)))
    assert (table.num_tokens, list(table.pages)) == (8, refs)
    assert pool.count(refs[1]) == 2


def test_adopted_references_are_given_back_by_release() -> None:
    pool = PagePool(8)
    table = PageTable(pool, 4)
    table.adopt(pool.take(2))
    table.release()
    assert pool.num_free == 8


def test_adopt_copies_the_list_it_is_given() -> None:
    pool = PagePool(8)
    table, refs = PageTable(pool, 4), pool.take(2)
    table.adopt(refs)
    refs.clear()
    assert len(table.pages) == 2


def test_adopt_needs_an_empty_table() -> None:
    pool, table = make(5)
    with pytest.raises(StateError, match="a table must be empty before it adopts pages, got one of 5 tokens"):
        table.adopt(pool.take(1))


def test_replaced_pages_keep_the_length() -> None:
    pool, table = make(6)
    refs = [pool.take(1)[0], table.pages[1]]
    table.replace(refs)
    assert (table.num_tokens, list(table.pages)) == (6, refs)


def test_replace_needs_as_many_pages() -> None:
    pool, table = make(6)
    with pytest.raises(ArgumentError, match="refs must be 2 pages, got 1"):
        table.replace(pool.take(1))


PUTS: dict[str, Callable[[PageTable, list[PageRef]], None]] = {
    "adopt": lambda table, refs: PageTable(table._pool, 4).adopt(refs),
    "replace": PageTable.replace,
}


@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
def test_stale_page_is_not_put_into_a_table(put: Callable[[PageTable, list[PageRef]], None]) -> None:
    pool, table = make(6)
    [stale] = pool.take(1)
    pool.release(stale)
    with pytest.raises(StateError, match="must be valid, got page 2 of generation 0, which was freed"):
        put(table, [table.pages[0], stale])
    assert ids(table) == [0, 1]


@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
def test_page_that_nobody_holds_is_not_put_into_a_table(
    put: Callable[[PageTable, list[PageRef]], None],
) -> None:
    pool, table = make(6)
    [idle] = PrefixTree(pool, 4).insert(range(4), pool.take(1))
    pool.release(idle)
    with pytest.raises(StateError, match="refs must be held, got page 2 of generation 0 without a reference"):
        put(table, [idle, table.pages[1]])


@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
def test_page_is_not_put_into_a_table_twice(put: Callable[[PageTable, list[PageRef]], None]) -> None:
    _, table = make(6)
    with pytest.raises(ArgumentError, match="refs must be distinct pages"):
        put(table, [table.pages[0]] * 2)


def test_release_gives_every_page_back() -> None:
    pool, table = make(6)
    table.release()
    assert pool.num_free == 8


def test_second_release_does_nothing() -> None:
    pool, table = make(6)
    twin = table.fork()
    table.release()
    table.release()
    assert [pool.count(ref) for ref in twin.pages] == [1, 1]


@pytest.mark.parametrize(
    "use",
    [
        lambda table: table.num_tokens,
        lambda table: table.pages,
        lambda table: append(table, 1),
        lambda table: append(table, 0),
        lambda table: table.truncate(0),
        lambda table: table.fork(),
        lambda table: table.adopt([]),
        lambda table: table.replace([]),
    ],
)
def test_released_table_refuses_everything_else(use: Callable[[PageTable], object]) -> None:
    _, table = make(6)
    table.release()
    with pytest.raises(StateError, match="a table must not be used after release"):
        use(table)


@pytest.mark.parametrize("page_size", [0, -1, True, 1.5, None, "16"])
def test_page_size_must_be_a_positive_number(page_size: Any) -> None:
    with pytest.raises(ArgumentError, match=f"page_size must be an int of at least 1, got {page_size!r}"):
        PageTable(PagePool(1), page_size)


def test_a_page_is_filled_by_its_only_holder_alone() -> None:
    pool, table = make(6)
    assert table.has_room(2) and not table.has_room(3)
    assert table.page_of(3) == table.pages[0] and table.page_of(4) == table.pages[1]
    table.fill(1)
    twin = table.fork()
    assert (table.num_tokens, table.has_room(1)) == (7, False)
    with pytest.raises(
        StateError, match="num_tokens must fit in the last page, which must be writable, got 1 after"
    ):
        table.fill(1)
    twin.release()
    table.fill(1)
    assert (table.num_tokens, table.has_room(0), pool.num_active) == (8, False, 2)


def test_a_sealed_page_is_not_filled() -> None:
    pool, table = make(5)
    tree = PrefixTree(pool, 4)
    table.replace(tree.insert(range(4), table.pages))
    assert table.has_room(3)
    table.truncate(3)
    assert not table.has_room(1)
