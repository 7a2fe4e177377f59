"""Assigning keys and values replaces what is stored, or raises; no write is lost in silence."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.models.test_families import family
from oracles.language_models import FakeQuantCache, make_model
from torch import Tensor
from transformers import DynamicCache

from kvloom.errors import ShapeError, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def text(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(model: Any, tokens: Tensor, **options: Any) -> KVCache:
    cache = KVCache.for_model(model, page_size=4, **options)
    model(tokens, past_key_values=cache)
    return cache


@pytest.mark.parametrize(("kv", "stock"), [("auto", DynamicCache), ("int8:g16", FakeQuantCache)])
@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
def test_concatenation_as_the_caching_document_writes_it(attention: str, kv: str, stock: Any) -> None:
    model, tokens = make_model(), text(9, rows=2)
    key_states, value_states = states(3, 2, 2, 4, 16)[:2], states(3, 2, 2, 4, 16, seed=1)[:2]
    logits = []
    for cache in (stock(config=model.config), KVCache.for_model(model, kv=kv, page_size=4)):
        model(tokens, past_key_values=cache)
        for idx in range(3):
            new = key_states[idx % 2], value_states[idx % 2]
            if isinstance(cache, FakeQuantCache):
                cache.update(*new, idx)
            else:
                cache.layers[idx].keys = torch.cat([cache.layers[idx].keys, new[0]], dim=-2)
                cache.layers[idx].values = torch.cat([cache.layers[idx].values, new[1]], dim=-2)
        assert cache.get_seq_length() == 13
        if isinstance(cache, KVCache):
            model.set_attn_implementation(attention)
        logits.append(model(text(2, 1, 2), past_key_values=cache).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)


def test_one_side_of_as_many_tokens_leaves_the_other_bit_for_bit() -> None:
    model = make_model()
    cache = filled(model, text(9), kv="int8:g16")
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    cache.layers[1].values = before[1][1] * 2
    assert torch.equal(cache.layers[1].keys, before[1][0])
    torch.testing.assert_close(cache.layers[1].values, before[1][1] * 2, rtol=2e-2, atol=1e-2)
    cache.layers[1].keys = torch.zeros_like(before[1][0])
    assert not cache.layers[1].keys.any()
    for idx in (0, 2):
        assert torch.equal(cache.layers[idx].keys, before[idx][0])
        assert torch.equal(cache.layers[idx].values, before[idx][1])


@pytest.mark.parametrize("kv", ["auto", "int8:g16"])
def test_a_fork_does_not_see_what_is_assigned(kv: str) -> None:
    model = make_model()
    cache = filled(model, text(9), kv=kv)
    fork = cache.fork()
    expected = model(text(2, 1), past_key_values=copy.deepcopy(cache)).logits
    for layer in cache.layers:
        layer.keys = layer.keys * 0
    assert torch.equal(model(text(2, 1), past_key_values=fork).logits, expected)
    assert not torch.equal(model(text(2, 1), past_key_values=cache).logits, expected)


def test_a_prefix_of_a_pool_does_not_change() -> None:
    model = make_model()
    pool = KVPool.for_model(model, page_size=4, max_tokens=100)
    cache = pool.begin(text(12))
    model(text(12), past_key_values=cache)
    pool.commit(cache, text(12))
    keys = pool.begin(text(13)).layers[0].keys.clone()
    cache.layers[0].keys = torch.zeros_like(cache.layers[0].keys)
    assert torch.equal(pool.begin(text(13)).layers[0].keys, keys)
    pool.check()


def test_what_was_assigned_is_not_found_in_a_pool() -> None:
    model = make_model()
    pool = KVPool.for_model(model, page_size=4, max_tokens=100)
    for change in (
        lambda layer: setattr(layer, "keys", torch.zeros_like(layer.keys)),
        lambda layer: layer.values.zero_(),
    ):
        cache = pool.begin(text(12))
        model(text(12), past_key_values=cache)
        change(cache.layers[1])
        pool.commit(cache.fork(), text(12))
        assert pool.begin(text(13)).get_seq_length() == 0


def test_fewer_tokens_can_be_assigned() -> None:
    model = make_model()
    cache, short = filled(model, text(12)), filled(model, text(12)[:, :7])
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, :7]
        layer.values = layer.values[:, :, :7]
    assert cache.get_seq_length() == 7
    logits = [model(text(2, 1), past_key_values=c).logits for c in (cache, short)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert cache.sequences[0].num_positions == 9
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, :4]
        layer.values = layer.values[:, :, :4]
    cache.crop(-1)
    assert cache.get_seq_length() == 3


def test_rows_that_were_cropped_apart_keep_their_own() -> None:
    model = make_model("kvloom")
    caches = [filled(model, text(9, rows=2)) for _ in range(2)]
    for cache in caches:
        cache.crop([-3, 0])
    for layer in caches[0].layers:
        layer.keys = layer.keys.clone()
        layer.values = layer.values.clone()
    position = torch.tensor([[6], [9]])
    logits = [model(text(1, 1, 2), position_ids=position, past_key_values=c).logits for c in caches]
    assert torch.equal(*logits)


def test_nothing_else_is_done_while_values_are_missing() -> None:
    model = make_model()
    cache = filled(model, text(9))
    layer = cache.layers[1]
    longer = torch.cat([layer.keys, layer.keys[:, :, :2]], dim=2)
    layer.keys = longer
    assert torch.equal(layer.keys, longer)
    message = "values must be assigned 11 tokens before anything else, as keys were, got 9"
    for use in (
        lambda: model(text(1), past_key_values=cache),
        lambda: cache.update(longer, longer, 1),
        lambda: cache.crop(-1),
        cache.fork,
        lambda: cache.reorder_cache(torch.tensor([0])),
    ):
        with pytest.raises(StateError, match=message):
            use()
    with pytest.raises(ShapeError, match="values must have 11 tokens as keys were assigned, got 10"):
        layer.values = longer[:, :, :10]
    layer.values = longer
    assert [int(x.get_seq_length()) for x in cache.layers] == [9, 11, 9]
    model(text(1), past_key_values=cache)


@pytest.mark.parametrize("name", ["Mistral", "Gemma2"])
def test_a_window_takes_as_many_as_it_has(name: str) -> None:
    model = family(name)
    cache = filled(model, text(30))
    layer = next(x for x in cache.layers if x.is_sliding)
    keys = layer.keys
    assert keys.shape[2] == 7
    layer.keys = keys + 1
    assert torch.equal(layer.keys, keys + 1)
    with pytest.raises(ShapeError, match="keys must have 7 columns, those that the window holds, got 8"):
        layer.keys = torch.cat([keys, keys[:, :, :1]], dim=2)
    assert torch.equal(layer.keys, keys + 1)


def test_fixed_storage_takes_all_its_columns() -> None:
    model = make_model()
    cache = filled(model, text(9), static=True, max_tokens=16)
    layer, before = cache.layers[0], cache.layers[0].values.clone()
    layer.keys = layer.keys * 2 + 1
    assert torch.equal(layer.values, before)
    assert int(layer.get_seq_length()) == 9
    with pytest.raises(ShapeError, match="keys must have 16 columns, all that fit, got 9"):
        layer.keys = layer.keys[:, :, :9]
    windows = filled(family("Mistral"), text(9), static=True, max_tokens=100)
    with pytest.raises(UnsupportedError, match="fixed storage with a window cannot be assigned"):
        windows.layers[0].keys = windows.layers[0].keys.clone()
    empty = KVCache.for_model(model, static=True, max_tokens=16)
    with pytest.raises(StateError, match="keys can be assigned after the first update"):
        empty.layers[0].keys = states(1, 2, 16, 16)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "keys must be a tensor, got NoneType"),
        (torch.zeros(9, 16), r"keys must be \[B, H, N, D\]"),
        (torch.zeros(1, 2, 9, 8), r"keys must be \[B, H, N, D\] with B=1, H=2, D=16"),
        (torch.zeros(2, 2, 9, 16), r"keys must be \[B, H, N, D\] with B=1, "),
        (torch.zeros(1, 2, 9, 16, dtype=torch.float16), "keys must be torch.float32, got torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(bad: Any, message: str) -> None:
    cache = filled(make_model(), text(9))
    keys = cache.layers[0].keys
    with pytest.raises(ShapeError, match=message):
        cache.layers[0].keys = bad
    assert torch.equal(cache.layers[0].keys, keys)


def test_a_frozen_cache_is_not_assigned_to() -> None:
    cache = filled(make_model(), text(9)).freeze()
    layer = cache.layers[0]
    for change in (
        lambda: setattr(layer, "keys", layer.keys.clone()),
        lambda: layer.update(layer.keys, layer.values),
        lambda: layer.crop(-1),
        layer.reset,
    ):
        with pytest.raises(StateError, match="frozen"):
            change()
    assert layer.get_seq_length() == 9
    cache.fork().layers[0].keys = layer.keys * 2


def test_the_first_tokens_can_be_assigned() -> None:
    model = make_model()
    whole = filled(model, text(9))
    cache = KVCache.for_model(model)
    for layer, other in zip(cache.layers, whole.layers, strict=True):
        layer.keys = other.keys
        layer.values = other.values
    logits = [model(text(2, 1), past_key_values=c).logits for c in (cache, whole)]
    assert torch.equal(*logits)


# --- in place -----------------------------------------------------------------------------------------------


def test_keys_of_fixed_storage_cannot_be_changed_in_place() -> None:
    cache = filled(make_model(), text(9), static=True, max_tokens=16)
    keys = cache.layers[0].keys
    with pytest.raises(UnsupportedError, match="cannot be changed in place"):
        cache.layers[0].keys.zero_()
    with pytest.raises(UnsupportedError, match="cannot be changed in place"):
        cache.layers[0].values[:, :, 0] = 1
    assert torch.equal(cache.layers[0].keys, keys)
    assert type(filled(make_model(), text(9)).to_legacy_cache()[0][0]) is Tensor
