"""``kv="int4,recent=R"`` in a session: each request reads its newest tokens as it does alone."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.models.test_families import family
from integrations.session.requests.test_sharing import PROMPT
from integrations.session.test_programs import NEW, REQUESTS, SESSIONS, Program
from oracles.batching import GREEDY, alone, random_requests, session
from oracles.bits import assert_same_bits, generator
from oracles.language_models import make_model
from oracles.pairs import pairwise
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig

from kvloom import ops
from kvloom.caches import CacheFormat, PagedLayer, Sequences
from kvloom.caches.tensors.storage import Storage
from kvloom.core.entries import Entry, SideFormat
from kvloom.core.specs import QuantSpec
from kvloom.integrations.transformers import KVCache, KVPool, continuous_batching
from kvloom.integrations.transformers.models.layer_specs import LayerSpec
from kvloom.integrations.transformers.session import manager
from kvloom.integrations.transformers.session.cache import BatchCache
from kvloom.integrations.transformers.session.requests.groups import Limits, token_layers_of
from kvloom.ops.impl import cpu

HEADS, DIM, RECENT = 2, 32, 20
KV = "int4:g16,recent=24"
CODES = CacheFormat(quant=QuantSpec(4, 16), recent=24)


class Alone:
    """A request of a ``BatchCache`` without a model, and a layer that has it alone."""

    def __init__(self, name: str, format: CacheFormat, window: int | None) -> None:
        self.layer = PagedLayer(format, Sequences(format, window))
        self.state = SimpleNamespace(
            request_id=name,
            initial_tokens=[1],
            remaining_prefill_tokens=[1],
            generated_tokens=[],
            num_children=0,
            logit_processor_kwargs={},
            _true_initial_tokens=0,
            current_len=lambda: self.layer.num_tokens,
        )


def cache_of(format: CacheFormat, window: int | None, num_layers: int = 1) -> BatchCache:
    config = LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, num_key_value_heads=HEADS, num_hidden_layers=num_layers
    )
    side, device = SideFormat(DIM, "float32"), torch.device("cpu")
    layer = LayerSpec(0, "full_attention", None, window=window, entry=Entry(HEADS, side, side))
    layers = dict.fromkeys(range(num_layers), layer)
    return BatchCache(config, Limits(layers, format, 1024, 2048), device, max_pages=400, share=False)


def compare(got: Tensor, want: Tensor) -> None:
    if cpu.ISA is None:  # a matrix product of torch has bits of its own for each size
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    else:
        assert_same_bits(got, want, "out")


def attend(cache: BatchCache, states: list[Any], counts: list[int], *tensors: Tensor) -> Tensor:
    for state, count in zip(states, counts, strict=True):
        assert cache.can_store_request_tokens(state, count)
        cache.extend_read_and_write_indices(state.request_id, state.current_len(), count, None, None)
    out = cache.steps.attend(0, *tensors, ops.Scores())
    cache.requests.check()
    return out


@pytest.mark.parametrize(
    ("seed", "window", "quant"),
    pairwise(range(2), [None, 9, 50], [QuantSpec(4, 16), QuantSpec(4, 32, rotated=True)]),
    ids=str,
)
def test_a_request_has_the_bits_that_it_has_alone(seed: int, window: int | None, quant: QuantSpec) -> None:
    draw, numbers = random.Random(seed), generator(seed)
    format = CacheFormat(quant=quant, recent=RECENT, page_size=16)
    many, single = cache_of(format, window), cache_of(format, window)
    requests = list[Alone]()
    for step in range(40):
        if step % 4 == 0:
            requests.append(Alone(f"{step}", format, window))
        if len(requests) > 4:
            gone = requests.pop(draw.randrange(len(requests))).state.request_id
            many.free_blocks(gone)
            single.free_blocks(gone)
        chosen = [x for x in requests if draw.random() < 0.8] or requests
        counts = [draw.choice([1, 1, 3, 30, 90 if step % 3 else 500]) for _ in chosen]
        tensors = [torch.randn(1, n, sum(counts), DIM, generator=numbers) for n in (4, HEADS, HEADS)]
        got = attend(many, [x.state for x in chosen], counts, *tensors)
        pieces = zip(chosen, counts, *(x.split(counts, 2) for x in tensors), strict=True)
        want, in_session = list[Tensor](), list[Tensor]()
        for request, count, query, key, value in pieces:
            in_session.append(attend(single, [request.state], [count], query, key, value))
            want.append(request.layer.append(key, value).attend(query))
        compare(got, torch.cat(in_session, 1))
        if window is None:
            compare(got, torch.cat(want, 1))
        else:  # a layer counts its tokens from the first that it keeps
            torch.testing.assert_close(got, torch.cat(want, 1), rtol=1e-4, atol=1e-5)
    assert max(x.layer.num_tokens for x in requests) > 512


def test_layers_without_codes_keep_nothing_beside() -> None:
    quant = QuantSpec(4, 16)
    layers = (CacheFormat(quant=quant, recent=RECENT), CacheFormat())
    cache = cache_of(CacheFormat(quant=quant, recent=RECENT, layers=layers), None, num_layers=2)
    assert [[*group.storages] for group in cache.residuals] == [[0]]
    request = Alone("a", CacheFormat(), None)
    for count in (40, 1):
        query, key, value = (torch.randn(1, n, count, DIM, generator=generator(n)) for n in (4, 2, 2))
        attend(cache, [request.state], [count], query, key, value)
        want = request.layer.append(key, value).attend(query)
        compare(cache.steps.attend(1, query, key, value, ops.Scores()), want)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "gpt-oss", "Gemma3n", "Gemma4"])
def test_tokens_of_each_family(name: str) -> None:
    model, kv = family(name, "kvloom"), "int4:g2,recent=9"
    requests = random_requests(6, seed=len(name))
    expected = [alone(model, x, 8, KVCache.for_model(model, kv)) for x in requests]
    continuous_batching(model, kv, share=False)
    with session(model, {"max_new_tokens": 8}, max_batch_tokens=64) as running:
        names = running.manager.add_requests(requests)
        running.run()
    assert [running.outputs[name].generated_tokens for name in names] == expected


@functools.cache
def model_and_tokens() -> tuple[Any, list[list[int]]]:
    model = make_model("kvloom")
    return model, [alone(model, x, NEW, KVCache.for_model(model, KV)) for x in REQUESTS]


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(SESSIONS // 2))
def test_a_random_session(seed: int) -> None:
    draw, (model, expected) = random.Random(seed), model_and_tokens()
    continuous_batching(model, KV, share=False)
    program = Program(seed)
    options = {"num_blocks": draw.choice([8, 16, 200]), "max_batch_tokens": draw.choice([16, 64, 300])}
    with session(model, {"max_new_tokens": NEW}, **options) as running:
        program.run(running)
        report = running.manager.report()
    assert report.active == 0 < report.recent_bytes
    assert seed or report.preemptions
    for name, which in program.asked.items():
        if name in running.outputs:
            assert running.outputs[name].generated_tokens == expected[which]
        else:
            assert name in program.cancelled


def test_int4_keeps_newest_tokens_if_nothing_is_said() -> None:
    model = make_model("kvloom")
    expected = alone(model, PROMPT, 20, KVCache.for_model(model, "int4:g16,recent=64"))
    continuous_batching(model, "int4:g16")
    with session(model, {"max_new_tokens": 20}) as running:
        running.manager.add_request(PROMPT)
        running.run()
        assert running.manager.report().recent_bytes > 0
    assert [x.generated_tokens for x in running.outputs.values()] == [expected]


def test_forks_have_the_tokens_of_the_request() -> None:
    model = make_model("kvloom")
    expected = alone(model, PROMPT, 20, KVCache.for_model(model, KV))
    plain = alone(model, PROMPT, 20, KVCache.for_model(model, "int4:g16,recent=0"))
    assert expected != plain
    continuous_batching(model, KV)
    generation = {"max_new_tokens": 20, "num_return_sequences": 3, "do_sample": True, "top_k": 1}
    with session(model, generation) as running:
        running.manager.add_request(PROMPT)
        running.run()
    assert [x.generated_tokens for x in running.outputs.values()] == [expected] * 3


def test_what_follows_a_prefix_that_is_found_is_what_follows_a_computed_one() -> None:
    """In a pool, in a session, and of requests that are forked there."""
    model, ids = make_model("kvloom"), torch.tensor([PROMPT])
    cold = alone(model, PROMPT, 30, KVCache.for_model(model, KV))
    pool = KVPool.for_model(model, KV, max_tokens=400)
    for found in (0, len(PROMPT) // 16 * 16):
        cache = pool.begin(ids)
        assert cache.get_seq_length() == found
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=30, **{**GREEDY, "eos_token_id": None}
        )
        assert out[0, len(PROMPT) :].tolist() == cold
        pool.commit(cache, out)
    for forks in (1, 3):
        continuous_batching(model, KV)
        options = {"max_new_tokens": 30, "do_sample": True, "top_k": 1, "num_return_sequences": forks}
        with session(model, options) as running:
            for turn in range(2):
                running.outputs.clear()
                running.manager.add_request(PROMPT)
                running.run()
                assert [x.generated_tokens for x in running.outputs.values()] == [cold] * forks
                assert (running.manager.report().tokens_found > 0) == (turn > 0)


def test_memory_that_does_not_come_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = model_and_tokens()
    continuous_batching(model, KV, share=False)
    with session(model, {"max_new_tokens": NEW}, max_batch_tokens=64) as running:
        names = running.manager.add_requests(REQUESTS)
        running.step()
        [residual] = running.cache.residuals
        reserve = Storage.reserve

        def refuse(self: Storage, *args: Any) -> None:
            if self is residual.storages[2]:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            reserve(self, *args)

        monkeypatch.setattr(Storage, "reserve", refuse)
        running.run()
    assert [running.outputs[name].generated_tokens for name in names] == expected


@pytest.mark.parametrize("free", [1 << 23, 1 << 25, 1 << 34])
def test_newest_tokens_are_of_the_memory_that_is_there(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "free_bytes", lambda device: free)
    model = continuous_batching(make_model("kvloom"), KV)
    layers = token_layers_of(model)
    generation = GenerationConfig(max_new_tokens=NEW, **GREEDY)
    made = model.init_continuous_batching(generation, None)
    made.record()  # makes its pages
    report, config = made.report(), made.continuous_batching_config
    count = config.max_requests_per_batch
    limits = Limits(layers, CODES, count, 2048)
    room = free * config.max_memory_percent
    assert limits.nbytes(report.max_pages) <= room < limits.nbytes(report.max_pages + 1)
    assert count == 1024 or limits.residual_bytes <= room / 2
    made.switch_to_cb_friendly_attn(model)


def test_no_more_is_taken_than_planned() -> None:
    model = continuous_batching(make_model("kvloom"), KV, share=False)
    with session(model, {"max_new_tokens": NEW}, max_batch_tokens=128) as running:
        running.manager.add_requests(REQUESTS * 4)
        running.run()
        taken = running.manager.report().recent_bytes
    assert 0 < taken <= Limits(token_layers_of(model), CODES, 2 * len(REQUESTS * 4), 128).residual_bytes
