"""A request of a session has the log probabilities that it has alone, bit for bit, in any company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from campaign import times
from integrations.models.test_families import SMALL
from oracles.batching import random_requests, session
from oracles.pairs import in_turn, pairwise
from oracles.threads import num_threads
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3MoeConfig

from kvloom.integrations.transformers import continuous_batching

REQUESTS = times(6)
NEW = 8
WIDE = SMALL | {"num_hidden_layers": 2, "hidden_size": 72, "intermediate_size": 200, "head_dim": 32}
MODELS: dict[str, Any] = {
    "Llama": LlamaConfig(**WIDE),
    "Qwen3-MoE": Qwen3MoeConfig(**WIDE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40),
    "Gemma2": Gemma2Config(**WIDE, sliding_window=24),
}
KINDS = ("auto", "int8:g32", "int4:g32", "int4:g32,recent=0")
Answer = tuple[list[int], list[float]]


def model_of(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name])
    return model.eval().to(dtype)


def answers(model: Any, requests: Sequence[list[int]], seed: int = 0, **options: Any) -> list[Answer]:
    """Tokens and log probabilities of requests that come at random steps of one session."""
    draw, waiting, names = random.Random(seed), list(requests), []
    with session(model, {"max_new_tokens": NEW}, return_logprobs=True, **options) as running:
        while waiting or running.processor.has_pending_requests():
            for _ in range(draw.randrange(4)):
                if waiting:
                    names.append(running.manager.add_request(waiting.pop(0)))
            running.step()
        outputs = [running.outputs[name] for name in names]
    assert [x.error for x in outputs] == [None] * len(requests)
    return [(x.generated_tokens, list(x.logprobs)) for x in outputs]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "kv", "dtype", "pack", "threads"),
    pairwise(list(MODELS), KINDS, [torch.float32, torch.bfloat16], [False, True], [1, 2]),
    ids=str,
)
def test_a_request_has_the_bits_that_it_has_alone(
    name: str, kv: str, dtype: torch.dtype, pack: bool, threads: int
) -> None:
    model = model_of(name, dtype)
    requests = random_requests(REQUESTS, seed=len(name + kv))
    with num_threads(threads):
        continuous_batching(model, kv, batch_invariant=True, pack=pack)
        alone = [answers(model, [request])[0] for request in requests]
        # With prefixes that are found, prompts in pieces, and requests that lose their pages to others.
        assert answers(model, requests, seed=1, max_batch_tokens=64, num_blocks=16) == alone


def test_without_it_company_changes_the_bits() -> None:
    """What the tests above would not notice, they could not show."""
    model, requests = model_of("Llama", torch.float32), random_requests(6, seed=9)
    continuous_batching(model, batch_invariant=False)
    alone = [answers(model, [request])[0] for request in requests]
    assert answers(model, requests, max_batch_tokens=64) != alone


@pytest.mark.campaign
def test_a_residual_window_has_the_bits_that_it_has_alone() -> None:
    model, requests = model_of("Llama", torch.float32), random_requests(REQUESTS, seed=3)
    continuous_batching(model, "int4:g32,recent=24", share=False)
    alone = [answers(model, [request])[0] for request in requests]
    assert answers(model, requests, seed=2, max_batch_tokens=64) == alone


@pytest.mark.parametrize(
    ("kv", "page_size"),
    in_turn(["int4:g32", "int4:g32,recent=24", "int8:g32,recent=1", "int4:g32,recent=24"], [8, 32, 16]),
)
def test_turns_go_on_behind_their_residual_windows(kv: str, page_size: int) -> None:
    """Requests that begin with an earlier one and its answer have the bits of those that find nothing."""
    model = model_of("Llama", torch.float32)

    def conversations(share: bool) -> tuple[list[list[Answer]], int]:
        continuous_batching(model, kv, share=share)
        texts, found = [[length, *range(9, 8 + length)] for length in (3, 40, 83)], []
        options: dict[str, Any] = {
            "return_logprobs": True,
            "page_size": page_size,
            "max_batch_tokens": 64,
            "num_blocks": 30_000 // page_size,
        }
        with session(model, {"max_new_tokens": NEW}, **options) as running:
            for _ in range(5):
                names = [running.manager.add_request(text) for text in texts]
                running.run()
                outputs = [running.outputs[name] for name in names]
                found.append([(x.generated_tokens, list(x.logprobs)) for x in outputs])
                texts = [[*x.prompt_ids, *x.generated_tokens, 5, 6, 7] for x in outputs]
            return found, running.manager.report().tokens_found

    warm, num_found = conversations(share=True)
    assert num_found > 400
    assert (warm, 0) == conversations(share=False)


def test_forks_have_the_bits_of_their_request() -> None:
    """Several answers to one request share its prompt, and are chosen from logits with the same bits."""
    model, prompt = model_of("Llama", torch.float32), [*range(3, 60)]
    seen: list[Any] = []
    continuous_batching(model)
    hook = model.lm_head.register_forward_hook(lambda *args: seen.append(args[2]))
    one_choice = {"max_new_tokens": NEW, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
    with session(model, one_choice, max_batch_tokens=32) as running:
        running.manager.add_requests([prompt, prompt[:7]])
        running.run()
    hook.remove()
    forks = [x.generated_tokens for x in running.outputs.values() if len(x.prompt_ids) == len(prompt)]
    assert len(forks) == 3 and forks[1:] == forks[:1] * 2
    rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen[-NEW + 2 :]])
    assert len(rows.unique(dim=0)) == 2 * (NEW - 2)  # two prompts, whose three answers are alike


def test_the_model_has_its_layers_again_after_a_session() -> None:
    model = model_of("Qwen3-MoE", torch.float32)
    kinds = [type(x) for x in model.modules()]
    continuous_batching(model)
    with session(model) as running:
        assert [type(x) for x in model.modules()] != kinds
        running.manager.add_request([5, 6, 7])
        running.run()
    assert [type(x) for x in model.modules()] == kinds
