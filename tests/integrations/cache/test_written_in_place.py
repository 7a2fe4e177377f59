"""Keys and values that are changed in place change the cache, as those of transformers' own cache do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracles.language_models import FakeQuantCache, FakeQuantCache4, make_model
from oracles.presses import (
    filled,
    greedy,
    keep,
    pressed,
    step,
    text,
)
from torch import Tensor
from transformers import DynamicCache

from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache

KINDS: dict[str, type[DynamicCache]] = {
    "auto": DynamicCache,
    "int8:g16": FakeQuantCache,
    "int4:g16,rotate=none,recent=0": FakeQuantCache4,
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda x: x.mul_(0.5),
    "item": lambda x: x.__setitem__((slice(None), 0, 3), 1.5),
    "view": lambda x: x[:, :, 2:5].zero_(),
    "view of a view": lambda x: x.transpose(1, 2)[:, 3].add_(1),
    "out": lambda x: torch.add(x, 1, out=x),
    "scatter": lambda x: x.scatter_(-1, torch.zeros(*x.shape[:3], 1, dtype=torch.int64), 0),
    "data": lambda x: x.data.mul_(2),
    "foreach": lambda x: torch._foreach_add_([x], 1),
}


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("write", WRITES)
def test_a_change_in_place_is_that_of_the_stock_cache(write: str, kv: str) -> None:
    model = make_model()
    stock, ours = KINDS[kv](config=model.config), KVCache.for_model(model, kv=kv, page_size=4)
    for cache in (stock, ours):
        model(text(9), past_key_values=cache)
        keys, values = cache.layers[1].keys, cache.layers[1].values
        WRITES[write](keys)
        WRITES[write](values)
        WRITES[write](keys)
    for side in ("keys", "values"):
        actual, expected = (getattr(x.layers[1], side) for x in (ours, stock))
        largest = expected.abs().max() / (7 if "int4" in kv else 127)  # of the steps between codes
        torch.testing.assert_close(actual, expected, rtol=0, atol=0 if kv == "auto" else 2 * largest.item())
        assert torch.equal(getattr(ours.layers[0], side), getattr(stock.layers[0], side))
    if kv == "auto":
        assert torch.equal(ours.layers[1].keys, stock.layers[1].keys)
        assert torch.equal(greedy(model, ours)[0], greedy(model, stock)[0])


def test_what_was_read_before_a_change_cannot_be_written() -> None:
    model = make_model()
    cache = KVCache.for_model(model, page_size=4)
    model(text(9), past_key_values=cache)
    layer = cache.layers[1]
    for change in (
        lambda: step(model, cache, text(1)),
        lambda: cache.crop(-1),
        lambda: setattr(layer, "keys", torch.zeros_like(layer.keys)),
        lambda: layer.keys.add_(1),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: pressed(model, cache, keep(0.5)),
    ):
        keys = layer.keys
        change()
        before, read = layer.keys.clone(), keys.clone()
        with pytest.raises(
            UnsupportedError, match=r"gathered before their cache changed .* read layer\.keys again"
        ):
            keys.mul_(2)
        assert torch.equal(keys, read)
        assert torch.equal(layer.keys, before)


def test_a_fork_and_a_frozen_cache_are_not_changed_in_place() -> None:
    model = make_model()
    cache = KVCache.for_model(model, page_size=4)
    model(text(9), past_key_values=cache)
    fork = cache.fork()
    before = cache.layers[1].keys.clone()
    fork.layers[1].keys.zero_()
    assert not fork.layers[1].keys.any()
    assert torch.equal(cache.layers[1].keys, before)
    keys = cache.layers[1].keys
    cache.freeze()
    with pytest.raises(StateError, match="frozen"):
        keys.zero_()
    assert torch.equal(keys, before)
    del cache, fork
    gc.collect()
    keys.zero_()  # of no cache any more
    assert not keys.any()


@pytest.mark.parametrize("name", ["transpose_", "resize_", "requires_grad_", "squeeze_"])
def test_a_shape_cannot_be_changed_in_place(name: str) -> None:
    cache = filled(make_model())
    keys = cache.layers[0].keys
    options = {"transpose_": (1, 2), "resize_": (1, 2)}
    with pytest.raises(UnsupportedError, match="but not their shape or memory"):
        getattr(keys, name)(*options.get(name, ()))
    assert keys.shape == (1, 2, 32, 16)
