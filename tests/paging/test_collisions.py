"""A wrong page is never found: not when all hashes are equal, not across salts."""

from __future__ import annotations

import random
import struct
from types import SimpleNamespace

import pytest
from campaign import times
from paging.world import World

from kvloom.paging import prefix
from kvloom.paging.nodes import Node

NUM_LOOKUPS = times(30_000)
SALTS = [f"tenant {i}" for i in range(8)]


class SameHash(tuple):  # type: ignore[type-arg]
    """A key that collides with every other one."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 0


class SameHashBytes(bytes):
    """A page of tokens that collides with every other one."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 0


Key = tuple[str, Node | None, bytes]


class OneBucket(dict[Key, Node]):
    """A dict in which nothing can be found by its hash alone."""

    def __setitem__(self, key: Key, node: Node) -> None:
        super().__setitem__(SameHash(key), node)

    def __delitem__(self, key: Key) -> None:
        super().__delitem__(SameHash(key))

    def get(self, key: Key, default: Node | None = None) -> Node | None:  # type: ignore[override]
        return super().get(SameHash(key), default)


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
    def pack(form: str, *tokens: int) -> bytes:
        return SameHashBytes(struct.pack(form, *tokens))

    monkeypatch.setattr(prefix, "struct", SimpleNamespace(pack=pack, error=struct.error))
    rng = random.Random(page_size)
    world = World(24, page_size)
    world.tree._nodes = OneBucket()
    num_found = 0
    for _ in range(NUM_LOOKUPS // 100):
        request = world.begin(rng.choice(SALTS[:2]), rng.choices(range(2), k=6))
        assert request is not None
        world.commit(request)
        world.end(request)
        num_found += look_up(world, rng, SALTS[:2], 100)
    assert 0 < num_found < NUM_LOOKUPS * 6 // page_size
    assert {hash(key) for key in world.tree._nodes} == {0}


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
