"""Rotary embeddings that depend on how long a text is: no request changes the positions of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.models.test_families import SMALL
from oracles.batching import alone, random_requests, session
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from kvloom.integrations.transformers import continuous_batching

NEW = 6
SHORT = [x[:20] for x in random_requests(4, seed=3)]


def phi3() -> Any:
    """Other frequencies for texts of more than 32 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    config = Phi3Config(
        **SMALL, max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=rope
    )
    return Phi3ForCausalLM(config)


def dynamic() -> Any:
    """Other frequencies for each length of at least 32 tokens."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    return LlamaForCausalLM(LlamaConfig(**SMALL, max_position_embeddings=32, rope_parameters=rope))


@pytest.fixture(params=[phi3, dynamic])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return continuous_batching(request.param().eval())


def most(model: Any) -> int:
    return 32 if isinstance(model, Phi3ForCausalLM) else 31


def test_a_longer_request_fails_and_changes_nobody(model: Any) -> None:
    expected = [alone(model, x, NEW) for x in SHORT]
    with session(model, {"max_new_tokens": NEW}) as running:
        long = running.manager.add_request([7] * (most(model) + 2 - NEW))
        names = [running.manager.add_request(x) for x in SHORT]
        running.run()
    assert running.outputs[long].error == (
        f"input_ids and max_new_tokens must be at most {most(model) + 1} tokens together, one more than have "
        f"the rotary embedding of a short text, got {most(model) + 2 - NEW} and {NEW}"
    )
    assert [running.outputs[name].generated_tokens for name in names] == expected


def test_the_longest_that_is_served_has_the_tokens_that_it_has_alone(model: Any) -> None:
    requests = [[9 + i for i in range(most(model) + 1 - NEW)], *SHORT]
    expected = [alone(model, x, NEW) for x in requests]
    alone(model, range(3, 60), 2)  # a long text of somebody else, whose frequencies it leaves in the model
    with session(model, {"max_new_tokens": NEW}) as running:
        names = [running.manager.add_request(x) for x in requests]
        running.run()
    assert [running.outputs[name].generated_tokens for name in names] == expected


@pytest.mark.parametrize("short_of", [8, 0])
def test_without_a_limit_a_request_ends_with_the_positions(model: Any, short_of: int) -> None:
    prompt = [9 + i for i in range(most(model) - short_of)]
    with session(model, {"max_new_tokens": None}) as running:
        name = running.manager.add_request(prompt)
        running.run()
    assert running.outputs[name].generated_tokens == alone(model, prompt, max(short_of, 1))
