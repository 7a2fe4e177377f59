"""The tree finds pages by their exact tokens, under their salt, and forgets the longest idle ones first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paging.world import append

from kvloom.errors import ArgumentError, StateError
from kvloom.paging import PagePool, PageRef, PageTable, PrefixTree, check

TOKENS = [3, 1, 4, 1, 5, 9]


def make(num_pages: int = 12, page_size: int = 2) -> tuple[PagePool, PrefixTree]:
    pool = PagePool(num_pages)
    return pool, PrefixTree(pool, page_size)


def insert(pool: PagePool, tree: PrefixTree, tokens: list[int], salt: str = "") -> list[PageRef]:
    return tree.insert(tokens, pool.take(len(tokens) // tree.page_size), salt)


def end(pool: PagePool, refs: list[PageRef]) -> None:
    for ref in reversed(refs):
        pool.release(ref)


def test_empty_tree_matches_nothing() -> None:
    _, tree = make()
    assert tree.match(TOKENS) == []


def test_inserted_pages_match_their_tokens() -> None:
    pool, tree = make()
    refs = insert(pool, tree, TOKENS)
    assert tree.match(TOKENS) == refs


def test_match_ends_where_tokens_differ() -> None:
    pool, tree = make()
    refs = insert(pool, tree, TOKENS)
    assert tree.match([3, 1, 4, 2, 5, 9]) == refs[:1]


@pytest.mark.parametrize("page_size", [1, 15, 16, 17, 32, 33, 64])
def test_every_token_of_a_page_is_compared(page_size: int) -> None:
    pool, tree = make(page_size=page_size)
    tokens = list(range(2 * page_size))
    refs = insert(pool, tree, tokens)
    assert tree.match(tokens) == refs
    assert [tokens for _, tokens, _ in tree.sequences()] == [tokens]
    for place in range(len(tokens)):
        other = [*tokens[:place], -1, *tokens[place + 1 :]]
        assert tree.match(other) == refs[: place // page_size]


def test_match_counts_full_pages_only() -> None:
    pool, tree = make()
    refs = insert(pool, tree, TOKENS)
    assert tree.match(TOKENS[:5]) == refs[:2]


def test_same_tokens_behind_other_tokens_do_not_match() -> None:
    pool, tree = make()
    insert(pool, tree, [1, 1, 2, 2])
    assert tree.match([2, 2]) == []
    assert len(tree.match([1, 1, 1, 1])) == 1


def test_page_boundaries_are_part_of_the_tokens() -> None:
    pool, tree = make()
    insert(pool, tree, [1, 256])
    assert tree.match([1 + 256 * 2**32, 0]) == []
    assert tree.match([256, 1]) == []


@pytest.mark.parametrize(
    ("max_tokens", "num_pages"), [(6, 3), (5, 2), (4, 2), (1, 0), (0, 0), (-1, 0), (99, 3)]
)
def test_match_stops_at_max_tokens(max_tokens: int, num_pages: int) -> None:
    pool, tree = make()
    refs = insert(pool, tree, TOKENS)
    assert tree.match(TOKENS, max_tokens=max_tokens) == refs[:num_pages]


def test_match_retains_for_the_caller() -> None:
    pool, tree = make()
    refs = insert(pool, tree, [1, 2])
    tree.match([1, 2])
    assert pool.count(refs[0]) == 2


def test_match_makes_evictable_pages_active() -> None:
    pool, tree = make()
    end(pool, insert(pool, tree, TOKENS))
    assert pool.num_evictable == 3
    tree.match(TOKENS, max_tokens=5)
    assert (pool.num_active, pool.num_evictable) == (2, 1)


def test_match_of_other_salt_finds_nothing() -> None:
    pool, tree = make()
    insert(pool, tree, TOKENS, "ann")
    assert tree.match(TOKENS, "bob") == tree.match(TOKENS) == []


def test_equal_pages_of_two_salts_are_two_pages() -> None:
    pool, tree = make()
    ann, bob = insert(pool, tree, TOKENS, "ann"), insert(pool, tree, TOKENS, "bob")
    assert set(ann).isdisjoint(bob)
    assert (tree.match(TOKENS, "ann"), tree.match(TOKENS, "bob")) == (ann, bob)


def test_insert_leaves_the_partly_filled_page_alone() -> None:
    pool, tree = make()
    refs = pool.take(3)
    assert tree.insert(TOKENS[:5], refs) == refs
    assert [pool.is_sealed(ref) for ref in refs] == [True, True, False]


def test_insert_of_less_than_a_page_seals_nothing() -> None:
    pool, tree = make()
    refs = pool.take(1)
    assert tree.insert([1], refs) == refs
    assert tree.num_pages == 0


def test_insert_again_changes_nothing() -> None:
    pool, tree = make()
    refs = insert(pool, tree, TOKENS)
    assert tree.insert(TOKENS, refs) == refs
    assert [pool.count(ref) for ref in refs] == [2, 2, 1]


def test_insert_prefers_the_page_that_is_there() -> None:
    pool, tree = make()
    first = insert(pool, tree, TOKENS)
    mine = pool.take(3)
    got = tree.insert([3, 1, 4, 1, 7, 7], mine)
    assert got == [first[0], first[1], mine[2]]
    assert tree.match([3, 1, 4, 1, 7, 7]) == got


def test_insert_releases_the_duplicate() -> None:
    pool, tree = make()
    end(pool, insert(pool, tree, TOKENS))
    mine = pool.take(3)
    end(pool, tree.insert(TOKENS, mine))
    assert (pool.num_free, pool.num_evictable) == (9, 3)
    with pytest.raises(StateError, match="which was freed"):
        pool.count(mine[0])


def test_insert_leaves_a_shared_duplicate_to_its_other_holder() -> None:
    pool, tree = make()
    insert(pool, tree, [1, 2])
    mine = pool.take(1)
    pool.retain(mine[0])
    tree.insert([1, 2], mine)
    assert (pool.count(mine[0]), pool.is_sealed(mine[0])) == (1, False)


def test_insert_continues_a_matched_chain() -> None:
    pool, tree = make()
    end(pool, insert(pool, tree, TOKENS[:4]))
    refs = tree.match(TOKENS) + pool.take(1)
    assert tree.insert(TOKENS, refs) == refs
    assert tree.match(TOKENS) == refs


def test_page_sealed_behind_a_replaced_page_is_kept_by_its_other_holder() -> None:
    pool, tree = make()
    first = insert(pool, tree, [1, 2])
    mine = pool.take(2)
    for ref in mine:
        pool.retain(ref)  # a fork
    end(pool, tree.insert([1, 2, 3, 4], mine))
    end(pool, first)
    assert pool.num_evictable == 0  # the fork holds the second page, which holds its parent
    assert tree.insert([1, 2, 3, 4], mine) == [first[0], mine[1]]


def test_insert_needs_a_page_for_every_full_page_of_tokens() -> None:
    pool, tree = make()
    with pytest.raises(ArgumentError, match="refs must be at least 3 distinct pages"):
        tree.insert(TOKENS, pool.take(2))
    assert tree.num_pages == 0


def test_insert_refuses_a_page_twice() -> None:
    pool, tree = make()
    [ref] = pool.take(1)
    with pytest.raises(ArgumentError, match="refs must be at least 2 distinct pages"):
        tree.insert([1, 2, 3, 4], [ref, ref])
    assert tree.num_pages == 0


def test_insert_refuses_a_page_sealed_under_other_tokens() -> None:
    pool, tree = make()
    sealed = insert(pool, tree, [1, 2])
    free = pool.take(1)
    with pytest.raises(
        StateError,
        match=r"^tokens and salt must be those under which page 0 of generation 0 was found or committed",
    ):
        tree.insert([7, 7, 1, 2], free + sealed)
    assert not pool.is_sealed(free[0])


def test_insert_refuses_a_page_of_the_same_chain_in_the_wrong_place() -> None:
    pool, tree = make()
    sealed = insert(pool, tree, [1, 1, 2, 2])
    with pytest.raises(
        StateError,
        match=r"^tokens and salt must be those under which page 1 of generation 0 was found or committed",
    ):
        tree.insert([1, 1, 2, 2], [sealed[1], *pool.take(1)])
    assert [pool.count(ref) for ref in sealed] == [2, 1]


def test_insert_refuses_a_page_sealed_under_another_salt() -> None:
    pool, tree = make()
    with pytest.raises(StateError, match=r"^tokens and salt must be those under which page"):
        tree.insert([1, 2], insert(pool, tree, [1, 2], "ann"), "bob")
    assert tree.match([1, 2], "bob") == []


def test_insert_refuses_a_page_that_nobody_holds() -> None:
    pool, tree = make()
    refs = insert(pool, tree, [1, 2])
    end(pool, refs)
    with pytest.raises(StateError, match="refs must be held, got page 0 of generation 0 without a reference"):
        tree.insert([1, 2], refs)


def test_insert_refuses_a_stale_page_before_it_seals_any() -> None:
    pool, tree = make()
    refs = pool.take(2)
    pool.release(refs[1])
    with pytest.raises(StateError, match="must be valid, got page 1 of generation 0, which was freed"):
        tree.insert([1, 2, 3, 4], refs)
    assert not pool.is_sealed(refs[0])


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1, 1.5, None])
def test_token_that_is_no_int64_is_refused(token: int) -> None:
    pool, tree = make()
    refs = insert(pool, tree, [1, 2])
    sentence = rf"^tokens must be signed 64-bit integers, got {token}$"
    with pytest.raises(ArgumentError, match=sentence):
        tree.match([1, 2, 3, token])
    with pytest.raises(ArgumentError, match=sentence):
        tree.insert([1, 2, 3, token], refs + pool.take(1))
    assert pool.count(refs[0]) == 1


def test_extreme_token_ids_are_told_apart() -> None:
    pool, tree = make()
    refs = insert(pool, tree, [2**63 - 1, -(2**63)])
    assert tree.match([2**63 - 1, -(2**63)]) == refs
    assert tree.match([-1, 0]) == []


@pytest.mark.parametrize("kind", [list, tuple, bytes, bytearray])
def test_any_sequence_of_the_same_tokens_matches(kind: type) -> None:
    pool, tree = make()
    refs = insert(pool, tree, TOKENS)
    assert tree.match(kind(TOKENS)) == refs


@pytest.mark.parametrize("page_size", [0, -1, True, 1.5, None, "16"])
def test_page_size_must_be_a_positive_number(page_size: Any) -> None:
    with pytest.raises(ArgumentError, match=f"page_size must be an int of at least 1, got {page_size!r}"):
        PrefixTree(PagePool(1), page_size)


def test_evict_frees_idle_pages_and_counts_them() -> None:
    pool, tree = make()
    end(pool, insert(pool, tree, TOKENS))
    assert (tree.evict(2), pool.num_evictable, tree.num_pages) == (2, 1, 1)
    assert (tree.evict(5), pool.num_evictable, tree.num_pages) == (1, 0, 0)


def test_evict_refuses_a_negative_number() -> None:
    with pytest.raises(ArgumentError, match="num_pages must be at least 0, got -1"):
        make()[1].evict(-1)


def test_evict_leaves_pages_that_are_held() -> None:
    pool, tree = make()
    refs = insert(pool, tree, TOKENS)
    assert tree.evict(9) == 0
    assert tree.match(TOKENS) == refs


def test_evict_takes_leaves_before_parents() -> None:
    pool, tree = make()
    refs = insert(pool, tree, TOKENS)
    end(pool, refs)
    tree.evict(1)
    assert tree.match(TOKENS) == refs[:2]


def test_evict_takes_the_least_recently_used_branch() -> None:
    pool, tree = make()
    old, new = insert(pool, tree, [1, 1, 2, 2]), insert(pool, tree, [1, 1, 3, 3])
    end(pool, old)
    end(pool, new)
    end(pool, tree.match([1, 1, 2, 2]))
    tree.evict(1)
    assert len(tree.match([1, 1, 2, 2])) == 2
    assert len(tree.match([1, 1, 3, 3])) == 1


def test_evicted_page_is_never_hit() -> None:
    pool, tree = make(num_pages=1)
    end(pool, insert(pool, tree, [1, 2]))
    end(pool, insert(pool, tree, [3, 4]))
    assert tree.match([1, 2]) == []
    assert len(tree.match([3, 4])) == 1


def test_page_of_an_evicted_parent_is_not_found_under_the_next_user_of_it() -> None:
    pool, tree = make(num_pages=2)
    end(pool, insert(pool, tree, [1, 1, 2, 2]))
    tree.evict(2)
    end(pool, insert(pool, tree, [3, 3]))
    assert tree.match([1, 1, 2, 2]) == []
    assert len(tree.match([3, 3, 2, 2])) == 1


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=6), st.integers(1, 3))
def test_match_is_the_longest_common_run_of_full_pages(sequences: list[list[int]], page_size: int) -> None:
    pool, tree = make(64, page_size)
    for tokens in sequences:
        insert(pool, tree, tokens)
    for tokens in sequences + [[1 - token for token in tokens] for tokens in sequences]:
        common = [
            next(
                (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b),
                min(map(len, (tokens, other))),
            )
            for other in sequences
        ]
        assert len(tree.match(tokens)) == max(common, default=0) // page_size


def test_sequences_are_all_that_can_be_found() -> None:
    pool = PagePool(12)
    tree = PrefixTree(pool, 2)
    longest = [("a", (1, 2, 3, 4, 5, 6)), ("a", (1, 2, 3, 9)), ("b", (1, 2)), ("a", (-1, 2**63 - 1))]
    for salt, tokens in longest:
        tree.insert(tokens, pool.take(len(tokens) // 2), salt)
    found = {(salt, tuple(tokens)): refs for salt, tokens, refs in tree.sequences()}
    assert set(found) == set(longest)
    for (salt, tokens), refs in found.items():
        assert tree.match(tokens, salt) == refs


def test_other_tokens_behind_a_crop_are_sealed_and_found() -> None:
    pool = PagePool(8)
    tree, table = PrefixTree(pool, 2), PageTable(pool, 2)
    for tokens, num_kept in (([1, 2, 3, 4], 0), ([1, 2, 3, 5], 3), ([1, 9, 3, 5], 1)):
        table.truncate(num_kept)
        append(table, len(tokens) - num_kept)
        tree.seal(table, tokens)
        assert tree.num_known(tokens) == 2
        check(pool, tree, [table])


def test_pages_that_were_sealed_under_other_tokens_or_another_salt_are_refused() -> None:
    pool = PagePool(8)
    tree, table = PrefixTree(pool, 2), PageTable(pool, 2)
    append(table, 4)
    tree.seal(table, [1, 2, 3, 4], "mine")
    append(table, 2)
    for tokens, salt in (([1, 2, 3, 9, 5, 6], "mine"), ([1, 2, 3, 4, 5, 6], "theirs")):
        with pytest.raises(StateError, match=r"^tokens and salt must be .* page 1 of generation 0"):
            tree.seal(table, tokens, salt)
    check(pool, tree, [table])
