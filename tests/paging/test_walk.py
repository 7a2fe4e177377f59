"""Long seeded walks through a pool that is too small for its requests."""

from __future__ import annotations

import pytest
from campaign import times
from paging.oracle import Oracle
from paging.world import Walk, World

NUM_STEPS = times(30_000)
SEED = 1


def run(walk: Walk, num_steps: int, every: int) -> None:
    try:
        walk.run(num_steps, walk.world.verify, every)
        walk.world.idle()
    except Exception as failure:
        raise AssertionError(f"a walk of seed {SEED} leads to: {failure!r}") from failure


@pytest.mark.campaign
@pytest.mark.parametrize(("page_size", "policy"), [(1, "lru"), (4, "lru"), (16, "lru"), (4, "ours")])
def test_walk_keeps_every_invariant_and_reads_only_its_own_tokens(page_size: int, policy: str) -> None:
    run(Walk(World(256, page_size, policy), SEED, num_requests=64), NUM_STEPS // 3, every=64)


@pytest.mark.campaign
def test_a_small_pool_of_our_policy_keeps_every_invariant_at_every_step() -> None:
    run(Walk(World(32, 1, "ours"), SEED, num_requests=10), NUM_STEPS // 10, every=1)


@pytest.mark.campaign
@pytest.mark.parametrize("page_size", [1, 3])
def test_walk_meets_the_model_at_every_step(page_size: int) -> None:
    run(Walk(Oracle(32, page_size), SEED, num_requests=10), NUM_STEPS // 10, every=1)
