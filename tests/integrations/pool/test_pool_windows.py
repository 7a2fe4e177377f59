"""Pools and stores of models with windows: a prefix needs the pages of the last window only, to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import times
from integrations.models.test_families import family
from oracles.pairs import pairwise
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvloom.integrations.transformers import KVCache, KVPool, enable
from kvloom.integrations.transformers.models.bit_plan import BitPlan, config_digest
from kvloom.ops.impl import cpu
from kvloom.store import KVStore

pytestmark = pytest.mark.skipif(
    cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size"
)

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = ["Mistral", "Gemma2", "Gemma3", "gpt-oss", "Llama4"]


SCHEDULES = times(1)


def model_of(name: str, window: int = 40) -> Any:
    """No layer has a window, all have one, or all but one."""
    torch.manual_seed(0)
    if name == "Llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    elif name == "Mistral":
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window))
    else:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=window, layer_types=kinds))
    model.eval().set_attn_implementation("kvloom")
    enable(model, batch_invariant=True)
    return model


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 99, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def cold(model: Any, kv: str, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, past_key_values=KVCache.for_model(model, kv)).logits
    return logits


@torch.no_grad()
def asked(model: Any, pool: KVPool, ids: Tensor) -> tuple[int, Tensor]:
    """Tokens that are found, and the logits of the others; the text is committed."""
    cache = pool.begin(ids)
    found = cache.get_seq_length()
    logits = model(ids[:, found:], past_key_values=cache).logits
    pool.commit(cache, ids)
    pool.check()
    return found, logits


@pytest.mark.campaign
@torch.no_grad()
@pytest.mark.parametrize("seed", range(SCHEDULES))
@pytest.mark.parametrize(
    ("name", "kv", "page_size"),
    pairwise(["Llama", "Mistral", "Gemma3"], ["auto", "int8", "int4:g8"], [4, 16, 24]),
)
def test_random_texts_have_the_bits_that_they_have_cold(
    name: str, kv: str, page_size: int, seed: int
) -> None:
    """Texts that begin with others, in random cuts, with removals and without room for all of them."""
    model, draw = model_of(name), random.Random(10_000 * page_size + seed)
    pool = KVPool.for_model(model, kv, page_size, max_tokens=draw.choice([800, 1200, 4000]))
    texts, num_found, live = [text(300, seed)], 0, list[Any]()
    for _ in range(14):
        ids = draw.choice(texts)[:, : draw.randrange(1, 301)]
        if draw.random() < 0.6:
            ids = torch.cat([ids, text(draw.randrange(1, 120), draw.randrange(1 << 30))], 1)
        cache, wanted = pool.begin(ids), cold(model, kv, ids)
        at = found = cache.get_seq_length()
        while at < ids.shape[1]:
            size = draw.choice([1, 2, 5, 30, 300])
            logits = model(ids[:, at : at + size], past_key_values=cache).logits
            assert torch.equal(logits, wanted[:, at : at + size])
            at = min(at + size, ids.shape[1])
            if draw.random() < 0.1 and at > found + 12:
                cache.crop(-draw.randrange(12))
                at = cache.get_seq_length()
        pool.commit(cache, ids)
        pool.check()
        texts.append(ids)
        live[:] = [cache] if draw.random() < 0.3 else []  # which holds its pages
        num_found += found
    assert num_found > 300


@torch.no_grad()
@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_tokens_are_generated_behind_a_prefix(name: str) -> None:
    """One by one, further than the window, and in turns."""
    model, ids = model_of(name), text(70)
    pool = KVPool.for_model(model, "int8", 8, max_tokens=800)
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    for _ in range(3):
        options["attention_mask"] = torch.ones_like(ids)
        wanted = model.generate(ids, past_key_values=KVCache.for_model(model, "int8"), **options)
        cache = pool.begin(ids)
        out = model.generate(ids, past_key_values=cache, **options)
        assert torch.equal(out, wanted)
        pool.commit(cache, out)
        ids = torch.cat([out, text(9, out.shape[1])], 1)
        assert pool.begin(ids).get_seq_length() == (out.shape[1] - 1) // 8 * 8


def test_a_window_of_live_caches_is_all_that_they_need() -> None:
    """What a window passed is given up when another cache needs the room."""
    model = model_of("Mistral")
    pool = KVPool.for_model(model, "auto", 8, max_tokens=8 * 24)
    caches, texts = [], [text(150, seed) for seed in range(2)]
    with torch.no_grad():
        for ids in texts:
            caches.append(pool.begin(ids[:, :100]))
            model(ids[:, :100], past_key_values=caches[-1])
        for ids, cache in zip(texts, caches, strict=True):
            for i in range(100, 150):
                logits = model(ids[:, i : i + 1], past_key_values=cache).logits
            assert torch.equal(logits[:, -1], cold(model, "auto", ids)[:, -1])
    pool.check()


def test_why_names_a_window() -> None:
    model = model_of("Gemma3")
    pool = KVPool.for_model(model, "auto", 8, max_tokens=1600)
    pool.record()
    ids = text(201)
    asked(model, pool, ids)
    windowed = pool._prefixes.groups[1].tree
    windowed.evict(windowed._pool.num_passed)
    [miss] = pool.why(ids[:, :101])
    assert (miss.cause, miss.first, miss.num_pages) == ("window passed", 0, 12)
    assert pool.why(ids) == []


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_what_two_texts_begin_with_is_kept_for_a_third(name: str) -> None:
    model, ids = model_of(name), text(160)
    pool, found = KVPool.for_model(model, "int4:g8", 8, max_tokens=1600), []
    for seed in range(4):
        own = torch.cat([ids, text(100, seed)], 1)
        found.append(asked(model, pool, own)[0])
        for group in pool._prefixes.groups:
            group.tree.evict(group.pages.pool.num_passed)
    assert found == [0, 0, 160, 160]


@pytest.mark.parametrize("kv", ["auto", "int8", "int4:g8"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_another_process_reads_windows_from_a_store(name: str, kv: str, tmp_path: Path) -> None:
    """With pages of its own size, in turns that go on behind what was written."""
    model, ids = model_of(name), text(300)
    wanted = cold(model, kv, ids)
    for length, size, before in ((150, 16, 0), (220, 16, 144), (300, 8, 208), (300, 8, 296)):
        with KVStore(f"file://{tmp_path}", read="always") as store:
            pool = KVPool.for_model(model, kv, size, max_tokens=1200, store=store)
            found, logits = asked(model, pool, ids[:, :length])
            assert found == before
            assert torch.equal(logits, wanted[:, found:length])
            assert pool.why(ids[:, :length]) == [] if pool.events else True


def test_pages_of_a_window_are_of_one_plan_for_all_layers(tmp_path: Path) -> None:
    """Keys of a layer follow from what the layers before it read, which may be kept otherwise."""
    model, ids = model_of("Gemma3"), text(150)
    config = config_digest(model.config)
    for name, full in (("first", "int4:g8"), ("second", "int8")):
        layers = tuple((kind, kind) for kind in ("int8", full, "int8"))
        BitPlan(config, layers, 1.0, 0.0).save(tmp_path / f"{name}.json")
    url, plans = f"file://{tmp_path}/store", ["first", "second", "second"]
    for plan in plans:
        kv = str(tmp_path / f"{plan}.json")
        with KVStore(url, read="always") as store:
            pool = KVPool.for_model(model, kv, 8, max_tokens=800, store=store)
            found, logits = asked(model, pool, ids)
            assert torch.equal(logits, cold(model, kv, ids)[:, found:])
            assert pool.flush()
    assert found == 144


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_windows(name: str) -> None:
    model, ids = family(name, "kvloom"), text(60)
    enable(model, batch_invariant=True)
    pool = KVPool.for_model(model, page_size=4, max_tokens=400)
    found = [asked(model, pool, ids[:, :length]) for length in (40, 60)]
    assert [n for n, _ in found] == [0, 40]
    assert torch.equal(found[1][1], cold(model, "auto", ids)[:, 40:])
    layers = {layer.window for layer in pool.begin(ids).layers}
    assert any(layers)


def test_a_loaded_pool_finds_what_it_found(tmp_path: Path) -> None:
    model, ids = model_of("Gemma3"), text(200)
    pool = KVPool.for_model(model, "int4:g8", 8, max_tokens=800)
    asked(model, pool, ids)
    torch.save(pool, tmp_path / "pool")
    loaded = torch.load(tmp_path / "pool", weights_only=False).bind(model)
    found, logits = asked(model, loaded, ids)
    assert found == 192 and torch.equal(logits, cold(model, "int4:g8", ids)[:, 192:])
