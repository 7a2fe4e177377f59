"""Each benchmark of traces and events runs on a small case."""

from collections.abc import Callable
from typing import Any

import pytest

from kvloom.simulation.replay import POLICIES

pytest.importorskip("transformers")


def test_simulate_replays_every_policy_and_none_beats_the_optimum(quick: Callable[..., Any]) -> None:
    rows = quick("simulate")["rows"]
    for case in {(x["trace"], x["capacity"]) for x in rows}:
        rates = {x["policy"]: x["block_rate"] for x in rows if (x["trace"], x["capacity"]) == case}
        assert 0.0 <= max(rates.values()) == rates["opt"] and len(rates) == len(POLICIES)


def test_events_compares_steps_that_record_with_others(quick: Callable[..., Any]) -> None:
    result = quick("events")
    assert result["steps"] == 20 and result["ratio"] > 0 and result["request_us"].keys() == {"off", "on"}


def test_causes_sum_to_the_misses(quick: Callable[..., Any]) -> None:
    (row,) = quick("causes")["rows"]
    assert sum(row["causes"].values()) == row["asked"] - row["found"] > 0
