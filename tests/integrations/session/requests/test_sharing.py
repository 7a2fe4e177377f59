"""Which requests share pages, and which never do."""

from __future__ import annotations

from typing import Any

import pytest
from oracles.asked import Asked
from oracles.batching import alone, session
from oracles.language_models import make_model

from kvloom.core.text import Text
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import continuous_batching
from kvloom.integrations.transformers.session.requests.prompt import Prompt as Request

PROMPT = [3 + (7 * i) % 90 for i in range(70)]


@pytest.fixture(scope="module")
def model() -> Any:
    return continuous_batching(make_model())


def ask(running: Any, prompt: list[int], **options: Any) -> Any:
    name = running.manager.add_request(prompt, **options)
    running.run()
    return running.outputs[name]


def test_a_first_prompt_finds_nothing(model: Any) -> None:
    with session(model) as running:
        name = running.manager.add_request(PROMPT)
        running.step()
        (request,) = running.manager.page_map().requests
        assert (request.request_id, request.num_found) == (name, 0)
        assert running.manager.tokens_found(name) == 0
        running.run()


def test_a_second_prompt_reads_the_pages_of_the_first(model: Any) -> None:
    with session(model) as running:
        first = ask(running, PROMPT)
        assert running.manager.report().tokens_found == 0
        second = ask(running, PROMPT)
        report = running.manager.report()
    assert first.generated_tokens == second.generated_tokens == alone(model, PROMPT, 8)
    assert report.tokens_found == 64  # four pages of 16; the last token is always computed
    assert report.tokens_asked == 140


def test_a_salt_never_finds_the_pages_of_another(model: Any) -> None:
    with session(model) as running:
        for salt in ("", "a", "b"):
            ask(running, PROMPT, cache_salt=salt)
            assert running.manager.report().tokens_found == 0
        ask(running, PROMPT, cache_salt="a")
        assert running.manager.report().tokens_found == 64


def test_a_salt_outlives_a_preemption(model: Any) -> None:
    with session(model, {"max_new_tokens": 40}, num_blocks=9, max_batch_tokens=64) as running:
        names = [running.manager.add_request(PROMPT[i:], cache_salt=f"{i}") for i in range(4)]
        salts = set()
        while running.step() or running.processor.has_pending_requests():
            salts |= {(x.request_id, x.salt) for x in running.manager.page_map().requests}
        assert running.manager.report().preemptions > 0
    assert salts == {(name, f"{i}") for i, name in enumerate(names)}


def test_nothing_is_shared_if_the_caller_says_so() -> None:
    for share, allowed in ((False, True), (True, False)):
        model = continuous_batching(make_model(), share=share)
        with session(model, allow_block_sharing=allowed) as running:
            ask(running, PROMPT)
            ask(running, PROMPT)
            report = running.manager.report()
        assert report.tokens_found == report.evictable == 0 and report.free == report.num_pages


def test_requests_that_come_together_compute_their_prefix_once(model: Any) -> None:
    requests = [[*PROMPT, 3 + i] for i in range(5)]
    with session(model) as running:
        for request in requests:
            running.manager.add_request(request)
        running.run()
        report = running.manager.report()
    assert report.tokens_found == 4 * 64
    assert report.tokens_computed == sum(map(len, requests)) - 4 * 64 + 5 * 7


def test_a_prefix_in_chunks_is_computed_once_too(model: Any) -> None:
    with session(model, max_batch_tokens=24) as running:
        names = [running.manager.add_request([*PROMPT, 3 + i]) for i in range(4)]
        running.run()
        report = running.manager.report()
    assert report.tokens_found == 3 * 64
    expected = [alone(model, [*PROMPT, 3 + i], 8) for i in range(4)]
    assert [running.outputs[name].generated_tokens for name in names] == expected


def test_another_salt_does_not_wait(model: Any) -> None:
    with session(model) as running:
        for salt in ("a", "b"):
            running.manager.add_request(PROMPT, cache_salt=salt)
        running.step()
        assert running.manager.report().tokens_computed == 2 * len(PROMPT)
        running.run()


def test_those_who_wait_go_on_when_the_one_they_wait_for_is_cancelled(model: Any) -> None:
    with session(model, max_batch_tokens=8) as running:
        first, second = (running.manager.add_request(PROMPT) for _ in range(2))
        running.step()
        running.manager.cancel_request(first)
        running.run()
    assert running.outputs.keys() == {second}
    assert running.outputs[second].generated_tokens == alone(model, PROMPT, 8)


def test_the_page_that_is_idle_for_longest_is_given_up(model: Any) -> None:
    prompts = [[3 + i, *PROMPT[:32]] for i in range(3)]
    with session(model, num_blocks=8) as running:
        ask(running, prompts[0])
        ask(running, prompts[1])
        ask(running, prompts[0])  # used again
        found = running.manager.report().tokens_found
        ask(running, [90, *PROMPT])  # takes what is free, and evicts
        ask(running, prompts[0])
        assert running.manager.report().tokens_found == found + 32
        ask(running, prompts[1])
        assert running.manager.report().tokens_found < found + 64


def test_pages_are_kept_for_the_next_session(model: Any) -> None:
    requests = [PROMPT, PROMPT[:40]]
    first = model.generate_batch(requests, persistent_manager=True, max_new_tokens=8)
    manager = model._cached_continuous_batching_manager
    found = manager.report().tokens_found
    second = model.generate_batch(requests, persistent_manager=True, max_new_tokens=8)
    assert manager is model._cached_continuous_batching_manager
    assert manager.report().tokens_found == found + 64 + 32
    model.destroy_cached_continuous_batching_manager()
    assert [x.generated_tokens for x in first.values()] == [x.generated_tokens for x in second.values()]


def test_the_page_map_says_who_holds_what(model: Any) -> None:
    with session(model) as running:
        ask(running, PROMPT)
        names = [running.manager.add_request([*PROMPT, i]) for i in (3, 4)]
        running.step()
        mapped, report = running.manager.page_map(), running.manager.report()
        first, second = mapped.requests
        assert [first.request_id, second.request_id] == names
        assert first.pages[:4] == second.pages[:4] and not {*first.pages[4:]} & {*second.pages[4:]}
        assert (first.num_found, first.num_tokens) == (64, 71)
        assert [mapped.states[page] for page in first.pages] == ["shared"] * 4 + ["active"]
        counts = {state: mapped.states.count(state) for state in ("free", "shared", "evictable")}
        assert counts == {"free": report.free, "shared": report.shared, "evictable": report.evictable}
        assert report.free + report.active + report.evictable == report.num_pages == len(mapped.states)
        assert (report.running, report.waiting) == (2, 0)
        running.run()


@pytest.mark.parametrize("salt", [1, True, None, b"tenant", ("tenant",)])
def test_a_salt_that_is_no_string_is_refused_by_name(salt: Any) -> None:
    manager = continuous_batching(make_model()).init_continuous_batching()
    manager.record()
    with pytest.raises(ArgumentError, match=r"^salt must be a string, got "):
        manager.why([1, 2, 3], salt=salt)
    with pytest.raises(ArgumentError, match=r"^cache_salt must be a string, got "):
        manager.add_request([1, 2, 3], cache_salt=salt)


def test_a_request_that_begins_asks_each_page_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with session(model) as running:
        ask(running, PROMPT)
        name = running.manager.add_request(PROMPT)
        asked = Asked(monkeypatch)
        held = running.processor.cache.requests.prefixes.begin_request(
            Request(name, Text(PROMPT), "", None, 69)
        )
        held.table.release()
        assert asked.walks == [4]
