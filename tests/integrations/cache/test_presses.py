"""Presses evict tokens layer by layer, and give what they give over transformers' own cache."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.models.test_families import family
from oracles.language_models import FakeQuantCache, FakeQuantCache4, make_model
from oracles.presses import (
    LENGTH,
    Compress,
    filled,
    greedy,
    keep,
    lengths,
    press,
    pressed,
    pyramid,
    step,
    text,
    think,
)
from torch import Tensor
from transformers import DynamicCache

from kvloom.integrations.transformers import KVCache
from kvloom.integrations.transformers.attention.in_place import attention
from kvloom.integrations.transformers.attention.lazy_states import LazyStates
from kvloom.quant.affine import dequantize, quantize

KINDS: dict[str, type[DynamicCache]] = {
    "auto": DynamicCache,
    "int8:g16": FakeQuantCache,
    "int4:g16,rotate=none,recent=0": FakeQuantCache4,
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
@pytest.mark.parametrize("compress", [pyramid, think, keep(0.5), keep(0.2, 0.7), keep(0.5, 1.0, 0.5)])
def test_tokens_are_those_of_the_stock_cache(compress: Compress, attention: str, kv: str) -> None:
    model = make_model()
    stock = pressed(model, KINDS[kv](config=model.config), compress, rows=2)
    ours = filled(make_model(attention), compress, rows=2, kv=kv)
    assert lengths(ours) == lengths(stock)
    expected, expected_logits = greedy(model, stock)
    actual, logits = greedy(make_model(attention), ours)
    assert torch.equal(actual, expected)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kv", ["auto", "int8:g16", "int4:g16", "int4:g16,recent=0"])
def test_many_tokens_are_read_in_place_as_one_by_one(kv: str) -> None:
    model = make_model("kvloom")
    cache, question = filled(model, rows=2, kv=kv), text(7, 1, rows=2)
    expected = step(model, cache.fork(), question)
    position = torch.arange(LENGTH, LENGTH + 7)[None]
    logits = model(question, position_ids=position, past_key_values=cache).logits[:, -1:]
    # A number between two codes may become either, if a sum before it has another order.
    torch.testing.assert_close(logits, expected, rtol=5e-3, atol=5e-3)
    assert lengths(cache) == [39, 27, 15]


@pytest.mark.parametrize("kv", ["int4:g16", "int8:g16,recent=6"])
def test_gathered_newest_tokens_are_those_in_place(kv: str) -> None:
    model = make_model("kvloom")
    cache, results = filled(model, kv=kv), []
    for name in ("sdpa", "kvloom"):
        model.set_attn_implementation(name)
        results.append(greedy(model, cache.fork()))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=5e-3, atol=5e-3)


def test_what_a_press_kept_is_read_as_codes_and_what_follows_as_it_was_computed() -> None:
    model = make_model()
    cache, kept = filled(model, kv="int8:g16,recent=6"), {}
    with press(model, lambda m, k, v: kept.setdefault(m.layer_idx, (k[:, :, -5:], v[:, :, -5:]))):
        step(model, cache, text(1))
    new = torch.randn(1, 2, 3, 16)
    for i, layer in enumerate(cache.layers):
        cache.update(new, new, i)
        for actual, old in zip((layer.keys, layer.values), kept[i], strict=True):
            codes = dequantize(*quantize(old, 8, 16, torch.float16), 8, torch.float32)
            assert torch.equal(actual, torch.cat([codes, new], 2))


@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
def test_a_press_may_evict_again_and_again(attention: str) -> None:
    found = []
    for cache_of in (lambda model: DynamicCache(config=model.config), KVCache.for_model):
        model = make_model(attention)
        cache = pressed(model, cache_of(model))
        tokens = []
        for i in range(4):
            with press(model, pyramid if i % 2 else lambda _, k, v: (k[:, :, -9:], v[:, :, -9:])):
                step(model, cache, text(1, i), LENGTH + 5 * i)
            tokens.append(greedy(model, cache, 4)[0])
        found.append((torch.cat(tokens), lengths(cache)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
def test_layers_with_a_window_keep_what_they_see(attention: str) -> None:
    model = family("Gemma3", "sdpa")
    full = [i for i, layer in enumerate(KVCache.for_model(model).layers) if not layer.is_sliding]
    assert 0 < len(full) < len(model.model.layers)

    def every_other(_: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys[:, :, ::2], values[:, :, ::2]  # the norms of keys are all the same

    stock = pressed(model, DynamicCache(config=model.config), every_other, layers=full)
    model.set_attn_implementation(attention)
    ours = pressed(model, KVCache.for_model(model, page_size=4), every_other, layers=full)
    assert set(lengths(ours)) == {LENGTH, LENGTH // 2}
    assert lengths(ours) == lengths(stock)
    actual = greedy(model, ours, 8)[0]
    model.set_attn_implementation("sdpa")
    assert torch.equal(actual, greedy(model, stock, 8)[0])


@pytest.mark.parametrize("kv", ["auto", "int8:g16", "int4:g16,recent=0"])
@pytest.mark.parametrize("compress", [pyramid, keep(0.5)])
def test_a_layer_takes_the_bytes_of_the_tokens_it_has(compress: Compress, kv: str) -> None:
    model = make_model()
    whole, cache = filled(model, lambda _, k, v: (k, v), kv=kv), filled(model, compress, kv=kv)
    for layer, other in zip(cache.layers, whole.layers, strict=True):
        assert layer.pages.nbytes == layer.pages.nbytes_per_token * layer.get_seq_length()  # whole pages
        assert layer.pages.nbytes < other.pages.nbytes
    assert cache.nbytes <= 0.5 * whole.nbytes
    assert cache.num_pages_held == sum({n // 4 for n in lengths(cache)})


def test_what_a_layer_had_is_freed_before_the_next_layer_has_its_own() -> None:
    model, seen = make_model(), []

    def compress(module: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(cache.nbytes)
        return keys[:, :, :4], values[:, :, :4]

    cache = KVCache.for_model(model, page_size=4)
    pressed(model, cache, compress)
    layer = seen[0]
    assert seen == [layer, layer + layer // 10, layer + layer // 5]


def test_a_fork_keeps_what_is_evicted_until_it_goes() -> None:
    model = make_model()
    cache = KVCache.for_model(model, page_size=4)
    model(text(LENGTH), past_key_values=cache)
    fork, same = cache.fork(), cache.fork()
    expected = greedy(model, same)[0]
    with press(model, pyramid):
        step(model, cache, text(1, 1))
    assert len(cache.sequences) == 3
    assert torch.equal(greedy(model, fork)[0], expected)
    pages = fork.sequences[0].pages
    del same
    gc.collect()
    assert pages.pool.num_active == fork.num_pages_held == 13


def test_layers_of_one_length_share_sequences() -> None:
    model = make_model()
    cache = filled(model, keep(0.5, 0.5, 0.2))
    assert [x.num_positions for x in cache.sequences] == [20, 8]
    with press(model, lambda _, k, v: (k[:, :, -6:], v[:, :, -6:])):
        step(model, cache, text(1))
    assert lengths(cache) == [6, 6, 6]
    assert len(filled(model, keep(0.5)).sequences) == 1
    cache.reset()
    model(text(9), past_key_values=cache)
    assert [x.num_positions for x in cache.sequences] == [9]


def test_attention_takes_dropout_where_other_implementations_do() -> None:
    """kvpress wraps each attention function, and gives it dropout behind the mask."""
    query = torch.randn(1, 2, 3, 8)
    expected, _ = attention(torch.nn.Module(), query, query, query, None, scaling=0.5)
    actual, _ = attention(torch.nn.Module(), query, query, query, None, 0.0, scaling=0.5)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kv", ["auto", "int8:g16"])
def test_keys_that_attention_was_given_can_be_written(kv: str) -> None:
    """AdaKVPress masks keys of single heads so, before attention reads them."""
    model = make_model("kvloom")
    cache = KVCache.for_model(model, kv=kv, page_size=4)
    model(text(9), past_key_values=cache)
    kept = cache.layers[0].keys.clone()
    query, state = torch.randn(1, 8, 1, 16), torch.randn(1, 2, 1, 16)
    keys, values = cache.update(state, state, 0)
    assert isinstance(keys, LazyStates)
    plain, plain_values = keys.gather().clone(), values.gather().clone()
    where = (torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([2, 5]))
    keys[where] = plain[where] = torch.randn(2, 16)
    values[:, 1, 4] = plain_values[:, 1, 4] = torch.randn(16)
    expected, _ = attention(torch.nn.Module(), query, plain, plain_values, None)
    actual, _ = attention(torch.nn.Module(), query, keys, values, None)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(cache.layers[0].keys[:, :, :9], kept)
