"""Requests in a session get the tokens that ``generate`` gives each of them alone."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from campaign import times
from integrations.models.test_families import STOCK, family
from oracles.batching import add_between_steps, alone, batched, batching_config, random_requests, session
from oracles.language_models import make_model
from oracles.pairs import in_turn
from transformers import GenerationConfig

from kvloom.integrations.transformers import KVCache, continuous_batching

REQUESTS = times(6)
NEW = 8
MODELS = ["Mistral", "Llama", "Gemma2", "Gemma3", "gpt-oss", "Gemma3n", "Gemma4"]
CASES: dict[str, dict[str, int]] = {
    "pages-of-16": {},
    "pages-of-32": {"page_size": 32},
    "short-steps": {"max_batch_tokens": 64},
    "few-pages": {"num_blocks": 14, "max_batch_tokens": 64},
}


@functools.cache
def model_and_tokens(name: str) -> tuple[Any, list[list[int]], list[list[int]]]:
    model, requests = family(name, STOCK.get(name)), random_requests(REQUESTS, seed=len(name))
    return model, requests, [alone(model, x, NEW) for x in requests]


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "case"), in_turn(MODELS, list(CASES)))
def test_tokens_of_each_family(name: str, case: str) -> None:
    model, requests, expected = model_and_tokens(name)
    assert batched(model, requests, NEW, **CASES[case]) == expected


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kv", "layout"),
    in_turn(
        [
            "int8:g16",
            "int4:g16,recent=0",
            "int8:g8",
            "int4:g16,rotate=both,recent=0",
            "float16",
            "int2:g16,recent=0",
        ],
        ["auto", "NHD"],
    ),
)
def test_tokens_of_each_kind(kv: str, layout: str) -> None:
    model, requests = make_model("kvloom"), random_requests(REQUESTS, seed=5)
    expected = [alone(model, x, NEW, KVCache.for_model(model, kv, layout=layout)) for x in requests]
    continuous_batching(model, kv, layout=layout)
    with session(model, {"max_new_tokens": NEW}, max_batch_tokens=64) as running:
        names = running.manager.add_requests(requests)
        running.run()
    assert [running.outputs[name].generated_tokens for name in names] == expected


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"sequence_bias": {(5,): 4.0, (7, 8): 3.0}, "repetition_penalty": 1.3},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("of_model", [True, False], ids=["published", "asked"])
def test_what_reads_the_text_is_applied_to_each_request(penalties: dict[str, Any], of_model: bool) -> None:
    model = make_model()
    prompts = [[9, 8, 7, 6, 9, 8, 7, 6, 5], [3, 4, 5], [60] * 20]
    generation = GenerationConfig(
        max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0, **penalties
    )
    plain = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected, without = (
        [model.generate(torch.tensor([x]), given)[0, len(x) :].tolist() for x in prompts]
        for given in (generation, plain)
    )
    assert expected != without
    if of_model:
        model.generation_config = generation
    continuous_batching(model)
    asked = None if of_model else generation
    outputs = model.generate_batch(prompts, asked, batching_config(), progress_bar=False)
    found = {tuple(x.prompt_ids): x.generated_tokens for x in outputs.values()}
    assert [found[tuple(x)] for x in prompts] == expected
    assert vars(generation).items() >= penalties.items()


@pytest.mark.campaign
def test_keys_and_values_apart() -> None:
    model, requests = make_model("kvloom"), random_requests(REQUESTS, seed=6)
    expected = [
        alone(model, x, NEW, KVCache.for_model(model, "int8:g16", values="int4:g8,recent=0"))
        for x in requests
    ]
    continuous_batching(model, "int8:g16", values="int4:g8,recent=0")
    with session(model, {"max_new_tokens": NEW}) as running:
        names = running.manager.add_requests(requests)
        running.run()
    assert [running.outputs[name].generated_tokens for name in names] == expected


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(3))
def test_order_and_arrival_do_not_count(seed: int) -> None:
    model, requests = continuous_batching(make_model()), random_requests(REQUESTS, seed=7)
    expected = {tuple(x): alone(model, x, NEW) for x in requests}
    draw = random.Random(seed)
    draw.shuffle(requests)
    with session(
        model, {"max_new_tokens": NEW}, max_batch_tokens=48, scheduler_type=scheduler(draw)
    ) as running:
        names = add_between_steps(running, requests, draw)
    assert {name: expected[tuple(x)] for name, x in names.items()} == {
        name: output.generated_tokens for name, output in running.outputs.items()
    }


def scheduler(draw: random.Random) -> str:
    return draw.choice(["fifo", "prefill_first"])


def test_a_model_whose_first_layers_have_a_window_shares_prefixes_too() -> None:
    model, request = continuous_batching(family("Gemma3")), random_requests(1, seed=2)[0] * 9
    expected: Any = alone(model, request, NEW)
    with session(model, {"max_new_tokens": NEW}) as running:
        first = running.manager.add_request(request)
        running.run()
        second = running.manager.add_request(request)
        running.run()
    assert [running.outputs[name].generated_tokens for name in (first, second)] == [expected] * 2
    assert running.manager.report().tokens_found == (len(request) - 1) // 16 * 16 > 0


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_differs_only_between_tokens_that_are_as_likely(dtype: torch.dtype) -> None:
    """A matrix product of many rows rounds apart from that of one: stock batching differs there too."""
    model, requests = make_model("kvloom", dtype), random_requests(REQUESTS, seed=8)
    unit = 4 * torch.finfo(dtype).eps
    for request, tokens in zip(requests, batched(model, requests, NEW), strict=True):
        model.set_attn_implementation("kvloom")
        text = torch.tensor([request + tokens])
        logits = model(text).logits[0, len(request) - 1 : -1].float()
        chosen = logits.gather(1, text[0, len(request) :, None])[:, 0]
        assert (logits.max(1).values - chosen <= unit * logits.abs().max()).all()
    assert [*batched(model, requests[:1], NEW)] == [alone(model, requests[0], NEW)]
