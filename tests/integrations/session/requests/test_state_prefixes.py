"""Prefixes in sessions of models with recurrent states: found where states are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.session.steps.test_session_states import FAMILIES, PROMPT, STEP
from oracles.batching import GREEDY, alone, batching_config, session
from oracles.stateful_models import NEEDS_STATES_IN_SESSIONS, small_model, stateful_model
from transformers import GenerationConfig

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import continuous_batching

pytestmark = NEEDS_STATES_IN_SESSIONS


@pytest.fixture(scope="module")
def model() -> Any:
    return continuous_batching(stateful_model("qwen3_next"), state_interval=STEP)


def found(running: Any, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """Tokens of one more request, and how many of its prompt it found."""
    before, name = running.manager.report().tokens_found, running.manager.add_request(prompt, **options)
    running.run()
    return running.outputs[name].generated_tokens, running.manager.report().tokens_found - before


@pytest.mark.parametrize(
    "name", [x for x in FAMILIES if x in ("qwen3_next", "lara_mini", "falcon_h1", "lfm2", "kimi_linear")]
)
def test_prefixes_are_found_where_states_are_kept(name: str) -> None:
    model = continuous_batching(small_model(name), state_interval=STEP)
    parted = [[*PROMPT[:50], *[x] * 18] for x in (4, 5)]
    prompts = {  # and the tokens that each finds
        "the first": (PROMPT, 0),
        "the same, whose last token is computed": (PROMPT, 64),
        "one that parts from it": (parted[0], 0),
        "another one, where the first has left its states": (parted[1], 32),
        "one that goes on": ([*PROMPT, *PROMPT], 64),
        "the same with the end of that": ([*PROMPT, *PROMPT, 7], 128),
        "one that ends on the grid": (PROMPT[:64], 32),
    }
    expected = {why: (alone(model, x, 8), count) for why, (x, count) in prompts.items()}
    with session(model) as running:
        assert {why: found(running, x) for why, (x, _) in prompts.items()} == expected
        assert found(running, PROMPT, cache_salt="a") == (expected["the first"][0], 0)
        assert running.manager.report().found_state_bytes > 0


@pytest.mark.parametrize("max_batch_tokens", [7, 31, 32, 50])
def test_states_of_a_prompt_are_found_however_it_was_cut(model: Any, max_batch_tokens: int) -> None:
    expected = alone(model, PROMPT, 8)
    with session(model, max_batch_tokens=max_batch_tokens) as running:
        assert found(running, PROMPT) == (expected, 0)
        assert found(running, PROMPT) == (expected, 64)


def test_a_recording_says_which_request_keeps_states_and_which_finds_them(model: Any) -> None:
    with session(model) as running:
        events = running.manager.record()
        for _ in range(2):
            found(running, PROMPT)
        told = [(x["what"], x["request"]) for x in events.lines() if x.get("kind") == "states"]
    assert [what for what, _ in told] == ["kept", "found"]
    assert 0 < told[0][1] < told[1][1]


def test_requests_that_come_together_compute_their_prefix_once(model: Any) -> None:
    requests = [[*PROMPT, 3 + i] for i in range(5)]
    expected = [alone(model, x, 8) for x in requests]
    with session(model) as running:
        names = running.manager.add_requests(requests)
        running.run()
        report = running.manager.report()
    assert [running.outputs[x].generated_tokens for x in names] == expected
    assert report.tokens_found == 4 * 64 and report.steps == 1 + 8


def test_those_who_cannot_find_more_do_not_wait(model: Any) -> None:
    """All begin with 50 tokens, of which 32 are found; the page behind them nobody waits for."""
    requests = [[*PROMPT[:50], *[x] * 10] for x in range(3, 9)]
    expected = [alone(model, x, 8) for x in requests]
    with session(model) as running:
        found(running, PROMPT[:40])
        names = running.manager.add_requests(requests)
        before = running.manager.report().steps
        running.run()
        report = running.manager.report()
    assert [running.outputs[x].generated_tokens for x in names] == expected
    assert report.tokens_found == 6 * 32 and report.steps == before + 8


def test_forks_of_a_prefix_that_is_found(model: Any) -> None:
    generation = {"num_return_sequences": 3, "do_sample": True, "top_k": 1}  # the likeliest
    expected = alone(model, PROMPT, 8)
    with session(model, generation) as running:
        for _ in range(2):
            running.manager.add_request(PROMPT)
            running.run()
        report = running.manager.report()
    assert [x.generated_tokens for x in running.outputs.values()] == [expected] * 6
    assert report.tokens_found == 64


def test_without_sharing_no_states_are_kept() -> None:
    model = continuous_batching(stateful_model("qwen3_next"), state_interval=STEP, share=False)
    expected = alone(model, PROMPT, 8)
    with session(model) as running:
        assert [found(running, PROMPT) for _ in range(2)] == [(expected, 0)] * 2
        assert running.manager.report().found_state_bytes == 0


def test_states_of_a_model_that_changed_are_not_found() -> None:
    model = continuous_batching(stateful_model("qwen3_next"), state_interval=STEP)
    with session(model) as running:
        found(running, PROMPT)
        with torch.no_grad():
            model.model.layers[0].linear_attn.out_proj.weight.mul_(-1)
        tokens, count = found(running, PROMPT)
        again = found(running, PROMPT)
    assert count == 0 and again == (tokens, 64) and tokens == alone(model, PROMPT, 8)


def test_a_model_in_another_dtype_goes_on_from_states_of_that() -> None:
    model = continuous_batching(stateful_model("qwen3_next"), state_interval=STEP)
    model.to(torch.bfloat16)
    with session(model, return_logprobs=True) as running:
        first, second = found(running, PROMPT), found(running, PROMPT)
        pages = running.cache.requests.prefixes.states.pages
    assert (first[1], second[1]) == (0, 64) and second[0][0] == first[0][0]
    assert torch.bfloat16 in {x.dtype for own in pages.specs.values() for x in own}


def test_a_model_without_weights_is_tried_when_it_has_some() -> None:
    with torch.device("meta"):
        model = stateful_model("lfm2")
    assert "init_continuous_batching" in vars(continuous_batching(model))


@pytest.mark.parametrize("interval", [0, 24, -16, "a"])
def test_intervals_that_are_refused(interval: Any) -> None:
    model = stateful_model("qwen3_next")
    with pytest.raises(ArgumentError, match=r"^state_interval must be"):
        continuous_batching(model, state_interval=interval)
        model.init_continuous_batching(GenerationConfig(**GREEDY), batching_config())
