"""Sessions of agents: the next request of one begins behind all tokens of the one before, or says why not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from integrations.models.test_families import family
from integrations.session.requests.test_stores import KINDS, NEW, stem, url_of
from oracles.batching import Session, session
from oracles.pairs import in_turn
from oracles.stateful_models import NEEDS_STATES_IN_SESSIONS, stateful_model

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import continuous_batching
from kvloom.integrations.transformers.session.requests.agent_sessions import AgentSessions, num_common
from kvloom.integrations.transformers.session.requests.prompt import AgentTurn
from kvloom.store import KVStore


@contextmanager
def sessions(model: Any, kv: str = "auto", store: KVStore | None = None, **options: Any) -> Iterator[Session]:
    """A session of a model that is as before when it has ended, and its store has everything."""
    continuous_batching(model, kv, store=store)
    try:
        with session(model, {"max_new_tokens": NEW}, **options) as running:
            yield running
        assert store is None or store.flush()
    finally:
        continuous_batching(model, None)


def ask(
    running: Session, prompt: list[int], name: str | None = "a", owner: str = "", **options: Any
) -> tuple[list[int], AgentTurn]:
    """The answer to one request, of a session if it has a name."""
    turn = AgentTurn(owner, name or "")
    [number] = running.manager.add_requests([prompt], agent_turn=turn if name else None, **options)
    running.run()
    assert running.outputs[number].error is None
    return running.outputs[number].generated_tokens, turn


def store_in(folder: Path) -> KVStore:
    return KVStore(url_of(folder), read="always")


def outcome(turn: AgentTurn) -> tuple[int | None, int, str]:
    return turn.num_kept, turn.num_restored, turn.reason


def kept(running: Session) -> int:
    return int(running.manager.report().kept)


@pytest.mark.parametrize(("name", "page_size"), in_turn(list(KINDS), [16, 32]))
def test_the_next_request_computes_nothing_twice(name: str, page_size: int) -> None:
    """Not the last page either, which is full in part; the tokens are those where nothing is known."""
    model, prompts = family(name), [stem(60), stem(21, 2), stem(3, 3), stem(70, 4)]
    options: dict[str, Any] = {"page_size": page_size, "max_batch_tokens": 64}
    text, expected = list[int](), list[list[int]]()
    for prompt in prompts:
        with sessions(model, KINDS[name], **options) as running:
            expected.append(ask(running, text + prompt, None)[0])
        text = text + prompt + expected[-1]
    with sessions(model, KINDS[name], **options) as running:
        running.manager.record()
        text = []
        for prompt, answer in zip(prompts, expected, strict=True):
            given, turn = ask(running, text + prompt)
            assert given == answer
            known = len(text) - 1 if text else 0
            assert outcome(turn) == (known, known, "" if text else "no session of this id is known")
            text = text + prompt + answer
        assert (0 if name == "Mistral" else (len(text) - 1) // page_size) < kept(
            running
        )  # it has windows only


def test_a_prompt_that_parts_from_the_session_says_where() -> None:
    model, prompt = family("Llama"), stem(60)
    with sessions(model) as running:
        answer, _ = ask(running, prompt)
        text = (prompt + answer)[:-1]  # 67 tokens, 3 of them in a page of their own
    cases = [
        ([*text[:66], 2, 2], 66, "the prompt has the first 66 of the session's 67 tokens"),
        ([*text[:50], 2, 2], 48, "the prompt has the first 50 of the session's 67 tokens"),
        (text[:66], 65, "the prompt has the first 66 of the session's 67 tokens"),
        (text, 66, "the last token of a prompt is always computed"),
        ([2, *text], 0, "the prompt has the first 0 of the session's 67 tokens"),
    ]
    for asked, num_restored, reason in cases:
        with sessions(model) as running:
            expected, _ = ask(running, asked, None)
        with sessions(model) as running:
            ask(running, prompt)
            given, turn = ask(running, asked)
            assert given == expected
            assert outcome(turn) == (67, num_restored, reason)


def test_pages_of_sessions_stay_when_others_need_room() -> None:
    model, prompt, agents = family("Llama"), stem(100), AgentSessions()
    for name in ("a", None):
        with sessions(model, agents=agents, num_blocks=24) as running:
            answer, _ = ask(running, prompt, name)
            for seed in range(2, 8):
                ask(running, stem(150, seed), None)
            _, turn = ask(running, prompt + answer + [5])
            assert turn.num_restored == (107 if name else 0)


def test_a_request_that_needs_all_pages_has_them() -> None:
    model, prompt = family("Llama"), stem(100)
    with sessions(model, num_blocks=16) as running:
        answer, _ = ask(running, prompt)
        assert kept(running) == 7
        ask(running, stem(240, 2), None)
        assert kept(running) == 0
        _, turn = ask(running, prompt + answer)
        assert outcome(turn) == (107, 0, "a request needed the pages")


def test_each_owner_has_a_budget_of_which_the_newest_sessions_have_the_pages() -> None:
    model = family("Llama")
    with sessions(model, agents=AgentSessions(share=0.5, num_owners=2), num_blocks=40) as running:
        for owner in ("one", "two"):
            for name in ("a", "b", "c"):
                ask(running, stem(60, ord(name) + len(owner)), name, owner, cache_salt=owner)
        for owner in ("one", "two"):  # 10 pages each, and sessions of 5
            assert [x.is_held for x in running.manager.agents.report(owner)] == [False, True, True]
        assert running.manager.agents.report("one")[0].reason == "the pages were more than sessions may hold"
        assert kept(running) == 20
        ask(running, stem(170, 9), "d", "one")
        assert [x.is_held for x in running.manager.agents.report("one")] == [False, False, False, False]
        assert [x.is_held for x in running.manager.agents.report("two")] == [False, True, True]


def test_pages_that_sessions_of_an_owner_share_count_once() -> None:
    model, common = family("Llama"), stem(96)
    with sessions(model, agents=AgentSessions(share=0.5), num_blocks=24) as running:
        for name in ("a", "b", "c"):
            ask(running, [*common, ord(name) % 90, 7], name)
        assert [x.is_held for x in running.manager.agents.report("")] == [True, True, True]
        assert kept(running) == 6 + 3


def test_sessions_expire_and_are_forgotten() -> None:
    model, now = family("Llama"), [0.0]
    agents = AgentSessions(seconds=100, clock=lambda: now[0])
    with sessions(model, agents=agents) as running:
        answer, _ = ask(running, stem(60))
        now[0] = 60
        ask(running, stem(60) + answer)
        now[0] = 120
        ask(running, stem(40, 2), "b")
        [a, b] = agents.report("")
        assert (a.name, a.began, a.used, a.expires, b.name, b.used) == ("a", 0, 60, 160, "b", 120)
        now[0] = 160
        assert [x.name for x in agents.report("")] == ["b"]
        assert agents.forget("", "b") and not agents.forget("", "b")
        assert agents.report("") == []
        assert kept(running) == 0
        _, turn = ask(running, stem(60) + answer)
        assert outcome(turn) == (0, 0, "no session of this id is known")
        assert running.manager.report().tokens_found == 67 + 64  # full pages are found as by any request


def test_names_of_owners_and_salts_are_apart() -> None:
    model, prompt = family("Llama"), stem(60)
    with sessions(model) as running:
        for text, name in ((prompt, "a"), (prompt[:5], "b")):  # the second one fills no page
            answer, _ = ask(running, text, name, "one", cache_salt="one")
            for owner, salt, reason in (
                ("two", "two", "no session of this id is known"),
                ("one", "other", "the session has another cache_salt"),
            ):
                num_found = running.manager.report().tokens_found
                _, turn = ask(running, text + answer, name, owner, cache_salt=salt)
                assert (turn.num_restored, turn.reason) == (0, reason)
                assert running.manager.report().tokens_found == num_found


def test_a_changed_model_restores_nothing() -> None:
    model, prompt = family("Llama"), stem(60)
    weight = model.model.layers[1].mlp.down_proj.weight
    with sessions(model) as running:
        answer, _ = ask(running, prompt)
        short, _ = ask(running, prompt[:5], "short")  # fills no page
        weight.data.mul_(1.5)
        expected, _ = ask(running, prompt + answer, None, cache_salt="nobody's")
        given, turn = ask(running, prompt + answer)
        assert given == expected
        assert outcome(turn) == (67, 0, "the model has changed")
        assert ask(running, prompt + answer + given)[1].num_restored == 75
        assert outcome(ask(running, prompt[:5] + short, "short")[1]) == (12, 0, "the model has changed")


def test_requests_of_one_session_at_once_all_restore_it() -> None:
    model, prompt = family("Llama"), stem(60)
    tails = [stem(9, 5), stem(40, 6)]
    with sessions(model) as running:
        answer, _ = ask(running, prompt)
        text = prompt + answer
        expected = [ask(running, text + tail, None, cache_salt="x")[0] for tail in tails]
        turns = [AgentTurn("", "a"), AgentTurn("", "a")]
        names = [
            running.manager.add_request(text + tail, agent_turn=turn)
            for tail, turn in zip(tails, turns, strict=True)
        ]
        running.run()
        assert [running.outputs[name].generated_tokens for name in names] == expected
        assert [outcome(turn) for turn in turns] == [(67, 67, "")] * 2


def test_a_cancelled_request_leaves_what_it_computed() -> None:
    model, prompt = family("Llama"), stem(60)
    with sessions(model) as running:
        name = running.manager.add_request(prompt, agent_turn=AgentTurn("", "a"))
        for _ in range(4):
            running.step()
        running.manager.cancel_request(name)
        running.run()
        [held] = running.manager.agents.report("")
        assert held.is_held and len(prompt) < held.num_tokens < len(prompt) + NEW


def test_a_session_outlives_preemption_and_a_session_that_begins_again() -> None:
    model, prompt = family("Llama"), stem(60)
    with sessions(model, num_blocks=14) as running:
        answer, _ = ask(running, prompt)
        turn = AgentTurn("", "a")
        names = [running.manager.add_request(stem(90, 2)), running.manager.add_request(stem(70, 3))]
        names.append(running.manager.add_request(prompt + answer, agent_turn=turn))
        running.run()
        assert [running.outputs[name].error for name in names] == [None] * 3
        assert turn.num_kept == 67
        text = prompt + answer + running.outputs[names[2]].generated_tokens
        running.cache.reset()
        _, turn = ask(running, text)
        assert outcome(turn) == (75, 0, "the server gave up all pages")


@NEEDS_STATES_IN_SESSIONS
def test_states_are_restored_where_they_are_kept() -> None:
    model, prompt = stateful_model("qwen3_next"), stem(70)
    continuous_batching(model, state_interval=32)
    with session(model, {"max_new_tokens": NEW}, num_blocks=40) as running:
        answer, _ = ask(running, prompt)
        for seed in range(2, 9):
            ask(running, stem(150, seed), None)
        _, turn = ask(running, prompt + answer + stem(5, 2))
        assert outcome(turn) == (77, 64, "recurrent states are found at some tokens only")
    continuous_batching(model, None)


@pytest.mark.parametrize(
    ("name", "num_blocks", "seed"), in_turn(["Llama", "Gemma3", "Mistral"], [14, 24, 200], [0, 1, 2, 3])
)
def test_random_agents_have_the_tokens_of_requests_that_find_nothing(
    name: str, num_blocks: int, seed: int, tmp_path: Path
) -> None:
    """Few pages, preemption, prompts that part, cancelled requests, sessions that are forgotten."""
    model, draw, kv = family(name, num_hidden_layers=2), random.Random(seed), KINDS[name]
    asked: dict[str, list[int]] = {}
    texts: dict[str, list[int]] = {}
    options: dict[str, Any] = {"num_blocks": num_blocks, "max_batch_tokens": draw.choice([16, 64])}
    with sessions(model, kv, store_in(tmp_path) if seed % 2 else None, **options) as running:
        for _ in range(20):
            agent = draw.choice("abcd")
            text = texts.get(agent, [])
            if draw.random() < 0.2:
                text = text[: draw.randrange(len(text) + 1)]
            prompt = (text if len(text) < 100 else []) + [
                draw.randrange(3, 99) for _ in range(draw.randrange(1, 25))
            ]
            number = running.manager.add_request(prompt, agent_turn=AgentTurn("", agent))
            asked[number] = prompt
            for _ in range(draw.randrange(12)):
                running.step()
            if draw.random() < 0.1:
                running.manager.cancel_request(number)
            if draw.random() < 0.1:
                running.manager.agents.forget("", agent)
            if draw.random() < 0.5:
                running.run()
            if number in running.outputs:
                texts[agent] = prompt + running.outputs[number].generated_tokens
        running.run()
        answers = {
            number: running.outputs[number].generated_tokens for number in asked if number in running.outputs
        }
    with sessions(model, kv) as running:
        for number, answer in answers.items():
            assert ask(running, asked[number], None, cache_salt=str(number))[0][: len(answer)] == answer
    assert len(answers) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.5}, "share must be from 0 to 1, got 1.5"),
        ({"num_owners": 0}, "num_owners must be at least 1, got 0"),
        ({"seconds": float("nan")}, "seconds must be at least 0, got nan"),
    ],
)
def test_limits_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        AgentSessions(**options)


def test_a_turn_must_be_one() -> None:
    with (
        sessions(family("Llama")) as running,
        pytest.raises(ArgumentError, match="agent_turn must be an AgentTurn"),
    ):
        running.manager.add_request([3, 4], agent_turn="a")


def test_tokens_in_common() -> None:
    draw = random.Random(0)
    for _ in range(200):
        one = [draw.randrange(2) for _ in range(draw.randrange(6))]
        other = [draw.randrange(2) for _ in range(draw.randrange(6))]
        expected = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        assert num_common(one, other) == expected
