"""Sessions of models with windows hold the tokens of a window, and find prefixes by them."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from integrations.pool.test_pool_windows import SIZES, model_of
from integrations.session.test_programs import NEW, REQUESTS, SESSIONS, Program
from oracles.batching import alone, session
from transformers import MistralConfig, MistralForCausalLM

from kvloom.integrations.transformers import KVCache, continuous_batching, enable
from kvloom.integrations.transformers.session.requests.groups import Limits, token_layers_of
from kvloom.ops.impl import cpu

pytestmark = pytest.mark.skipif(
    cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size"
)

KINDS = ["auto", "int8", "int4:g8"]


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 99) for _ in range(length)]


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_requests_have_the_tokens_of_generate_and_find_what_they_share(name: str, kv: str) -> None:
    model = model_of(name)
    enable(model, batch_invariant=True)
    system = prompt(200, 1)
    requests = [system + prompt(length, length) for length in (30, 100, 5, 60, 300)]
    wanted = [alone(model, x, 12, KVCache.for_model(model, kv)) for x in requests]
    continuous_batching(model, kv)
    found = []
    with session(model, {"max_new_tokens": 12}, max_batch_tokens=128) as running:
        for _ in range(2):
            names = running.manager.add_requests(requests)
            running.run()
            assert [running.outputs[name].generated_tokens for name in names] == wanted
            running.cache.requests.check()
            found.append(running.manager.report().tokens_found - sum(found))
    whole = sum((len(x) - 1) // 16 * 16 for x in requests)
    assert found == [4 * (len(system) // 16 * 16), whole]


@functools.cache
def batch_invariant(name: str) -> Any:
    model = model_of(name, window=24)
    enable(model, batch_invariant=True)
    return model


@functools.cache
def wanted(name: str, kv: str, which: int) -> list[int]:
    model = batch_invariant(name)
    return alone(model, REQUESTS[which], NEW, KVCache.for_model(model, kv))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(-(-SESSIONS // 12)))
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_random_sessions(name: str, kv: str, seed: int) -> None:
    """With preemption, cancellation and few pages."""
    draw = random.Random(f"{name} {kv} {seed}")
    program = Program(draw.randrange(1 << 30))
    model = continuous_batching(batch_invariant(name), kv)
    options = {"num_blocks": draw.choice([10, 16, 200]), "max_batch_tokens": draw.choice([16, 64, 128])}
    with session(model, {"max_new_tokens": NEW}, **options) as running:
        program.run(running)
        assert running.manager.report().active == 0
        running.cache.requests.check()
    for request, which in program.asked.items():
        if request in running.outputs:
            assert running.outputs[request].generated_tokens == wanted(name, kv, which)
        else:
            assert request in program.cancelled


def test_what_every_window_passed_takes_no_memory() -> None:
    """All layers have a window of 128; of 1,000 tokens pages are held of that and of a step."""
    allocated, held = {}, {}
    for window in (128, None):
        config = MistralConfig(**SIZES, sliding_window=window)
        model: Any = MistralForCausalLM(config).eval()
        continuous_batching(model, share=False)
        with session(model, {"max_new_tokens": 9}, max_batch_tokens=64, page_size=4) as running:
            running.manager.add_request(prompt(1000, 3))
            for _ in range(20):
                running.step()
            report = running.manager.report()
            allocated[window], held[window] = report.num_pages, report.active
            running.run()
    assert held[128] <= (128 + 1) // 4 + 2 and held[None] >= 1000 // 4
    assert allocated[128] <= 0.3 * allocated[None]


def test_a_text_may_be_longer_than_all_pages_where_each_layer_has_a_window() -> None:
    model = model_of("Mistral")
    enable(model, batch_invariant=True)
    text = prompt(600, 4)
    wanted = alone(model, text, 30, KVCache.for_model(model))
    continuous_batching(model)
    with session(model, {"max_new_tokens": 30}, num_blocks=12, max_batch_tokens=64) as running:
        name = running.manager.add_request(text)
        running.run()
        assert running.outputs[name].generated_tokens == wanted


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_all_groups_together_fit_into_the_memory_that_is_given(name: str) -> None:
    model = model_of(name)
    format = continuous_batching(model, "int4:g8").init_continuous_batching(None, None)._format
    limits = Limits(token_layers_of(model), format, 16, 128)
    assert [x.window for x in limits.codes] == ([40] if name == "Mistral" else [None, 40])
    for room in (1 << 20, 1 << 24, 1 << 28):
        main = limits.most(room)
        assert limits.nbytes(main) <= room < limits.nbytes(main + 1)
    pages = limits.pages(main)
    assert pages[0] == main and all(page <= main for page in pages)
