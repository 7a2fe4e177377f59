"""Log probabilities of prompts are those of a forward of the prompt alone, whatever is known of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from integrations.attention.test_latents import FAMILIES as OF_LATENTS
from integrations.attention.test_latents import family
from integrations.session.test_batch_invariance import model_of
from oracles.batching import alone, random_requests, session
from oracles.pairs import in_turn
from oracles.stateful_models import STATES_IN_SESSIONS, small_model

from kvloom.errors import StateError
from kvloom.integrations.transformers import continuous_batching
from kvloom.integrations.transformers.session.choices.sampling import Choice, LogProb, choose_by_request
from kvloom.integrations.transformers.session.requests.prompt import CHOICE

NEW, LIKELIEST = 20, 3
MODELS: dict[str, Any] = {
    "Llama": lambda: model_of("Llama", torch.float32),
    "Gemma2": lambda: model_of("Gemma2", torch.float32),  # logits are capped behind the head
    "qwen3_next": lambda: small_model("qwen3_next"),
    "deepseek_v3": lambda: family("deepseek_v3", num_hidden_layers=2),
}
IS_THERE = {"qwen3_next": STATES_IN_SESSIONS, "deepseek_v3": "deepseek_v3" in OF_LATENTS}
"""In this version of transformers."""
PRESENT = [x for x in MODELS if IS_THERE.get(x, True)]
CASES: dict[str, dict[str, int]] = {
    "long-steps": {},
    "short-steps": {"max_batch_tokens": 48},
    "few-pages": {"num_blocks": 9, "max_batch_tokens": 40},
}


@functools.cache
def requests() -> list[list[int]]:
    return [[5], *random_requests(5, seed=3)]


def scored(running: Any, prompts: Sequence[list[int]], scores_prompt: bool = True) -> list[Choice]:
    """Prompts that are answered together in a session."""
    choices = [Choice(num_logprobs=LIKELIEST, scores_prompt=scores_prompt) for _ in prompts]
    names = [
        running.manager.add_request(list(prompt), **{CHOICE: choice})
        for prompt, choice in zip(prompts, choices, strict=True)
    ]
    running.run()
    assert [running.outputs[x].error for x in names] == [None] * len(names)
    return choices


def expected(model: Any, prompt: list[int]) -> tuple[torch.Tensor, float]:
    """``[N - 1, V]``, log probabilities of the tokens behind each but the last; and what rounding may change.

    Of logits that is what a model may differ by that is fed in pieces; of their log probabilities twice that.
    """
    model.set_attn_implementation("eager")  # others of older versions cap no scores
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    rounding = 512 * torch.finfo(torch.float32).eps * model.config.num_hidden_layers**0.5
    return logits[:-1].log_softmax(1), 2 * rounding * float(logits.square().mean().sqrt())


@pytest.mark.parametrize(("name", "case"), in_turn(PRESENT, list(CASES)))
def test_each_token_has_the_log_probability_of_a_forward(name: str, case: str) -> None:
    model = MODELS[name]()
    theirs = [expected(model, x) for x in requests()]
    tokens = [alone(model, x, NEW) for x in requests()]
    continuous_batching(model)
    with session(model, {"max_new_tokens": NEW}, begin=choose_by_request, **CASES[case]) as running:
        for _ in range(2):  # the second time all of them are known
            for prompt, (wanted, atol), new, choice in zip(
                requests(), theirs, tokens, scored(running, requests()), strict=True
            ):
                assert choice.tokens == new and choice.num_found == 0
                found = torch.tensor([x.chosen for x in choice.prompt_logprobs])
                own = wanted.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
                torch.testing.assert_close(found, own, rtol=0, atol=atol)
                for x, row in zip(choice.prompt_logprobs, wanted, strict=True):
                    likeliest = row[torch.tensor(x.tokens)]
                    torch.testing.assert_close(likeliest, row.topk(LIKELIEST).values, rtol=0, atol=atol)
                    torch.testing.assert_close(torch.tensor(x.logprobs), likeliest, rtol=0, atol=atol)
                assert len(choice.logprobs) == NEW
        assert case != "few-pages" or running.manager.report().preemptions


@pytest.mark.parametrize("keeps", [True, False])
def test_company_and_pieces_change_no_bit(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model that always gives the logits of all tokens."""
    model = model_of("Llama", torch.float32)
    monkeypatch.setattr(type(model), "_supports_logits_to_keep", lambda self: keeps)
    continuous_batching(model)
    with session(model, {"max_new_tokens": NEW}, begin=choose_by_request) as running:
        single = [scored(running, [x])[0] for x in requests()]
    options: dict[str, Any] = {"begin": choose_by_request, "max_batch_tokens": 48}
    with session(model, {"max_new_tokens": NEW}, **options) as running:
        names = running.manager.add_requests([*requests()])  # some that are asked for nothing
        together = scored(running, requests())
        plain = [running.outputs[x].generated_tokens for x in names]
        known = scored(running, requests(), scores_prompt=False)
    assert [(x.prompt_logprobs, x.logprobs) for x in together] == [
        (x.prompt_logprobs, x.logprobs) for x in single
    ]
    assert plain == [x.tokens for x in single] == [x.tokens for x in known]
    assert [x.prompt_logprobs for x in known] == [[]] * len(known)
    assert [x.num_found for x in known] == [(len(x) - 1) // 16 * 16 for x in requests()]  # they share, too


def test_a_piece_that_comes_again_is_kept_once_and_none_may_lack() -> None:
    logits, tokens = torch.randn(150, 20), [*range(20)] * 7 + [*range(10)]
    choice, again = (Choice(num_logprobs=2, scores_prompt=True) for _ in range(2))
    choice.score(logits, tokens, 0)
    for start, end in [(0, 70), (0, 30), (30, 100), (100, 150)]:  # preempted behind the first piece
        again.score(logits[start:end], tokens[start:end], start)
    assert again.prompt_logprobs == choice.prompt_logprobs and len(choice.prompt_logprobs) == 150
    logprobs = logits.log_softmax(1)
    best, order = logprobs.topk(2)
    assert choice.prompt_logprobs[149] == LogProb(
        float(logprobs[149, 9]), tuple(order[149].tolist()), tuple(best[149].tolist())
    )
    with pytest.raises(StateError, match=r"from its first token on, got one after 151 of which 150 are"):
        again.score(logits, tokens, 151)
