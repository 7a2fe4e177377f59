"""Sessions of models with recurrent states: each request has the tokens of ``generate`` for it alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from campaign import times
from integrations.session.test_tokens import NEW
from oracles.batching import (
    GREEDY,
    add_between_steps,
    alone,
    batched,
    batching_config,
    random_requests,
    session,
)
from oracles.pairs import in_turn
from oracles.stateful_models import NEEDS_STATES_IN_SESSIONS, WRONG, mixers, small_model, stateful_model
from transformers import GenerationConfig

from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, continuous_batching
from kvloom.integrations.transformers.session.steps.recurrent import MixerCalls

REQUESTS = times(6)
FAMILIES = [x for x in mixers() if x != "inkling2"]  # which attends to masks of its own
CASES: dict[str, dict[str, int]] = {
    "long-steps": {},
    "short-steps": {"max_batch_tokens": 48},
    "few-pages": {"num_blocks": 14, "max_batch_tokens": 64},
    "pages-of-8": {"page_size": 8, "max_batch_tokens": 100},
}
PROMPT = [3 + (7 * i) % 90 for i in range(70)]
STEP = 32
"""At which multiples prefixes are found."""
pytestmark = NEEDS_STATES_IN_SESSIONS


@pytest.fixture(scope="module")
def model() -> Any:
    return continuous_batching(stateful_model("qwen3_next"))


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "case"), in_turn(FAMILIES, list(CASES)))
def test_requests_of_every_family_have_the_tokens_of_generate(name: str, case: str) -> None:
    model, requests = small_model(name), random_requests(REQUESTS, seed=3)
    expected = [alone(model, x, NEW) for x in requests]
    continuous_batching(model, state_interval=STEP)
    with session(model, {"max_new_tokens": NEW}, **CASES[case]) as running:
        for _ in range(2):  # the second time, with what others left behind
            names = running.manager.add_requests(requests)
            running.run()
            assert [running.outputs[x].generated_tokens for x in names] == expected


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(3))
def test_order_and_arrival_do_not_count(model: Any, seed: int) -> None:
    requests, draw = random_requests(REQUESTS, seed=seed), random.Random(seed)
    expected = {tuple(x): alone(model, x, NEW) for x in requests}
    scheduler = draw.choice(["fifo", "prefill_first"])
    with session(model, {"max_new_tokens": NEW}, max_batch_tokens=48, scheduler_type=scheduler) as running:
        names = add_between_steps(running, requests, draw)
    assert {name: expected[tuple(x)] for name, x in names.items()} == {
        name: output.generated_tokens for name, output in running.outputs.items()
    }


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "kv"), in_turn(["falcon_h1", "lara_mini", "qwen3_next"], ["int8:g8", "int4:g8,recent=16"])
)
def test_codes_beside_states(name: str, kv: str) -> None:
    """Alone in a session, as rounding may choose another code in a step of several requests."""
    model, requests = small_model(name), random_requests(REQUESTS // 2, seed=5)
    model.set_attn_implementation("kvloom")
    expected = [alone(model, x, NEW, KVCache.for_model(model, kv)) for x in requests]
    assert [batched(model, [x], NEW, kv)[0] for x in requests] == expected


@pytest.mark.parametrize("length", [2, 33, 70])
def test_forks_go_on_from_states_of_their_own(model: Any, length: int) -> None:
    generation = {"num_return_sequences": 3, "do_sample": True, "top_k": 1}  # the likeliest
    with session(model, generation, max_batch_tokens=40) as running:
        running.manager.add_requests([PROMPT[:length], PROMPT[:length][::-1]])
        running.run()
    tokens = {name: x.generated_tokens for name, x in running.outputs.items()}
    expected = [alone(model, x, 8) for x in (PROMPT[:length], PROMPT[:length][::-1])]
    assert len(tokens) == 6 and [sum(x == y for x in tokens.values()) for y in expected] == [3, 3]


def test_sampled_forks_part(model: Any) -> None:
    """Each is what a plain forward of its own tokens says: forks change no states of each other."""
    generation = {"num_return_sequences": 3, "do_sample": True, "temperature": 3.0}
    torch.manual_seed(1)
    with session(model, generation, return_logprobs=True) as running:
        running.manager.add_request(PROMPT)
        running.run()
    texts = {tuple(x.generated_tokens): x.logprobs for x in running.outputs.values()}
    assert len(texts) == 3
    for tokens, logprobs in texts.items():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1] / 3.0
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-3, atol=1e-3)


def test_those_that_lose_their_pages_compute_their_states_again(model: Any) -> None:
    requests = [PROMPT[i:] for i in range(4)]
    with session(model, {"max_new_tokens": 20}, num_blocks=9, max_batch_tokens=64) as running:
        names = running.manager.add_requests(requests)
        running.run()
        assert running.manager.report().preemptions > 0
    assert [running.outputs[x].generated_tokens for x in names] == [alone(model, x, 20) for x in requests]


def test_a_request_that_ends_takes_no_states_of_others_along(model: Any) -> None:
    with session(model) as running:
        names = [running.manager.add_request(PROMPT[i:]) for i in range(4)]
        for _ in range(3):
            running.step()
        running.manager.cancel_request(names[1])
        running.run()
    for i in (0, 2, 3):
        assert running.outputs[names[i]].generated_tokens == alone(model, PROMPT[i:], 8)


def test_states_are_counted_and_given_up(model: Any) -> None:
    cache = KVCache.for_model(model)
    with session(model) as running:
        assert running.manager.report().state_bytes == 0
        running.manager.add_requests([PROMPT, PROMPT[1:]])
        running.step()
        assert running.manager.report().running == 2
        found = running.manager.report().state_bytes
        running.run()
        assert running.manager.report().state_bytes == 0
    with torch.no_grad():
        model(torch.tensor([PROMPT]), past_key_values=cache)
    states = [
        [*x.conv_states.values(), *x.recurrent_states.values()] for x in (cache.layers[0], cache.layers[2])
    ]
    assert found == 2 * sum(x.nbytes for own in states for x in own)


def test_memory_for_states_is_left_beside_the_pages(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.integrations.transformers.session.manager.free_bytes", lambda device: 2**24)
    config = batching_config(num_blocks=None, max_memory_percent=1.0, max_requests_per_batch=64)
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY), config)
    manager._create_batch_processor()
    report = manager.report()
    manager.release()
    model.set_attn_implementation("sdpa")
    with session(model) as running:
        running.manager.add_request(PROMPT)
        running.step()
        each = running.manager.report().state_bytes
        running.run()
    room = (2**24 - 64 * 2 * each) * 2 // 3  # the rest for states that are found
    assert room - report.page_bytes < report.max_pages * report.page_bytes <= room


@pytest.mark.parametrize("name", list(WRONG))
def test_models_that_are_wrong_in_pieces_are_refused(name: str) -> None:
    model = stateful_model(name)
    with pytest.raises(UnsupportedError, match="fed in several pieces it is wrong, with every cache"):
        continuous_batching(model)
    assert "init_continuous_batching" not in vars(model)


def test_a_mixer_that_is_given_other_tokens_is_refused(model: Any) -> None:
    expected = alone(model, PROMPT, 8)
    with session(model) as running:
        running.manager.add_request(PROMPT)
        mixer = model.model.layers[0].linear_attn
        fewer = mixer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "hidden_states": kwargs["hidden_states"][:, 1:]}),
            with_kwargs=True,
            prepend=True,
        )
        try:
            with pytest.raises(
                StateError, match="GatedDeltaNet must be given the 70 tokens of the step, got 69"
            ):
                running.run()
        finally:
            fewer.remove()
        running.processor.handle_batch_error(RuntimeError("it failed"))
        name = running.manager.add_request(PROMPT)
        running.run()
        assert running.outputs[name].generated_tokens == expected


@pytest.mark.parametrize(("is_invariant", "num_calls"), [(True, 3), (False, 2)])
def test_requests_with_as_many_tokens_are_computed_at_once(
    model: Any, monkeypatch: pytest.MonkeyPatch, is_invariant: bool, num_calls: int
) -> None:
    """With batch invariance prompts are computed alone."""
    continuous_batching(model, share=False, batch_invariant=is_invariant)
    calls, before = list[int](), MixerCalls.before
    requests = [PROMPT, PROMPT[:60], PROMPT[::-1]]  # of which the first and the last may be called together
    expected = [alone(model, x, 8) for x in requests]

    def counted(self: Any, *args: Any) -> Any:
        calls.append(len(self._calls))
        return before(self, *args)

    monkeypatch.setattr(MixerCalls, "before", counted)
    with session(model) as running:
        names = running.manager.add_requests(requests)
        running.step()
        assert {*calls} == {num_calls}
        calls.clear()
        running.run()
        assert {*calls} == {1}
    assert [running.outputs[x].generated_tokens for x in names] == expected
