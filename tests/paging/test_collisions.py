"""A wrong page is never found: not when all hashes are equal, not across salts."""

from __future__ import annotations

import pickle
import random

import pytest
from campaign import times
from paging.world import World

from kvloom.paging import PagePool, PrefixTree, nodes

NUM_LOOKUPS = times(30_000)
SALTS = [f"tenant {i}" for i in range(8)]


def look_up(world: World, rng: random.Random, salts: list[str], num_lookups: int) -> int:
    """Match random sequences; what is found must hold their own tokens. Returns how many pages were."""
    num_found = 0
    for _ in range(num_lookups):
        salt, tokens = rng.choice(salts), rng.choices(range(2), k=6)
        refs = world.tree.match(tokens, salt)
        own = world.contents(salt, tokens)
        for i, ref in enumerate(refs):
            assert world.memory[ref.id] == own[i * world.page_size : (i + 1) * world.page_size]
            world.pool.release(ref)
        num_found += len(refs)
    return num_found


@pytest.mark.campaign
@pytest.mark.parametrize("page_size", [1, 2])
def test_equal_hashes_find_no_wrong_page(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "hash", lambda _: 0, raising=False)
    rng = random.Random(page_size)
    world = World(24, page_size)
    num_found = 0
    for _ in range(NUM_LOOKUPS // 100):
        request = world.begin(rng.choice(SALTS[:2]), rng.choices(range(2), k=6))
        assert request is not None
        world.commit(request)
        world.end(request)
        num_found += look_up(world, rng, SALTS[:2], 100)
    assert 0 < num_found < NUM_LOOKUPS * 6 // page_size
    assert {world.tree._nodes._hashes[node] for node in world.tree._nodes} == {0}


@pytest.mark.parametrize(("one", "other"), [(-1, -2), (0, 2**61 - 1), (1, 2**61)])
def test_tokens_of_equal_hash_are_told_apart(one: int, other: int) -> None:
    assert hash(one) == hash(other)
    world = World(2, 1)
    world.tree.insert([one], world.pool.take(1))
    assert world.tree.match([other]) == []


@pytest.mark.campaign
def test_salts_find_no_page_of_one_another() -> None:
    rng = random.Random(8)
    world = World(200, 2)
    for salt in SALTS[:4]:
        for _ in range(40):
            request = world.begin(salt, rng.choices(range(2), k=6))
            assert request is not None
            world.commit(request)
            world.end(request)
    assert look_up(world, rng, SALTS[:4], NUM_LOOKUPS // 2) > 0
    assert look_up(world, rng, SALTS[4:], NUM_LOOKUPS // 2) == 0


def test_another_process_finds_the_pages_of_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hashes of bytes are others."""
    pool = PagePool(8)
    tree = PrefixTree(pool, 2)
    tree.insert([1, 2, 3, 4, 5, 6], pool.take(3), "a")
    tree.insert([1, 2, 7, 8], pool.take(2), "b")
    saved = pickle.dumps(tree)
    monkeypatch.setattr(nodes, "hash", lambda key: hash(("another secret", key)), raising=False)
    tree = pickle.loads(saved)  # noqa: S301 (our own)
    assert [tree.num_known([1, 2, 3, 4, 5, 6], salt) for salt in "abc"] == [3, 1, 0]
    assert tree.num_known([1, 2, 7, 8], "b") == 2
