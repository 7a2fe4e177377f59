"""How many tokens an assistant drafts: what it takes, how often it is right, and whom it delays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvloom.integrations.transformers.session.drafts.account import Account
from kvloom.integrations.transformers.session.drafts.assisting import DELAY, Assisting, Candidate
from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.drafts.guesses import MOST


class Written:
    """An assistant of one text a request, which takes no time and is told what it would take."""

    most_tokens = 10_000

    def __init__(self, fixed: float, token: float) -> None:
        self.costs, self.pieces, self.read = Costs(), Costs(), dict[str, int]()
        self.costs.fixed, self.costs.token = fixed, token
        self.pieces.token, self.rooms = token, list[float | None]()

    def num_unread(self, state: Any) -> int:
        return len(state.initial_tokens) + len(state.generated_tokens) - self.read.get(state.request_id, 0)

    def room(self, seconds: float | None) -> int:
        self.rooms.append(seconds)
        return 2048 if seconds is None else int(seconds / self.pieces.token)

    def draft(self, states: Any, counts: Any, room: int) -> dict[str, list[int]]:
        found = {}
        for state in states:
            new = min(self.num_unread(state), room)
            self.read[state.request_id] = self.read.get(state.request_id, 0) + new
            room -= new
            if not self.num_unread(state) and counts[state.request_id]:
                found[state.request_id] = [7] * counts[state.request_id]
        return found

    def forget_costs(self) -> None:
        self.costs = Costs()


def assisting(
    fixed: float, token: float, step: float = 1.0, verified: float = 0.0
) -> tuple[Assisting, Written]:
    assistant: Any = Written(fixed, token)
    costs = Costs()
    costs.fixed, costs.token = step, verified
    return Assisting(assistant, costs), assistant


def candidate(name: str, odds: float = 0.9, num_read: int = 8, is_prompt: bool = False) -> Candidate:
    state = SimpleNamespace(
        request_id=name, initial_tokens=[1] * num_read, generated_tokens=[] if is_prompt else [1]
    )
    state._new_tokens_limit, state.generated_len = 1000, lambda: len(state.generated_tokens)
    return Candidate(state, MOST, odds, is_prompt)


@pytest.mark.parametrize("odds", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize(("fixed", "verified"), [(0.01, 0.01), (0.1, 0.0), (0.3, 0.05), (1.0, 0.05)])
def test_one_request_has_as_many_as_pay(odds: float, fixed: float, verified: float) -> None:
    made, _ = assisting(fixed, 0.01, 1 - verified, verified)
    counts = made.counts([candidate("a", odds)], 1, 1.0, 100, None)

    def rate(n: int) -> float:
        return (1 + sum(odds ** (i + 1) for i in range(n))) / (1 + (fixed + 0.01 + verified) * n)

    assert rate(counts["a"]) == pytest.approx(max(map(rate, range(MOST + 1))))


def test_an_assistant_as_slow_as_the_model_is_not_asked() -> None:
    made, assistant = assisting(1.0, 0.01)
    for _ in range(30):
        assert made.drafts([candidate("a", 0.999)], 1, 1, 100, False) == ({}, 0.0)
    assert not assistant.read


def test_an_assistant_that_was_slow_once_is_asked_again() -> None:
    made, assistant = assisting(1.0, 0.01)
    assistant.read = {"a": 8}
    asked = [step for step in range(1, 1000) if made.drafts([candidate("a", 0.999)], 1, 1, 100, False)[0]]
    assert asked[0] == 65


def test_before_it_is_known_what_a_draft_takes_it_has_one_token() -> None:
    made, _ = assisting(0.0, 0.0)
    assert made.counts([candidate("a", 0.999)], 1, 1.0, 100, None) == {"a": 1}


def test_requests_share_the_time_of_a_forward() -> None:
    made, _ = assisting(0.4, 0.001)
    assert not made.counts([candidate("a", 0.3)], 1, 1.0, 100, None)
    few = [candidate(str(i), 0.3 if i else 0.99) for i in range(4)]
    counts = made.counts(few, 4, 1.0, 100, None)
    assert counts["1"] == counts["2"] == counts["3"] > 0


def test_drafts_delay_a_request_without_one_by_an_eighth() -> None:
    made, assistant = assisting(0.02, 0.01)
    assistant.read = {"a": 8}
    found, _ = made.drafts([candidate("a", 0.999)], 2, 2, 100, True)
    assert len(found["a"]) == 4  # of 0.03 each
    found, _ = made.drafts([candidate("a", 0.999)], 2, 2, 100, False)
    assert len(found["a"]) == MOST


def test_a_long_text_is_read_in_pieces_beside_others_and_at_once_alone() -> None:
    made, assistant = assisting(0.02, 0.001)
    assistant.read = {"a": 8}
    both = [candidate("a"), candidate("b", num_read=500)]
    steps = 0
    while assistant.num_unread(both[1].state) > MOST:
        before = assistant.read.get("b", 0)
        made.drafts(both, 2, 2, 100, False)
        assert assistant.read.get("b", 0) - before <= 2 * DELAY / 0.001
        steps += 1
    assert steps >= 3 and max(x for x in assistant.rooms if x is not None) <= 2 * DELAY
    made, assistant = assisting(0.02, 0.001)
    made.drafts([candidate("c", num_read=500)], 1, 1, 100, False)
    assert assistant.read["c"] == 501


def test_a_text_is_not_read_for_the_last_tokens_of_an_answer() -> None:
    made, assistant = assisting(0.02, 0.01)
    last = candidate("a", num_read=500)
    last.state._new_tokens_limit = 4
    assert made.drafts([last], 1, 1, 100, False) == ({}, 0.0) and not assistant.read


def test_an_assistant_that_never_saves_time_is_asked_ever_less() -> None:
    account, asked = Account(), 0
    for _ in range(100_000):
        if account.is_open():
            account.note(0.0, 1.0, True)
            asked += 1
    assert asked <= 32 * 12
    measured = sum(account.is_to_be_measured() for _ in range(100_000))
    assert measured <= 12


def test_reading_is_no_loss_while_drafts_pay() -> None:
    account = Account()
    for _ in range(80):
        assert account.is_open()
        account.note(0.0, 0.1, False)
    for _ in range(1000):
        assert account.is_open()
        account.note(1.0, 0.5, True)
