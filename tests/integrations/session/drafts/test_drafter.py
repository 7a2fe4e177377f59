"""How many tokens are drafted: what steps take, how often guesses are right, and what a step has room for."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.drafts.drafter import Drafter
from kvloom.integrations.transformers.session.drafts.guesses import Guesses

Drafts = dict[int, tuple[list[int], float]]


def drafter(fixed: float, token: float) -> Drafter:
    made = Drafter(cast(Any, None))
    made.costs.fixed, made.costs.token = fixed, token
    return made


@pytest.mark.parametrize("slope", [0.01, 0.1, 0.5])
def test_costs_are_a_line_through_recent_steps(slope: float) -> None:
    draw, costs = random.Random(1), Costs()
    for scale in (3.0, 1.0):  # the machine is faster later
        for _ in range(400):
            count = draw.choice([1, 2, 5, 16])
            costs.note(count, scale * (1 + slope * count))
    assert costs.token == pytest.approx(slope, rel=0.2)
    assert costs.fixed + 16 * costs.token == pytest.approx(1 + 16 * slope, rel=0.05)


def test_steps_of_one_size_leave_a_belief_and_an_interruption_hardly_matters() -> None:
    costs = Costs()
    for _ in range(100):
        costs.note(1, 0.016)
    assert costs.token == pytest.approx(0.001) and costs.fixed == pytest.approx(0.015)
    costs.note(1, 100.0)
    assert costs.fixed + costs.token < 0.02


def test_odds_are_those_of_what_came() -> None:
    text = [*range(20)] * 3
    right = Guesses(text)
    assert right.odds == 0.5 and right.after([], 4) == [0, 1, 2, 3]
    for end in range(1, 20):
        assert right.after(text[:end], 4)[:1] == [text[end]]
    assert right.odds > 0.9
    wrong = Guesses(text)
    draw, new = random.Random(0), list[int]()
    for _ in range(100):  # what was guessed never comes
        guess = wrong.after(new, 4)
        new += [x for x in draw.sample(range(20), 2) if x not in guess[:1]][:1]
        if not guess:
            new += text[:3]
    assert wrong.odds < 0.2


def test_a_draft_is_judged_as_far_as_it_was_right() -> None:
    guesses = Guesses([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert guesses.after([], 3) == [4, 5, 6]
    guesses.after([4, 9], 3)
    assert guesses.odds == pytest.approx((1 + 1) / (2 + 2))


def test_what_goes_on_behind_an_edit_is_judged_apart() -> None:
    """The first token behind it was always another one; what is found again is right."""
    copied = [*range(100, 160)]
    guesses = Guesses([*copied, *copied[:3]])
    generated: list[int] = []
    for at in range(3, 48, 5):
        assert guesses.after(generated, 2) == copied[at : at + 2]
        found = guesses.odds
        generated += [*copied[at : at + 2], 7]
        assert guesses.after(generated, 1) == [copied[at + 3]]
        resumed = guesses.odds
        generated += [copied[at + 2], copied[at + 3], copied[at + 4]]
    assert resumed < 0.2 and found > 0.8


def test_what_is_forced_comes_first_and_is_judged_apart() -> None:
    guesses = Guesses([1, 2, 3, 4, 1, 2, 3])
    assert guesses.after([], 2, [8, 9, 10]) == [8, 9]
    assert guesses.after([8, 9], 9, [7]) == [7] and guesses.odds == pytest.approx(3 / 4)
    assert guesses.after([8, 9, 5], 9) == [] and guesses.odds == 0.5


@pytest.mark.parametrize("odds", [0.01, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("token", [0.001, 0.02, 0.2, 0.5])
def test_one_request_has_as_many_as_pay(odds: float, token: float) -> None:
    """Each further token is worth its odds; it pays where they exceed its share of the time a token takes."""
    counts = drafter(1 - token, token).counts({0: ([7] * 15, odds)}, 1, 1, 100, False)

    def rate(n: int) -> float:
        return (1 + sum(odds ** (i + 1) for i in range(n))) / (1 + token * n)

    assert rate(counts[0]) == pytest.approx(max(map(rate, range(16))))
    assert counts[0] == 0 if odds < token else counts[0] > 0


def test_more_requests_have_fewer_each() -> None:
    made, lengths = drafter(1.0, 0.05), []
    for count in (1, 4, 16, 64):
        counts = made.counts({i: ([7] * 15, 0.8) for i in range(count)}, count, count, 1000, False)
        lengths.append(sum(counts.values()) / count)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1] > 0


def test_who_copies_most_comes_first_and_room_is_kept() -> None:
    drafts: Drafts = {0: ([7] * 15, 0.3), 1: ([7] * 15, 0.95)}
    counts = drafter(1.0, 0.001).counts(drafts, 2, 2, 10, False)
    assert sum(counts.values()) == 10 and counts[1] > counts[0]


def test_a_request_without_a_draft_waits_an_eighth_at_most() -> None:
    drafts: Drafts = {0: ([7] * 15, 0.999)}
    made = drafter(0.96, 0.02)
    assert made.counts(drafts, 2, 2, 100, False)[0] == 15
    assert made.counts(drafts, 2, 2, 100, True)[0] == 6  # of 0.02 beside 1.0
