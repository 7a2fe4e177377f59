"""A session that records: whose its pages are, why they are missed, and which give way."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from integrations.session.requests.test_sharing import PROMPT, ask
from integrations.session.test_programs import NEW, REQUESTS, SESSIONS, Program
from oracles.batching import GREEDY, Session, alone, batching_config, session
from oracles.language_models import make_model
from transformers import GenerationConfig

from kvloom.errors import ArgumentError, StateError
from kvloom.integrations.transformers import continuous_batching
from kvloom.paging import Events, PageStates
from kvloom.tracing.recording import Asked, causes_of, read_lines, requests_of


@pytest.fixture(scope="module")
def model() -> Any:
    return continuous_batching(make_model())


def names_of(events: Events) -> dict[int, str]:
    return {number: more["name"] for _, kind, number, _, more in events if kind == "name"}


def expect_that_events_are_right(running: Session, events: Events) -> None:
    """Pages are held by whom the events say, and each missed page has one cause."""
    state, names, missed = PageStates(), names_of(events), dict[int, list[int]]()
    for event in events:
        state.apply(event)
        if event[1] == "miss":
            places = range(event[4]["first"], event[4]["first"] + event[4]["num_pages"])
            missed.setdefault(event[2], []).extend(places)
    held = {page: {names[x] for x in counts} for page, counts in state.holders.items()}
    expected: dict[int, set[str]] = {}
    for name, pages in running.cache.block_table.items():
        for page in pages:
            expected.setdefault(page, set()).add(name)
    assert held == expected and all(set(x.values()) == {1} for x in state.holders.values())
    for number, asked in requests_of(events.lines()).items():
        assert missed.get(number, []) == [*range(asked.found, len(asked.nodes))]


def asked_by(events: Events) -> dict[str, Asked]:
    return {names_of(events)[number]: asked for number, asked in requests_of(events.lines()).items()}


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(SESSIONS // 2))
def test_each_page_of_a_random_session_is_held_by_whom_the_events_say(seed: int) -> None:
    draw = random.Random(seed)
    policy, is_shared = draw.choice(["lru", "ours"]), seed % 6 != 5
    model = continuous_batching(make_model(), share=is_shared, policy=policy)
    options = {
        "page_size": 8,
        "num_blocks": draw.choice([15, 18]),
        "max_batch_tokens": draw.choice([16, 300]),
    }
    generation = {"max_new_tokens": NEW, "num_return_sequences": 1 + seed % 2, "do_sample": bool(seed % 2)}
    requests = [[*x, 3] for x in REQUESTS]  # a prompt that is forked has two tokens
    with session(model, generation, **options) as running, pytest.MonkeyPatch.context() as patch:
        events = running.manager.record()
        step = running.step

        def checked_step() -> bool:
            is_busy = step()
            expect_that_events_are_right(running, events)
            return is_busy

        patch.setattr(running, "step", checked_step)
        patch.setattr("integrations.session.test_programs.REQUESTS", requests)
        program = Program(seed)
        program.run(running)
        report = running.manager.report()
        causes = causes_of(requests_of(events.lines()).values())
        assert {x.split("__child")[0] for x in names_of(events).values()} <= program.asked.keys()
        assert bool(causes) is is_shared
        # Nothing is left in use, as far as the figures of what a larger pool would have kept are concerned.
        assert report.active == 0 == events.causes._num_held and not events.causes._owed


def test_a_request_that_waits_for_room_is_looked_up_once(model: Any) -> None:
    with session(model, {"max_new_tokens": 12}, num_blocks=6) as running:
        events = running.manager.record()
        for name in "abc":
            running.manager.add_request([3 + ord(name) % 7, *PROMPT], request_id=name, cache_salt=name)
        running.run()
    begun = [names_of(events)[number] for _, kind, number, _, _ in events if kind == "begin"]
    assert sorted(begun) == ["a", "b", "c"] == sorted(set(names_of(events).values()))


def test_a_request_that_is_preempted_begins_again_under_its_id(model: Any) -> None:
    with session(model, {"max_new_tokens": 40}, num_blocks=9, max_batch_tokens=64) as running:
        events = running.manager.record()
        for i in range(4):
            running.manager.add_request(PROMPT[i:], request_id=f"{i}")
        running.run()
        preemptions = running.manager.report().preemptions
    assert preemptions > 0
    assert len(names_of(events)) == 4 + preemptions and {*names_of(events).values()} == {*"0123"}


def test_a_fork_is_a_request_that_asks_for_nothing(model: Any) -> None:
    with session(model, {"num_return_sequences": 3, "do_sample": True}) as running:
        events = running.manager.record()
        running.manager.add_request(PROMPT, request_id="a")
        running.run()
    asked = asked_by(events)
    assert asked.keys() == {"a", "a__child#0", "a__child#1"}
    assert [len(x.nodes) for x in asked.values()] == [4, 0, 0]


def test_what_is_held_when_a_recording_begins_is_nobodys(model: Any) -> None:
    with session(model) as running:
        running.manager.record()
        running.manager.add_request(PROMPT[:20])
        running.manager.add_request(PROMPT, cache_salt="other")
        running.step()
        events = running.manager.record()
        state = PageStates()
        for event in events:
            state.apply(event)
        assert {x for counts in state.holders.values() for x in counts} == {0}
        running.run()
        ask(running, PROMPT[::-1], request_id="later")
    assert {number for _, kind, number, _, _ in events if kind == "release"} == {0, 1}
    assert names_of(events) == {1: "later"}


def test_why_and_the_files_say_the_same_of_a_session(model: Any, tmp_path: Path) -> None:
    with session(model, num_blocks=8) as running:
        manager = running.manager
        manager.record()
        assert manager.why(PROMPT)[0].cause == "never stored"
        ask(running, PROMPT, request_id="first")
        assert manager.why(PROMPT) == []
        (miss,) = manager.why([*PROMPT[:40], *[5] * 9])
        assert (miss.cause, miss.at) == ("tokens differ", 40)
        assert manager.why(PROMPT, salt="other")[0].cause == "other salt"
        ask(running, PROMPT[::-1], request_id="second")
        (miss,) = manager.why(PROMPT)
        assert (miss.cause, miss.by, miss.more) == ("evicted", 2, 1)
        ask(running, PROMPT, request_id="third")
        manager.save_events(tmp_path / "e.jsonl")
        assert manager.view(tmp_path / "e.html", lambda ids: f"{ids[0]} and more") == tmp_path / "e.html"
        running.cache.reset()
    head, *lines = read_lines(tmp_path / "e.jsonl")
    assert head["page_bytes"] == running.manager.report().page_bytes
    assert not any("text" in x or "tokens" in x for x in lines if "node" in x)
    assert [x["name"] for x in lines if x.get("kind") == "name"] == ["first", "second", "third"]
    assert causes_of(requests_of(lines).values()) == {"never stored": 2, "below": 6, "evicted": 1}
    assert "3 and more" in (tmp_path / "e.html").read_text()


def test_what_gives_way_is_the_policys_choice(model: Any) -> None:
    expected = [alone(model, x, 12) for x in REQUESTS]
    continuous_batching(model, policy="ours")
    with session(model, {"max_new_tokens": 12}, num_blocks=12) as running:
        manager = running.manager
        manager.record()
        names = [manager.add_request(x) for x in REQUESTS]
        running.run()
        assert [running.outputs[x].generated_tokens for x in names] == expected
        assert running.cache.requests.pages.pool.worth is not None
        evicted = [more for _, kind, _, _, more in manager.events if kind == "miss"]
        assert any(x["cause"] == "evicted" for x in evicted) and not any("more" in x for x in evicted)
    continuous_batching(model)


def test_a_policy_that_is_none_is_refused_before_anything(model: Any) -> None:
    before = model.init_continuous_batching
    with pytest.raises(ArgumentError, match="policy must be one of lru, ours, got 'best'"):
        continuous_batching(model, policy="best")
    assert model.init_continuous_batching is before


def test_a_session_in_a_thread_is_recorded_from_its_beginning(model: Any, tmp_path: Path) -> None:
    manager = model.init_continuous_batching(GenerationConfig(max_new_tokens=8, **GREEDY), batching_config())
    for call in (lambda: manager.why(PROMPT), lambda: manager.save_events(tmp_path / "x"), manager.view):
        with pytest.raises(StateError, match=r"^events are not recorded, call record\(\) before"):
            call()
    with pytest.raises(ArgumentError, match="capacity must be at least 1, got 0"):
        manager.record(0)
    manager.record()
    manager.start()
    failed: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(30):
                manager.save_events(tmp_path / "e.jsonl", lambda ids: str(ids[0]))
                read_lines(tmp_path / "e.jsonl")
                manager.why(REQUESTS[0])
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    names = [manager.add_request(x) for x in REQUESTS]
    manager.stop(block=True)
    reader.join()
    assert not failed
    manager.save_events(tmp_path / "e.jsonl")
    recorded = read_lines(tmp_path / "e.jsonl")
    assert {x["name"] for x in recorded if x.get("kind") == "name"} == {*names}
    assert len(requests_of(recorded)) == len(names)
    manager.start()  # with new pages
    manager.stop(block=True)
    assert manager.events is None
