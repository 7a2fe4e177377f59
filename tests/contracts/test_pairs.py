"""All pairs of parameters are tested where not all products are."""

from __future__ import annotations

import itertools

import campaign
import pytest
from oracles.pairs import in_turn, pairwise

PARAMETERS = [("Llama", "GPT-2", "Phi", "OPT"), ("auto", "int8", "int4"), (1, 2), (False, True)]


def test_any_two_values_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "given", None)
    cases = pairwise(*PARAMETERS)
    for (i, first), (j, second) in itertools.combinations(enumerate(PARAMETERS), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(first, second))
    assert len(cases) == 12 < len(set(itertools.product(*PARAMETERS)))
    assert cases == pairwise(*PARAMETERS)


def test_no_pair_is_the_only_one_of_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter of many values does not hold the same two of the others together."""
    monkeypatch.setattr(campaign, "given", None)
    cases = pairwise(range(20), "ab", "xy")
    assert {sum(case[1:] == pair for case in cases) for pair in itertools.product("ab", "xy")} <= {9, 10, 11}


def test_each_value_comes_once_and_the_others_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "given", None)
    assert in_turn("abcde", (1, 2), "xy") == [
        ("a", 1, "x"),
        ("b", 1, "y"),
        ("c", 2, "x"),
        ("d", 2, "y"),
        ("e", 1, "x"),
    ]


def test_a_campaign_has_whole_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "given", 1)
    assert pairwise(*PARAMETERS) == in_turn(*PARAMETERS) == list(itertools.product(*PARAMETERS))


@pytest.mark.parametrize(("given", "expected"), [(None, 12), (1, 12), (40, 480)])
def test_a_campaign_is_as_many_times_as_long(
    given: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "given", given)
    assert campaign.times(12) == expected
