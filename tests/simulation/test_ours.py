"""The policy of the pool: what it finds, compared with least recently used."""

from __future__ import annotations

import pytest
from campaign import times
from simulation.shapes import SHAPES, trace

from kvloom.paging import worth
from kvloom.simulation.replay import replay
from kvloom.simulation.trace import BLOCK_TOKENS, Request

NUM_BLOCKS = times(6_000)
MIXED = ("chats+in_turn", "agents+few_shot", "lately+at_random")


def rate(requests: list[list[int]], num_blocks: int, policy: str) -> float:
    made = [Request(0, BLOCK_TOKENS * len(blocks), 1, blocks) for blocks in requests]
    return replay(made, num_blocks * BLOCK_TOKENS, policy).block_rate


@pytest.mark.campaign
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", [*SHAPES, *MIXED])
def test_it_is_never_below_least_recently_used_by_more_than_one_point(name: str, backwards: bool) -> None:
    requests = trace(name, NUM_BLOCKS)[:: -1 if backwards else 1]
    for num_blocks in (100, 400):
        ours, lru = (rate(requests, num_blocks, policy) for policy in ("ours", "lru"))
        assert ours > lru - 0.01, f"{ours:.3f} of {num_blocks} blocks, least recently used {lru:.3f}"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "num_blocks", "points"), [("chats", 400, 1), ("few_shot", 100, 4), ("in_turn", 100, 15)]
)
def test_it_finds_more_where_recency_says_little(name: str, num_blocks: int, points: int) -> None:
    requests = trace(name, NUM_BLOCKS)
    gain = rate(requests, num_blocks, "ours") - rate(requests, num_blocks, "lru")
    assert gain > points / 100


def test_with_room_for_all_it_changes_nothing() -> None:
    requests = trace("chats", 5000)
    assert rate(requests, 6000, "ours") == rate(requests, 6000, "lru") > 0


def test_the_same_trace_gives_the_same_hits() -> None:
    requests = trace("chats", 5000)
    assert rate(requests, 200, "ours") == rate(requests, 200, "ours")


def test_what_is_used_once_goes_before_what_is_used_often_when_that_was_seen() -> None:
    once = iter(range(100, 10_000))
    rounds = [[*([block] for block in range(10)), *([next(once)] for _ in range(60))] for _ in range(60)]
    requests = [request for blocks in rounds for request in blocks]
    assert rate(requests, 40, "lru") == 0
    late = rate(requests, 40, "ours") * len(requests) - rate(requests[:2100], 40, "ours") * 2100
    assert late == pytest.approx(10 * 30)  # each time of the second half


def test_the_order_of_use_takes_over_where_it_finds_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One document after the other, then a time in which only the newest are used."""
    requests = trace("in_turn", 20_000) + [[10**6 + i // 3] for i in range(10_000)]
    monkeypatch.setattr(worth, "_LEAD", 0.005)
    assert rate(requests, 100, "ours") > rate(requests, 100, "lru") - 0.01
