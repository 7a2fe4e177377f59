"""``kv="int4,recent=R"`` in a model: what it predicts in every mode, and what refuses it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from campaign import times
from integrations.models.test_families import FAMILIES, continued, family
from integrations.test_generate_modes import MODES, ONE_ROW, continue_with
from oracles.language_models import make_model, make_prompts
from transformers import DynamicCache

import kvloom
from kvloom.caches import Cache
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, disable, enable
from kvloom.ops.impl import cpu

KV = "int4:g8,recent=24"
ALL = "int4:g8,recent=300"
"""Keeps every token as it was computed, so predictions are those of the model's own cache."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["kvloom", "sdpa"])
def test_all_tokens_exact_are_the_stock_cache(mode: str, attention: str) -> None:
    prompts = make_prompts([11] if mode in ONE_ROW else [11, 5, 8])
    stock, model = make_model("sdpa"), make_model(attention)
    want = continue_with(stock, prompts, DynamicCache(config=stock.config), **MODES[mode])
    assert continue_with(model, prompts, KVCache.for_model(model, kv=ALL, page_size=4), **MODES[mode]) == want


@pytest.mark.parametrize(
    "name", [x for x in ("Gemma2", "Gemma3", "gpt-oss", "Mistral", "Llama4", "DeepSeek-V3") if x in FAMILIES]
)
def test_families_with_windows_sinks_and_biases(name: str) -> None:
    stock, model = family(name, "eager"), family(name, "kvloom")
    want = continued(stock, DynamicCache(config=stock.config))
    got = continued(model, KVCache.for_model(model, kv="int4:g2,recent=300"))
    assert torch.equal(got.sequences, want.sequences)


@torch.no_grad()
def test_one_token_at_a_time_is_read_alike_in_place_and_gathered() -> None:
    prompts, found = make_prompts([70, 50]), []
    for attention in ("kvloom", "sdpa"):
        model = make_model(attention)
        cache: Any = KVCache.for_model(model, kv=KV)
        logits = []
        for i in range(prompts["input_ids"].shape[1]):
            out = model(
                prompts["input_ids"][:, i : i + 1],
                attention_mask=prompts["attention_mask"][:, : i + 1],
                past_key_values=cache,
            )
            logits.append(out.logits[prompts["attention_mask"][:, i] == 1])
        found.append(torch.cat(logits))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mode", ["prompt lookup", "assisted", "chunked prefill"])
def test_drafts_and_chunks_are_read_as_single_tokens(mode: str) -> None:
    model, prompts = make_model("kvloom"), make_prompts([61])
    options = {"max_new_tokens": 40}
    want = continue_with(model, prompts, KVCache.for_model(model, kv=KV), **options)
    assert continue_with(model, prompts, KVCache.for_model(model, kv=KV), **MODES[mode], **options) == want


@torch.no_grad()
def test_recent_tokens_bring_codes_nearer_to_the_model() -> None:
    ids = make_prompts([120])["input_ids"]
    stock = make_model("sdpa")
    want, errors = stock(ids).logits, []
    for kv in ("int4:g8,recent=0", KV, "int4:g8,recent=64"):
        model = make_model("kvloom")
        errors.append(
            float((model(ids, past_key_values=KVCache.for_model(model, kv=kv)).logits - want).norm())
        )
    assert errors[2] < errors[1] < errors[0]


@torch.no_grad()
def test_a_prefix_of_a_pool_has_its_residual_window() -> None:
    model, ids = make_model("kvloom"), make_prompts([70])["input_ids"]
    pool = KVPool.for_model(model, kv=ALL, max_tokens=400)
    cold = pool.begin(ids)
    model(ids, past_key_values=cold)
    pool.commit(cold, ids)
    warm = pool.begin(ids)
    assert warm.get_seq_length() == 64
    half = pool.begin(ids)
    model(ids[:, :64], past_key_values=(alone := KVCache.for_model(model, kv=ALL)))
    for layer, other in zip(half.layers, alone.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
    model(ids[:, 64:], past_key_values=warm)
    for layer, other in zip(warm.layers, cold.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
    pool.check()


SCHEDULES = times(1)


@pytest.mark.campaign
@torch.no_grad()
@pytest.mark.skipif(cpu.ISA is None, reason="attention of torch has other bits in other pieces")
@pytest.mark.parametrize("name", [x for x in ("Llama", "Gemma3", "DeepSeek-V3") if x in FAMILIES])
@pytest.mark.parametrize("recent", [1, 24])
def test_found_or_computed_a_history_has_the_same_bits(name: str, recent: int) -> None:
    """Texts of a pool in pieces, after prefixes that were found, with removals, also into these prefixes."""
    model, kv, vocab, found = family(name), f"int4:g2,recent={recent}", 60, 0
    enable(model, kv, batch_invariant=True)
    for seed in range(SCHEDULES):
        draw = random.Random(f"{name} {recent} {seed}")
        pool = KVPool.for_model(model, kv, 8, max_tokens=4096, batch_invariant=True)
        known: list[list[int]] = [[draw.randrange(3, vocab) for _ in range(90)]]
        for _ in range(6):
            text = draw.choice(known)[: draw.choice([20, 50, 90, 200])]
            text = text + [draw.randrange(3, vocab) for _ in range(draw.choice([1, 7, 30]))]
            ids = torch.tensor([text])
            cache, alone = pool.begin(ids), KVCache.for_model(model, kv, 8)
            fed(model, cache, ids[:, int(cache.get_seq_length()) :], draw)
            fed(model, alone, ids, None)
            for _ in range(3):
                removed = min(draw.choice([1, 3, 8, 15, 16]), ids.shape[1] - 1)
                try:
                    for own in (cache, alone):
                        own.crop(-removed)
                except StateError:  # a window goes back a little, that of a found prefix not at all
                    assert name == "Gemma3"
                    break
                more = torch.tensor([[draw.randrange(3, vocab) for _ in range(draw.choice([1, 4, 20]))]])
                ids = torch.cat((ids[:, : ids.shape[1] - removed], more), 1)
                assert torch.equal(fed(model, cache, more, draw), fed(model, alone, more, None)), seed
            pool.commit(cache, ids)
            known.append(ids[0].tolist())
        pool.check()
        found += pool.report()["tokens_found"]
    assert found
    disable(model)


def fed(model: Any, cache: Any, ids: torch.Tensor, draw: random.Random | None) -> torch.Tensor:
    """Logits of the last token; ``draw`` cuts the forward into pieces."""
    start, logits = 0, torch.empty(0)
    while start < ids.shape[1]:
        end = ids.shape[1] if draw is None else start + draw.randint(1, ids.shape[1] - start)
        logits = model(ids[:, start:end], past_key_values=cache).logits[:, -1]
        start = end
    return logits


@torch.no_grad()
def test_a_pool_refuses_attention_that_reads_one_residual_window_for_all_queries() -> None:
    model, ids = make_model("sdpa"), make_prompts([40])["input_ids"]
    pool = KVPool.for_model(model, kv=KV, max_tokens=400)
    model.set_attn_implementation("sdpa")
    cache = pool.begin(ids)
    with pytest.raises(UnsupportedError, match=r"enable\(model\).*'int4,recent=0'.*'sdpa'"):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_model_attends_in_place_as_long_as_a_pool_or_enable_wants_it() -> None:
    model, ids = make_model("sdpa"), make_prompts([40])["input_ids"]

    def attention() -> str:
        return str(model.config._attn_implementation)

    KVPool.for_model(model, kv="int8:g8", max_tokens=400)
    assert attention() == "sdpa"
    pools = [KVPool.for_model(model, kv=KV, max_tokens=400) for _ in range(2)]
    cache = pools[0].begin(ids)
    model(ids, past_key_values=cache)
    pools[0].commit(cache, ids)
    enable(model, KV)
    assert pools[0].begin(ids).get_seq_length() == 32  # who wants it is no part of what was computed
    pools[0].close()
    assert attention() == "kvloom"
    disable(model)
    assert attention() == "kvloom"
    pools[1].close()
    assert attention() == "sdpa"
    enable(model, KV)
    with KVPool.for_model(model, kv=KV, max_tokens=400):
        disable(model)
        assert attention() == "kvloom"
    assert attention() == "sdpa"


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Mistral"])
def test_a_plan_has_their_bytes(name: str) -> None:
    model = family(name)
    for length in (0, 3, 47):
        planned = kvloom.plan(
            model.config, "int4:g2,recent=9", context=length, batch=2, page_size=4, at_once=True
        )
        cache = KVCache.for_model(model, kv="int4:g2,recent=9", page_size=4)
        if length:
            with torch.no_grad():
                model(torch.ones(2, length, dtype=torch.int64), past_key_values=cache, use_cache=True)
        assert planned.cache + planned.scales == cache.nbytes


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_int4_reads_its_newest_64_tokens_as_they_were_computed(static: bool) -> None:
    model, ids = make_model("kvloom"), make_prompts([90])["input_ids"]
    options = {"static": True, "max_tokens": 100} if static else {}
    logits = {}
    none, plain = ("int8:g8", "int4:g8,recent=0"), ("int4:g8,recent=0", None)
    int4, said = ("int4:g8", None), ("int4:g8,recent=64", None)
    both, apart = ("int8:g8", "int4:g8"), ("int8:g8,recent=64", "int4:g8")
    for kinds in (none, plain, int4, said, both, apart):
        cache = KVCache.for_model(model, kinds[0], values=kinds[1], **options)
        logits[kinds] = model(ids, past_key_values=cache).logits
        assert (cache.nbytes_recent > 0) == ("recent=0" not in str(kinds))
    assert torch.equal(logits[int4], logits[said])
    assert torch.equal(logits[both], logits[apart])
    assert not torch.equal(logits[int4], logits[plain])
    assert not torch.equal(logits[both], logits[none])


def test_what_cannot_keep_them_says_so() -> None:
    model = make_model()
    with pytest.raises(ArgumentError, match="values must have the residual window of kv, recent=24, got"):
        KVCache.for_model(model, kv=KV, values="int4:g8,recent=8")
    with pytest.raises(ArgumentError, match="values must have the residual window of kv, recent=0, got"):
        KVCache.for_model(model, kv="int8:g8,recent=0", values="int4:g8,recent=8")
    with pytest.raises(ArgumentError, match="kv must have as recent a number of at least 0"):
        KVCache.for_model(model, kv="int4:g8,recent=x")
    with pytest.raises(ArgumentError, match="kv must be codes alone, without recent"):
        Cache.quantized(KV)
