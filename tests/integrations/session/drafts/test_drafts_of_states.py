"""Sessions with drafts of models with recurrent states have the bits of those without, in any company."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from campaign import times
from integrations.session.drafts.test_drafts import copying_requests, expect_same
from oracles.batching import session
from oracles.pairs import in_turn
from oracles.stateful_models import NEEDS_STATES_IN_SESSIONS, mixers, small_model
from oracles.threads import num_threads

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import continuous_batching
from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.drafts.drafter import Drafter
from kvloom.integrations.transformers.session.requests.cuts import Cuts
from kvloom.integrations.transformers.states.mixers import is_mixer

SESSIONS = times(1)
FAMILIES = [x for x in mixers() if x != "inkling2"]  # which has no sessions
KINDS = [("auto", "float32", 1), ("int8:g8", "bfloat16", 1), ("auto", "bfloat16", 2)]
STEP = 16
"""At which multiples prefixes are found."""
pytestmark = NEEDS_STATES_IN_SESSIONS


@pytest.fixture(autouse=True)
def _steps_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "note", lambda self, num_tokens, seconds: None)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "kind"), in_turn(FAMILIES, KINDS), ids=str)
def test_no_bit_differs(name: str, kind: tuple[str, str, int]) -> None:
    kv, dtype, threads = kind
    model = small_model(name).to(getattr(torch, dtype))
    if getattr(model.config, "kv_lora_rank", None):
        kv = kv.replace(":g8", "")
    with num_threads(threads):
        for seed in range(SESSIONS):
            seed += 100 * len(name)
            report = expect_same(model, kv, copying_requests(6, seed), seed, state_interval=STEP)
            assert 0 < report.tokens_accepted < report.tokens_drafted


def logprobs(model: Any, requests: list[list[int]], count: int, **options: Any) -> Any:
    """Tokens and log probabilities of requests that come together; the report."""
    generation = {"max_new_tokens": count}
    with session(model, generation, return_logprobs=True, **options) as running:
        names = running.manager.add_requests(requests)
        running.run()
        outputs, report = [running.outputs[x] for x in names], running.manager.report()
    return [(x.generated_tokens, [*x.logprobs]) for x in outputs], report


def test_states_behind_answers_are_not_those_of_prompts() -> None:
    """A second turn has the bits of a new text, also where the first one lost its pages, and vice versa."""
    model, own = small_model("qwen3_next"), {"page_size": 8, "max_batch_tokens": 64}
    first = [[3 + (7 * i + k) % 90 for i in range(21)] for k in range(4)]
    continuous_batching(model, share=False, state_interval=STEP)
    expected, _ = logprobs(model, first, 30, **own)
    second = [[*x, *tokens, 5, 6, 7] for x, (tokens, _) in zip(first, expected, strict=True)]
    expected_second, _ = logprobs(model, second, 8, **own)
    continuous_batching(model, state_interval=STEP)
    with session(model, {"max_new_tokens": 30}, return_logprobs=True, num_blocks=20, **own) as running:
        for _ in range(2):  # the second time, with what second turns left behind
            for requests, count, there in ((first, 30, expected), (second, 8, expected_second)):
                names = [running.manager.add_request(x, max_new_tokens=count) for x in requests]
                running.run()
                found = [(running.outputs[x].generated_tokens, [*running.outputs[x].logprobs]) for x in names]
                assert found == there
        report = running.manager.report()
    assert report.preemptions > 2 and report.tokens_found > 0


@pytest.mark.parametrize("num_last", [0, 1])
def test_a_text_is_cut_in_the_same_places_whatever_the_steps(num_last: int) -> None:
    cuts = Cuts(8, num_last)
    whole = [8, 8, 5] if not num_last else [8, 8, 4, 1]
    assert cuts.pieces(21, 0, 24) == [*whole, 1, 1, 1]
    for budget in range(8, 40):
        past, found = 0, list[int]()
        while past < 24:
            count = cuts.num_whole(21, past, min(budget, 24 - past))
            found += cuts.pieces(21, past, count)
            past += count
        assert found == [*whole, 1, 1, 1]
    assert cuts.num_whole(21, 8, 7) == 0
    assert Cuts.of(256, 2048, False).interval == 256 and Cuts.of(48, 40, True) == (16, 1)


def test_a_step_keeps_states_for_as_many_drafts_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("lfm2")
    continuous_batching(model, drafts="lookup")
    monkeypatch.setattr(Drafter, "_guess", lambda self, state, most: ([7] * most, 0.999))
    drafted = [0]
    with session(model, {"max_new_tokens": 40}, max_requests_per_batch=4) as running:
        running.manager.add_requests([[5, 6, 7, i] for i in range(4)])
        while running.step():
            drafted.append(running.manager.report().tokens_drafted)
            assert not any(x.passed for x in running.cache.requests.held)
    assert max(b - a for a, b in pairwise(drafted)) == 15


def test_a_mixer_whose_rows_depend_on_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("falcon_h1")
    kind: Any = next(type(x) for x in model.modules() if is_mixer(type(x)))
    forward = kind.forward

    def rounded(self: Any, hidden_states: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        out = forward(self, hidden_states, *args, cache=cache, **kwargs)
        return out * (1 + 1e-6 * (hidden_states.shape[0] > 4)) if cache is not None else out

    rounded.__code__ = rounded.__code__.replace(co_names=(*rounded.__code__.co_names, "get_recurrent_state"))
    monkeypatch.setattr(kind, "forward", rounded)
    is_mixer.cache_clear()
    with pytest.raises(UnsupportedError, match=r"^drafts must be None for FalconH1ForCausalLM: a token in "):
        continuous_batching(model, drafts="lookup")
    continuous_batching(model)
