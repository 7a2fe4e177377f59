"""What caches of every policy find of a trace, compared with plain models and with what each is made for."""

from __future__ import annotations

import random
from functools import cache as memoized
from itertools import accumulate

import pytest

from kvloom.errors import ArgumentError
from kvloom.simulation.policies import GENERAL, Policy, optimum
from kvloom.simulation.replay import POLICIES, replay
from kvloom.simulation.trace import BLOCK_TOKENS, Request, paged


def request(*blocks: int, last: int = BLOCK_TOKENS) -> Request:
    return Request(0, BLOCK_TOKENS * (len(blocks) - 1) + last, 1, list(blocks))


def conversations(seed: int, count: int = 300) -> list[Request]:
    """Requests that begin like earlier ones, up to any block, and go on as none before."""
    rng = random.Random(seed)
    made, num_blocks = [request(0)], 1
    for _ in range(count):
        begin = rng.choice(made[-30:]).hash_ids
        kept = begin[: rng.randint(1, len(begin))]
        new = list(accumulate([1] * rng.randint(0, 3), initial=num_blocks))[1:]
        num_blocks += len(new)
        made.append(request(*kept, *new, last=rng.randint(1, BLOCK_TOKENS)))
    return made


def found(requests: list[Request], num_blocks: int, policy: str) -> int:
    return replay(requests, num_blocks * BLOCK_TOKENS, policy).blocks


def leading(blocks: list[int], there: list[int]) -> int:
    return next((i for i, block in enumerate(blocks) if block not in there), len(blocks))


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 30, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_the_pool_finds_what_a_list_in_order_of_use_finds(seed: int, num_blocks: int) -> None:
    requests, there, count = conversations(seed), list[int](), 0
    for x in requests:
        count += leading(x.hash_ids[:num_blocks], there)
        used = x.hash_ids[:num_blocks]
        there = [block for block in there if block not in used] + used[::-1]
        there = there[-num_blocks:]
    assert found(requests, num_blocks, "lru") == count


@pytest.mark.parametrize("num_blocks", [1, 7, 30])
def test_least_often_used_goes_first(num_blocks: int) -> None:
    requests, counts, there, count = conversations(4), dict[int, tuple[int, int]](), list[int](), 0
    for x in requests:
        count += leading(x.hash_ids, there)
        for block in reversed(x.hash_ids):
            uses, _ = counts.get(block, (0, 0))
            counts[block] = uses + 1, sum(n for n, _ in counts.values())
        there = sorted({*there, *x.hash_ids}, key=lambda block: counts[block])[-num_blocks:]
    assert found(requests, num_blocks, "lfu") == count


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_the_most_that_any_choice_finds(seed: int) -> None:
    blocks = random.Random(seed).choices(range(6), k=14)

    @memoized
    def most(i: int, there: frozenset[int]) -> int:
        if i == len(blocks):
            return 0
        after = there | {blocks[i]}
        choices = [after] if len(after) <= 3 else [after - {block} for block in after]
        return (blocks[i] in there) + max(most(i + 1, choice) for choice in choices)

    assert found([request(block) for block in blocks], 3, "opt") == most(0, frozenset())


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_all_only_the_first_use_of_a_block_is_missed(policy: str) -> None:
    requests = conversations(5)
    hits = replay(requests, 5000 * BLOCK_TOKENS, policy)
    new = len({block for x in requests for block in x.hash_ids})
    assert hits.blocks == hits.blocks_asked - new == sum(len(x.hash_ids) for x in requests) - new


@pytest.mark.parametrize("name", GENERAL)
@pytest.mark.parametrize("capacity", [1, 2, 3, 10, 100])
def test_no_cache_holds_more_than_its_capacity(name: str, capacity: int) -> None:
    cache: Policy = GENERAL[name](capacity)
    for x in conversations(6, 200):
        cache.use(reversed(x.hash_ids))
        assert sum(block in cache for block in range(600)) <= capacity


def test_the_optimum_holds_no_more_than_its_capacity() -> None:
    requests = conversations(6, 200)
    cache = optimum(7, requests)
    for x in requests:
        cache.use(x.hash_ids)
        assert sum(block in cache for block in range(600)) <= 7


@pytest.mark.parametrize("policy", POLICIES)
def test_who_resists_blocks_that_are_used_once(policy: str) -> None:
    often = [request(block) for block in range(10)] * 6
    once = [request(block) for block in range(100, 400)]
    kept = found(often + once + often[:10], 50, policy) - found(often + once, 50, policy)
    assert kept == (0 if policy in ("lru", "ours", "fifo") else 10)  # ours has yet to see that they come once


def test_no_general_policy_beats_the_optimum() -> None:
    requests = conversations(7, 1000)
    best = found(requests, 40, "opt")
    assert all(found(requests, 40, policy) <= best for policy in POLICIES)


def test_a_block_counts_where_all_before_it_are_found_and_its_tokens_as_asked() -> None:
    requests = [request(1, 2, 3, last=100), request(1, 2, 3, last=100), request(1, 5, 3, last=512)]
    hits = replay(requests, 10 * BLOCK_TOKENS, "fifo")
    assert (hits.blocks, hits.tokens) == (3 + 1, 2 * 512 + 100 + 512)
    assert (hits.blocks_asked, hits.tokens_asked) == (9, 2 * (2 * 512 + 100) + 3 * 512)
    assert (hits.block_rate, hits.token_rate) == (hits.blocks / 9, hits.tokens / hits.tokens_asked)


def test_nothing_asked_for_is_nothing_found() -> None:
    assert replay([], 5120).block_rate == 0.0


def test_larger_pages_are_named_by_their_last_block() -> None:
    made = paged([request(1, 2, 3, 4, last=7), request(1, 2, 5), request(9)], 2 * BLOCK_TOKENS)
    assert [x.hash_ids for x in made] == [[2, 4], [2, 5], [9]]
    assert [x.input_length for x in made] == [3 * BLOCK_TOKENS + 7, 3 * BLOCK_TOKENS, BLOCK_TOKENS]


def test_smaller_pages_are_the_parts_of_their_blocks() -> None:
    first, second = (
        x.hash_ids for x in paged([request(1, 2, last=129), request(1, 3, last=128)], BLOCK_TOKENS // 4)
    )
    assert (len(first), len(second)) == (4 + 2, 4 + 1)
    assert first[:4] == second[:4] and len({*first, *second}) == 7


@pytest.mark.parametrize("policy", ["lru", "ours", "fifo", "opt"])
def test_what_pages_of_any_size_find_with_room_for_all(policy: str) -> None:
    requests = [request(*x.hash_ids) for x in conversations(8)]
    size = 10_000 * BLOCK_TOKENS
    tokens = replay(requests, size, policy).tokens
    assert replay(requests, size, policy, page_size=64).tokens == tokens
    larger = replay(requests, size, policy, page_size=1024)
    assert larger.blocks_asked == sum(-(-x.input_length // 1024) for x in requests)
    assert tokens / 2 < larger.tokens < tokens


def test_smaller_pages_waste_less_room() -> None:
    requests = [request(block, last=100) for block in range(5)] * 3
    assert replay(requests, 4 * BLOCK_TOKENS).blocks == 0
    assert replay(requests, 4 * BLOCK_TOKENS, page_size=128).tokens == 10 * 100


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [1, 7, 30])
def test_a_store_below_finds_what_it_alone_would_where_the_cache_does_not(
    policy: str, num_blocks: int
) -> None:
    requests = conversations(9)
    above = replay(requests, num_blocks * BLOCK_TOKENS, policy)
    both = replay(requests, num_blocks * BLOCK_TOKENS, policy, below=20 * BLOCK_TOKENS)
    store = replay(requests, 20 * BLOCK_TOKENS)
    assert (both.blocks, both.tokens) == (above.blocks, above.tokens)
    assert 0 <= both.blocks_below <= store.blocks and both.tokens_below <= store.tokens
    assert both.blocks + both.blocks_below >= max(above.blocks, store.blocks)
    if policy == "lru":  # of which the smaller has nothing that the larger has not
        assert both.blocks + both.blocks_below == max(above.blocks, store.blocks)
    assert both.block_rate == (both.blocks + both.blocks_below) / both.blocks_asked


@pytest.mark.parametrize("page_size", [0, -512, 3, 511, 513, 768])
def test_a_page_size_that_is_no_part_of_a_block_is_named(page_size: int) -> None:
    with pytest.raises(ArgumentError, match=f"^page_size must be .* of 512, got {page_size}$"):
        replay([], 10**6, page_size=page_size)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"^capacity must be at least 2048 tokens, got 2047"):
        replay([], 2047, page_size=2048)
    with pytest.raises(ArgumentError, match=r"^below must be at least 512 tokens, got 511"):
        replay([], 512, below=511)
    with pytest.raises(ArgumentError, match=r"^capacity must be at least 512 tokens, got 511"):
        replay([], 511)
    with pytest.raises(ArgumentError, match=r"^policy must be one of lru, ours, fifo, .*, opt, got 'mru'"):
        replay([], 512, "mru")
