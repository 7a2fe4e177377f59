"""An allocation that fails changes nothing, wherever it fails: no page is lost, none is given back twice."""

from __future__ import annotations

import pytest
from campaign import times
from paging.oracle import Oracle
from paging.world import Walk

NUM_SCENARIOS = times(50)


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(0, NUM_SCENARIOS, 25))
def test_every_allocation_of_a_scenario_can_fail(first: int) -> None:
    num_failures = 0
    for seed in range(first, first + 25):
        fail_at, reached = 0, True
        while reached:
            fail_at += 1
            walk = Walk(Oracle(4 + seed % 9, 1 + seed % 4), seed, num_requests=5)
            walk.world.pool.fail_at = fail_at
            walk.run(60)
            walk.world.idle()
            reached = walk.world.pool.num_takes >= fail_at
            num_failures += reached
    assert num_failures > 500
