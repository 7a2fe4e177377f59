"""All pairs of parameters are tested where not all products are."""

from __future__ import annotations

import itertools

import pytest
from oracles.pairs import in_turn, pairwise

PARAMETERS = [("Llama", "GPT-2", "Phi", "OPT"), ("auto", "int8", "int4"), (1, 2), (False, True)]


def test_any_two_values_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLOOM_PRODUCTS", raising=False)
    cases = pairwise(*PARAMETERS)
    for (i, first), (j, second) in itertools.combinations(enumerate(PARAMETERS), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(first, second))
    assert len(cases) == 12 < len(set(itertools.product(*PARAMETERS)))
    assert cases == pairwise(*PARAMETERS)


def test_no_pair_is_the_only_one_of_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter of many values does not hold the same two of the others together."""
    monkeypatch.delenv("KVLOOM_PRODUCTS", raising=False)
    cases = pairwise(range(20), "ab", "xy")
    assert {sum(case[1:] == pair for case in cases) for pair in itertools.product("ab", "xy")} <= {9, 10, 11}


def test_each_value_comes_once_and_the_others_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLOOM_PRODUCTS", raising=False)
    assert in_turn("abcde", (1, 2), "xy") == [
        ("a", 1, "x"),
        ("b", 1, "y"),
        ("c", 2, "x"),
        ("d", 2, "y"),
        ("e", 1, "x"),
    ]


def test_products_are_had_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_PRODUCTS", "1")
    assert pairwise(*PARAMETERS) == in_turn(*PARAMETERS) == list(itertools.product(*PARAMETERS))
