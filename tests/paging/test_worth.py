"""Pools whose pages go by what they are worth: who can go, and what is remembered."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from oracles.interrupts import interrupted

from kvloom.errors import ArgumentError, OutOfPages, StateError
from kvloom.paging import PagePool, PageRef, PrefixTree, check
from kvloom.paging.odds import NUM_KINDS, NUM_USES, Odds
from kvloom.paging.remembered import FAR, NEAR
from kvloom.paging.worth import WorthOrder


def make(num_pages: int) -> tuple[PagePool, PrefixTree]:
    pool = PagePool(num_pages, "ours")
    return pool, PrefixTree(pool, page_size=1)


def begin(pool: PagePool, tree: PrefixTree, tokens: Sequence[int], salt: str = "") -> list[PageRef]:
    refs = tree.match(tokens, salt)
    return tree.insert(tokens, refs + pool.take(len(tokens) - len(refs)), salt)


def end(pool: PagePool, refs: Sequence[PageRef]) -> None:
    for ref in reversed(refs):
        pool.release(ref)


def use(
    pool: PagePool, tree: PrefixTree, tokens: Sequence[int], salt: str = "", held: Sequence[PageRef] = ()
) -> int:
    """Run one request while pages are held; returns how many pages it found."""
    found = tree.match(tokens, salt)
    end(pool, tree.insert(tokens, found + pool.take(len(tokens) - len(found)), salt))
    check(pool, tree, [], held)
    return len(found)


def uses_of(pool: PagePool, ref: PageRef) -> int:
    return order(pool)._texts.uses[order(pool)._sealed[ref.id]]


def order(pool: PagePool) -> WorthOrder:
    assert pool.worth is not None
    return pool.worth


def test_pages_in_use_never_go() -> None:
    pool, tree = make(10)
    held = begin(pool, tree, range(4))
    for first in range(100, 400, 3):
        use(pool, tree, range(first, first + 3), held=held)
        assert [pool.count(ref) for ref in held] == [2, 2, 2, 1]
    with pytest.raises(OutOfPages):
        pool.take(7)
    assert tree.match(range(4)) == held


def test_a_call_without_enough_pages_gives_up_none() -> None:
    pool, tree = make(6)
    held = begin(pool, tree, [1, 2])
    use(pool, tree, [5, 6, 7], held=held)
    before = list(pool.evictable())
    with pytest.raises(OutOfPages, match=r"^5 pages wanted, 1 free and 3 evictable of 6"):
        pool.take(5)
    assert list(pool.evictable()) == before
    check(pool, tree, [], held)


@pytest.mark.parametrize("num_pages", [1, 2, 3, 5, 9])
def test_pages_go_after_what_is_behind_them(num_pages: int) -> None:
    pool, tree = make(9)
    for tail in ([2, 3], [4, 5, 6], [7]):
        use(pool, tree, [0, 1, *tail][: 2 + len(tail)])
    assert tree.evict(num_pages) == min(num_pages, 8)
    check(pool, tree, [])
    assert tree.evict(9) == 8 - min(num_pages, 8)
    assert (pool.num_free, tree.num_pages) == (9, 0)


def test_a_parent_can_go_once_its_last_child_is_gone() -> None:
    pool, tree = make(4)
    end(pool, begin(pool, tree, [1, 2]))
    end(pool, begin(pool, tree, [1, 3]))
    assert [tree.evict(1) for _ in range(4)] == [1, 1, 1, 0]


def test_a_page_that_is_back_is_known() -> None:
    pool, tree = make(4)
    for _ in range(5):
        use(pool, tree, [1, 2])
        for first in range(10, 30, 2):
            use(pool, tree, [first, first + 1])
    use(pool, tree, [1, 2])
    assert uses_of(pool, tree.match([1, 2])[0]) == NUM_USES  # and it was evicted between any two


def test_texts_of_two_salts_are_told_apart() -> None:
    pool, tree = make(4)
    use(pool, tree, [1], "a")
    use(pool, tree, [1], "a")
    assert tree.evict(1) == 1
    use(pool, tree, [1], "b")
    use(pool, tree, [1], "a")
    assert [uses_of(pool, tree.match([1], salt)[0]) for salt in "ab"] == [3, 1]


def test_memory_is_bounded_by_the_pages() -> None:
    pool, tree = make(20)
    for first in range(0, 20_000, 5):
        use(pool, tree, range(first, first + 5))
    worth = order(pool)
    assert worth.num_sealed == len(worth._sealed) == 20
    assert worth._texts.lengths[NEAR] <= 20 + 5 and worth._texts.lengths[FAR] <= 7 * 20 + 5
    assert len(worth._texts.pages) <= 9 * 20 + 10
    assert sum(map(len, worth._texts._parts)) <= 8 * 20 + 10
    assert sum(map(len, worth._cells.values())) <= 20
    assert sum(map(len, worth._rests)) <= 8 * 20 + 1024


def test_two_texts_of_one_digest_are_two_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = WorthOrder()
    content = ("", b"x")
    worth.seal(1, None, content)
    worth.seal(2, None, content)
    for page in (1, 2, 1, 2):
        worth.rest(page)
        worth.wake(page)
    worth.rest(1)
    worth.rest(2)
    assert sorted(worth.evict(5)) == [1, 2]


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_a_copy_goes_on(twin: object) -> None:
    pool, tree = make(12)
    for first in range(0, 3000, 6):
        use(pool, tree, [0, *range(first, first + 6)])
    assert callable(twin)
    pool, tree = twin((pool, tree))
    for first in range(3000, 3600, 6):
        use(pool, tree, [0, *range(first, first + 6)])
    assert tree.evict(12) == 12


def test_a_pool_that_grew_uses_its_new_pages() -> None:
    pool, tree = make(4)
    for first in range(0, 40, 4):
        use(pool, tree, range(first, first + 4))
    pool.grow(4)
    use(pool, tree, range(100, 104))
    assert use(pool, tree, range(36, 40)) == 4


def test_held_pages_are_not_sealed_twice() -> None:
    pool, tree = make(4)
    held = begin(pool, tree, [1, 2])
    with pytest.raises(StateError):
        tree.insert([3, 4], held)
    end(pool, held)
    check(pool, tree, [])


def test_a_policy_that_is_none_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"^policy must be one of lru, ours, got 'mru'"):
        PagePool(4, "mru")


def test_no_eviction_costs_more_in_a_larger_pool() -> None:
    """Short texts, each of which rests alone: counting all their ages at once took time for each of them."""
    longest = []
    for num_pages in (1000, 4000):
        pool, tree = make(num_pages)
        lines = 0
        for i in range(2 * num_pages):
            if not pool.num_free:
                lines = max(lines, interrupted(0, partial(tree.evict, 1)))
            end(pool, tree.insert([i], pool.take(1)))
        longest.append(lines)
    assert longest[1] < 1.5 * longest[0]


def test_no_eviction_learns_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    num_judged, judge = 0, Odds._judge

    def count(*args: Any) -> None:
        nonlocal num_judged
        num_judged += 1
        judge(*args)

    monkeypatch.setattr(Odds, "_judge", count)
    pool, tree = make(500)
    most = total = 0
    for i in range(8000):
        if not pool.num_free:
            tree.evict(1)
            most, total, num_judged = max(most, num_judged), total + num_judged, 0
        end(pool, tree.insert([i], pool.take(1)))
    assert most == 1 and total >= NUM_KINDS


def test_what_is_remembered_is_in_small_dicts() -> None:
    """A dict of all of it took long each time that it grew."""
    pool, tree = make(2000)
    for i in range(30_000):
        end(pool, tree.insert([i], pool.take(1)))
    sizes = [len(part) for part in order(pool)._texts._parts]
    assert sum(sizes) > 7 * 2000 and max(sizes) < 4 * sum(sizes) / len(sizes)
