"""Layers of different lengths: what is done to them is right, or refused before anything changes."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracles.allocations import Refusing
from oracles.language_models import make_model
from oracles.presses import (
    LENGTH,
    Compress,
    filled,
    greedy,
    keep,
    lengths,
    pressed,
    pyramid,
    step,
    text,
    think,
)
from transformers import DynamicCache

from kvloom.errors import ArgumentError, OutOfPages, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


CHANGES: dict[str, Callable[[Any], Any]] = {
    "crop": lambda cache: cache.crop(-3),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_that_of_the_stock_cache(change: str, attention: str) -> None:
    model = make_model(attention)
    caches = [DynamicCache(config=model.config), KVCache.for_model(model, page_size=4)]
    found = []
    for cache in caches:
        pressed(model, cache, rows=2)
        step(model, cache, text(4, 1, rows=2))
        CHANGES[change](cache)
        found.append((greedy(model, cache), lengths(cache)))
    assert torch.equal(found[1][0][0], found[0][0][0])
    torch.testing.assert_close(found[1][0][1], found[0][0][1], rtol=1e-4, atol=1e-4)
    assert found[0][1] == found[1][1]


def test_a_layer_joins_no_sequences_that_went_on() -> None:
    model = make_model()
    cache = KVCache.for_model(model, page_size=4)
    model(text(9), past_key_values=cache)
    kept = [(layer.keys[:, :, :5], layer.values[:, :, :5]) for layer in cache.layers]
    cache.layers[0].keys, cache.layers[0].values = kept[0]
    more = torch.randn(1, 2, 1, 16)
    cache.update(more, more, 0)
    cache.layers[1].keys, cache.layers[1].values = kept[1]
    assert lengths(cache) == [6, 5, 9]
    assert [x.num_positions for x in cache.sequences] == [6, 5, 10]
    assert torch.equal(cache.layers[1].keys, kept[1][0])
    assert torch.equal(cache.layers[0].keys, torch.cat([kept[0][0], more], 2))


def test_a_crop_of_more_than_a_layer_has_leaves_it_none() -> None:
    """The stock cache of transformers 4 keeps some of such a layer."""
    model = make_model("kvloom")
    cache = filled(model)
    cache.crop(-14)
    assert lengths(cache) == [18, 6, 0]
    step(model, cache, text(2, 1))
    assert lengths(cache) == [20, 8, 2]
    cache.crop(-1)
    assert lengths(cache) == [19, 7, 1]


def test_a_fork_goes_its_own_way() -> None:
    model = make_model("kvloom")
    cache = filled(model)
    expected = [greedy(model, copy.deepcopy(cache))[0] for _ in range(2)]
    fork = cache.fork()
    step(model, cache, text(6, 3))
    assert lengths(cache) == [38, 26, 14]
    assert torch.equal(greedy(model, fork)[0], expected[0])
    assert torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("kv", ["auto", "int8:g16", "int4:g16"])
def test_a_saved_cache_goes_on(kv: str) -> None:
    model = make_model("kvloom")
    cache, file = filled(model, kv=kv), io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert lengths(loaded) == [32, 20, 8]
    assert torch.equal(greedy(model, loaded)[0], greedy(model, cache)[0])
    loaded.crop(-2)
    assert lengths(loaded) == [42, 30, 18]


def test_the_legacy_format_has_all_tokens_of_each_layer() -> None:
    model = make_model()
    cache = filled(model, keep(0.2, 0.5))
    for (key, value), layer in zip(cache.to_legacy_cache(), cache.layers, strict=True):
        assert torch.equal(key, layer.keys)
        assert torch.equal(value, layer.values)


def test_a_forward_that_breaks_off_is_reported() -> None:
    model = make_model()
    cache = filled(model)
    expected = greedy(model, cache.fork())[0]
    states = torch.randn(1, 2, 2, 16)
    cache.update(states, states, 0)
    assert [x.num_positions for x in cache.sequences] == [34, 22, 10]  # all have room, or none
    with pytest.raises(StateError, match=r"layers must have one length, got \[40, 42\]"):
        step(model, cache, text(1))
    cache.crop(-2)
    assert lengths(cache) == [32, 20, 8]
    assert torch.equal(greedy(model, cache)[0], expected)


def test_layers_share_pages_again_after_a_reset() -> None:
    model = make_model()
    for cache in (filled(model), filled(model).fork()):
        assert len(cache.sequences) == 3
        cache.reset()
        model(text(9), past_key_values=cache)
        assert len(cache.sequences) == 1
        assert lengths(cache) == [9, 9, 9]


@pytest.mark.parametrize(("attention", "count"), [("sdpa", 2), ("eager", 1)])
def test_a_mask_that_fits_one_layer_only_is_refused(attention: str, count: int) -> None:
    model = make_model(attention)
    cache = filled(model)
    message = rf"must be 'kvloom', .* different lengths \[8, 20, 32\], got '{attention}' with {count} tokens"
    with pytest.raises(UnsupportedError, match=message):
        model(text(count), past_key_values=cache)
    assert lengths(cache) == [32, 20, 8]
    model(text(3), past_key_values=filled(model, keep(0.5)))  # of one length


def test_a_mask_that_hides_columns_of_one_layer_is_refused() -> None:
    model = make_model("kvloom")
    cache = filled(model, rows=2)
    expected = greedy(model, cache.fork())[0]
    mask = torch.ones(2, 33, dtype=torch.int64)
    mask[0, :3] = 0
    with pytest.raises(ArgumentError, match="attention_mask must have 4 axes and 21 columns"):
        model(text(1, rows=2), attention_mask=mask, past_key_values=cache)
    cache.crop(-1)
    assert torch.equal(greedy(model, cache)[0], expected)


def test_rows_of_different_lengths_are_refused() -> None:
    model = make_model()
    cache = filled(model, rows=2)
    with pytest.raises(UnsupportedError, match=r"one number for all rows .* got \[-1, -2\]"):
        cache.crop([-1, -2])
    assert lengths(cache) == [32, 20, 8]
    cache.crop([-2, -2])
    assert lengths(cache) == [30, 18, 6]


@pytest.mark.parametrize("kv", ["auto", "int4:g16"])
@pytest.mark.parametrize("count", [30, 20])
def test_an_assignment_that_finds_no_memory_changes_nothing(count: int, kv: str) -> None:
    model = make_model("kvloom")
    whole = filled(model, keep(1.0), kv=kv)
    kept = [(layer.keys[:, :, -count:], layer.values[:, :, -count:]) for layer in whole.layers]
    for fail_at in range(1, 100):
        cache = whole.fork()
        cache.layers[0].keys, cache.layers[0].values = (
            x[:, :, -20:] for x in kept[0]
        )  # of the same number, too
        before = [layer.pages.gather(torch.float32) for layer in cache.layers]
        try:
            with Refusing(fail_at):
                cache.layers[1].keys, cache.layers[1].values = kept[1]
            break
        except torch.OutOfMemoryError:
            after = [layer.pages.gather(torch.float32) for layer in cache.layers]
            for pairs in zip(after, before, strict=True):
                assert all(torch.equal(*x) for x in zip(*pairs, strict=True))
            assert [x.num_positions for x in cache.sequences if x.is_required] == [20, LENGTH]
        cache.layers[1].keys, cache.layers[1].values = kept[1]
        assert lengths(cache) == [20, count, LENGTH]
        assert greedy(model, cache, 2)[0].shape == (1, 3)
    assert fail_at > 5


def test_more_tokens_than_there_is_room_for_change_nothing() -> None:
    model = make_model()
    cache = filled(model, keep(1.0), max_tokens=LENGTH)
    keys, values = cache.layers[1].keys, cache.layers[1].values
    cache.layers[1].keys = torch.cat([keys, keys], 2)
    with pytest.raises(OutOfPages):
        cache.layers[1].values = torch.cat([values, values], 2)
    assert len(cache.sequences) == 1
    cache.layers[1].keys = keys  # as many as there are, so nothing waits any more
    assert torch.equal(cache.layers[1].values, values)
    assert lengths(cache) == [LENGTH] * 3


@pytest.mark.parametrize("compress", [pyramid, keep(0.5), think])
def test_what_a_press_left_is_not_found_in_a_pool(compress: Compress) -> None:
    model = make_model()
    pool = KVPool.for_model(model, page_size=4, max_tokens=200)
    cache = pool.begin(text(LENGTH))
    pressed(model, cache, compress)
    pool.commit(cache, text(LENGTH))
    assert pool.begin(text(LENGTH)).get_seq_length() == 0
    del cache
    gc.collect()
    pool.check()
    assert pool.begin(text(LENGTH)).num_pages_held == 0


def test_a_prefix_of_a_pool_is_not_changed_by_a_press() -> None:
    model = make_model("kvloom")
    pool = KVPool.for_model(model, page_size=4, max_tokens=200)
    cache = pool.begin(text(LENGTH))
    model(text(LENGTH), past_key_values=cache)
    pool.commit(cache, text(LENGTH))
    cache = pool.begin(text(LENGTH + 4))
    assert cache.get_seq_length() == LENGTH
    for i, layer in enumerate(cache.layers):  # by hand: hooks are another model to a pool
        kept = layer.keys[:, :, : 8 * i + 5], layer.values[:, :, : 8 * i + 5]
        layer.keys = kept[0]
        layer.values = kept[1]
    assert lengths(cache) == [5, 13, 21]
    greedy(model, cache)
    again = pool.begin(text(LENGTH + 4))
    stock = DynamicCache(config=model.config)
    model(text(LENGTH), past_key_values=stock)
    assert torch.equal(again.layers[1].keys, stock.layers[1].keys)
    pool.check()
