"""Pages are free, active or evictable, and references are valid in one life of a page."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from paging import earlier

from kvloom.errors import ArgumentError, OutOfPages, StateError
from kvloom.paging import PagePool, PageRef, PrefixTree, check


def chain(pool: PagePool, tree: PrefixTree, *tokens: int) -> list[PageRef]:
    """Held, sealed pages of one token each."""
    return tree.insert(tokens, pool.take(len(tokens)))


def states(pool: PagePool) -> tuple[int, int, int]:
    assert pool.num_free + pool.num_active + pool.num_evictable == pool.num_pages
    return pool.num_free, pool.num_active, pool.num_evictable


def test_new_pool_is_free() -> None:
    assert states(PagePool(3)) == (3, 0, 0)


def test_fresh_pages_are_taken_lowest_first() -> None:
    assert PagePool(3).take(3) == [PageRef(0, 0), PageRef(1, 0), PageRef(2, 0)]


def test_page_freed_last_is_taken_first() -> None:
    pool = PagePool(4)
    refs = pool.take(3)
    pool.release(refs[0])
    pool.release(refs[2])
    assert [ref.id for ref in pool.take(3)] == [2, 0, 3]


def test_take_of_nothing_is_empty() -> None:
    assert PagePool(0).take(0) == []


def test_taken_page_has_one_reference_and_is_writable() -> None:
    pool = PagePool(1)
    [ref] = pool.take(1)
    assert (pool.count(ref), pool.is_writable(ref), pool.is_sealed(ref)) == (1, True, False)


def test_take_beyond_the_pool_says_how_many_there_are() -> None:
    pool = PagePool(3)
    tree = PrefixTree(pool, 1)
    held, idle = chain(pool, tree, 5), chain(pool, tree, 6)
    pool.release(idle[0])
    with pytest.raises(OutOfPages, match="3 pages wanted, 1 free and 1 evictable of 3"):
        pool.take(3)
    assert states(pool) == (1, 1, 1)
    assert pool.count(held[0]) == 1
    assert tree.match([6]) == idle


def test_take_evicts_no_more_than_it_needs() -> None:
    pool = PagePool(4)
    tree = PrefixTree(pool, 1)
    for ref in chain(pool, tree, 1, 2, 3):
        pool.release(ref)
    pool.take(2)
    assert states(pool) == (0, 2, 2)
    assert len(tree.match([1, 2, 3])) == 2


def test_take_may_evict_everything_that_is_idle() -> None:
    pool = PagePool(3)
    tree = PrefixTree(pool, 1)
    for ref in chain(pool, tree, 1, 2, 3):
        pool.release(ref)
    assert len(set(pool.take(3))) == 3
    assert tree.num_pages == 0


def test_last_release_frees_an_unsealed_page() -> None:
    pool = PagePool(1)
    [ref] = pool.take(1)
    pool.retain(ref)
    pool.release(ref)
    assert states(pool) == (0, 1, 0)
    pool.release(ref)
    assert states(pool) == (1, 0, 0)


def test_last_release_keeps_a_sealed_page_evictable() -> None:
    pool = PagePool(1)
    [ref] = chain(pool, PrefixTree(pool, 1), 7)
    pool.release(ref)
    assert states(pool) == (0, 0, 1)
    assert (pool.count(ref), pool.is_sealed(ref)) == (0, True)


def test_retain_makes_an_evictable_page_active() -> None:
    pool = PagePool(1)
    [ref] = chain(pool, PrefixTree(pool, 1), 7)
    pool.release(ref)
    pool.retain(ref)
    assert states(pool) == (0, 1, 0)


def test_evictable_page_has_no_reference_to_release() -> None:
    pool = PagePool(1)
    [ref] = chain(pool, PrefixTree(pool, 1), 7)
    pool.release(ref)
    with pytest.raises(StateError, match="ref must be held, got page 0 of generation 0 without a reference"):
        pool.release(ref)
    assert states(pool) == (0, 0, 1)


def test_shared_page_is_not_writable() -> None:
    pool = PagePool(1)
    [ref] = pool.take(1)
    pool.retain(ref)
    assert not pool.is_writable(ref)


def test_sealed_page_is_not_writable_by_its_only_holder() -> None:
    pool = PagePool(1)
    [ref] = chain(pool, PrefixTree(pool, 1), 7)
    assert (pool.count(ref), pool.is_writable(ref)) == (1, False)


def test_active_child_holds_its_parent() -> None:
    pool = PagePool(2)
    parent, child = chain(pool, PrefixTree(pool, 1), 1, 2)
    assert (pool.count(parent), pool.count(child)) == (2, 1)
    pool.release(parent)
    assert states(pool) == (0, 2, 0)
    pool.release(child)
    assert states(pool) == (0, 0, 2)


def test_retained_child_wakes_its_parents() -> None:
    pool = PagePool(3)
    refs = chain(pool, PrefixTree(pool, 1), 1, 2, 3)
    for ref in refs:
        pool.release(ref)
    pool.retain(refs[2])
    assert [pool.count(ref) for ref in refs] == [1, 1, 1]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_evictable_pages_come_after_their_children_in_any_order_of_release(order: tuple[int, ...]) -> None:
    pool = PagePool(3)
    refs = chain(pool, PrefixTree(pool, 1), 1, 2, 3)
    for i in order:
        pool.release(refs[i])
    assert list(pool.evictable()) == refs[::-1]


def test_evictable_pages_come_longest_idle_first() -> None:
    pool = PagePool(3)
    tree = PrefixTree(pool, 1)
    refs = [chain(pool, tree, token)[0] for token in (1, 2, 3)]
    for i in (1, 0, 2):
        pool.release(refs[i])
    pool.retain(refs[1])
    pool.release(refs[1])
    assert list(pool.evictable()) == [refs[0], refs[2], refs[1]]


def test_grow_adds_free_pages_behind_the_others() -> None:
    pool = PagePool(2)
    pool.take(1)
    pool.grow(2)
    assert states(pool) == (3, 1, 0)
    assert [ref.id for ref in pool.take(3)] == [1, 2, 3]


def test_grow_leaves_references_valid() -> None:
    pool = PagePool(1)
    [ref] = pool.take(1)
    pool.grow(5)
    assert pool.count(ref) == 1


def test_freed_page_returns_with_the_next_generation() -> None:
    pool = PagePool(1)
    [ref] = pool.take(1)
    pool.release(ref)
    assert pool.take(1) == [PageRef(0, 1)]


def test_evicted_page_returns_with_the_next_generation() -> None:
    pool = PagePool(1)
    [ref] = chain(pool, PrefixTree(pool, 1), 7)
    pool.release(ref)
    assert pool.take(1) == [PageRef(0, 1)]


METHODS: dict[str, Callable[[PagePool, PageRef], object]] = {
    "retain": PagePool.retain,
    "release": PagePool.release,
    "count": PagePool.count,
    "is_sealed": PagePool.is_sealed,
    "is_writable": PagePool.is_writable,
    "seal": lambda pool, ref: pool.seal([ref], None),
    "seal under": lambda pool, ref: pool.seal(pool.take(1), ref),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("reborn", [False, True])
def test_reference_to_a_freed_page_is_refused(
    method: Callable[[PagePool, PageRef], object], reborn: bool
) -> None:
    pool = PagePool(2)
    PrefixTree(pool, 1)
    [ref] = pool.take(1)
    pool.release(ref)
    if reborn:
        pool.take(1)
    with pytest.raises(
        StateError, match="got page 0 of generation 0, which was freed: the page is at generation 1"
    ):
        method(pool, ref)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_reference_to_an_evicted_page_is_refused(method: Callable[[PagePool, PageRef], object]) -> None:
    pool = PagePool(2)
    tree = PrefixTree(pool, 1)
    [ref] = chain(pool, tree, 7)
    pool.release(ref)
    tree.evict(1)
    with pytest.raises(StateError, match="must be valid, got page 0 of generation 0, which was freed"):
        method(pool, ref)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("page", [-1, 2])
def test_reference_out_of_range_is_refused(method: Callable[[PagePool, PageRef], object], page: int) -> None:
    pool = PagePool(2)
    PrefixTree(pool, 1)
    with pytest.raises(StateError, match=rf"must be to a page in \[0, 2\), got page {page}"):
        method(pool, PageRef(page, 0))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("ref", [PageRef(1, 0), PageRef(1, 3)])
def test_reference_that_was_never_handed_out_is_refused(
    method: Callable[[PagePool, PageRef], object], ref: PageRef
) -> None:
    pool = PagePool(2)
    PrefixTree(pool, 1)
    with pytest.raises(
        StateError, match=f"got page 1 of generation {ref.generation}, which was never allocated"
    ):
        method(pool, ref)


@pytest.mark.parametrize("call", [PagePool(1).take, PagePool(1).grow, PagePool])
def test_negative_number_of_pages_is_refused(call: Callable[[int], object]) -> None:
    with pytest.raises(ArgumentError, match=r"num_pages must be (an int of )?at least 0, got -1"):
        call(-1)


def test_second_tree_is_refused() -> None:
    pool = PagePool(1)
    PrefixTree(pool, 1)
    with pytest.raises(StateError, match="pool must have no prefix tree yet, got one with a tree"):
        PrefixTree(pool, 1)


def test_seal_needs_a_tree() -> None:
    pool = PagePool(1)
    with pytest.raises(
        StateError, match="a pool must have a prefix tree before pages are sealed, got one without"
    ):
        pool.seal(pool.take(1), None)


def test_page_is_sealed_once() -> None:
    pool = PagePool(1)
    [ref] = chain(pool, PrefixTree(pool, 1), 7)
    with pytest.raises(StateError, match="refs must not be sealed yet, got page 0 of generation 0"):
        pool.seal([ref], None)


def test_page_is_sealed_once_in_a_call() -> None:
    pool = PagePool(1)
    PrefixTree(pool, 1)
    [ref] = pool.take(1)
    with pytest.raises(StateError, match=r"refs must be distinct pages, got \[PageRef"):
        pool.seal([ref, ref], None)
    assert not pool.is_sealed(ref)


def test_parent_must_be_sealed() -> None:
    pool = PagePool(2)
    PrefixTree(pool, 1)
    child, parent = pool.take(2)
    with pytest.raises(StateError, match="parent must be sealed, got page 1 of generation 0"):
        pool.seal([child], parent)
    assert not pool.is_sealed(child)


def test_held_page_is_not_reclaimed() -> None:
    pool = PagePool(1)
    chain(pool, PrefixTree(pool, 1), 7)
    assert pool.reclaim(1) == [] and states(pool) == (0, 1, 0)


# --- extents ------------------------------------------------------------------------------------------------


def test_pages_are_shared_out_to_extents_and_handed_out_one_extent_after_the_other() -> None:
    pool = PagePool(0)
    pool.grow(7, num_extents=3)
    assert [ref.id for ref in pool.take(7)] == list(range(7))
    assert [pool.place(page) for page in range(7)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    pool.grow(5)
    assert (pool.num_extents, pool.num_pages) == (3, 12)
    assert [pool.place(page) for page in range(7, 12)] == [(0, 3), (1, 2), (1, 3), (2, 2), (2, 3)]


def test_next_free_stops_at_the_first_page_that_is_not_free() -> None:
    pool = PagePool(0)
    pool.grow(8, num_extents=2)
    refs = pool.take(8)
    for page in (1, 3, 4, 5):
        pool.release(refs[page])
    assert (pool.next_free(0, 3), pool.next_free(2, 3), pool.next_free(3, 3)) == ([1], [3], [])
    assert (pool.next_free(4, 1), pool.next_free(4, 9)) == ([5], [5])


def test_wanted_pages_come_first() -> None:
    pool = PagePool(5)
    assert [ref.id for ref in pool.take(3, wanted=[4, 2])] == [4, 2, 0]
    assert [ref.id for ref in pool.take(2)] == [1, 3]


def test_extents_are_fixed_while_there_are_pages() -> None:
    pool = PagePool(2)
    pool.grow(2, num_extents=2)
    assert pool.num_extents == 1
    with pytest.raises(ArgumentError, match="num_extents must be at least 1, got 0"):
        pool.grow(1, num_extents=0)


@pytest.mark.parametrize("has_refs", [False, True])
@pytest.mark.parametrize("name", earlier.POOLS)
def test_pools_that_an_earlier_release_pickled_go_on(
    name: str, has_refs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = PagePool.__setstate__

    def restore_older(pool: PagePool, state: tuple[None, dict[str, Any]]) -> None:
        own = state[1]
        if "_refs" not in own and "_evictable" in own:
            own["_refs"] = [PageRef(*x) for x in enumerate(own.pop("_generations"))]
            own["_places"] = [divmod(x, 1 << 32) for x in own["_places"]]
        restore(pool, state)

    if has_refs:
        monkeypatch.setattr(PagePool, "__setstate__", restore_older)
    read = earlier.load(name)
    for pool, tree, table in (read, pickle.loads(pickle.dumps(read))):  # noqa: S301
        check(pool, tree, [table])
        assert pool.report() == {"num_pages": 8, "free": 1, "active": 3, "evictable": 4}
        assert [ref.id for ref in pool.evictable()] == ([4, 5, 3, 6] if "window" in name else [3, 6, 5, 4])
        assert pool.num_passed == (2 if "window" in name else 0)
        assert [ref.id for ref in tree.pages_from([1, 2, 3, 4, 9], "a", 0)] == [0, 1]
        assert tree.known([1, 2, 7, 8, 9, 10], "b") == [True] * 3
        assert tree.known([1, 2, 7, 8, 9, 10], "a") == [True, True, False]
        assert [pool.place(page) for page in (3, 4)] == [(0, 3), (1, 0)]
        assert tree.evict(3) == 3 and pool.take(1)[0].generation == 1
        assert [ref.id for ref in table.pages] == [0, 1, 2]
