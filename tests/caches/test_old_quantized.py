"""Pickles of quantized layers from when codes and newest tokens were apart: they are read, and go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles.bits import assert_same_bits, generator
from oracles.round_trips import by_pickle
from torch import Tensor

from kvloom.caches import Cache, CacheFormat, PagedLayer, QuantizedLayer
from kvloom.caches.layers.assigning import Assignment
from kvloom.core.specs import QuantSpec


class Old:
    """What pickled a layer then: its class, and the state of its object."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return object.__new__, (QuantizedLayer,), self.state


def tokens(count: int, seed: int) -> Tensor:
    return torch.randn(2, 2, count, 8, generator=generator(seed), dtype=torch.float32).bfloat16()


def written(kind: str, recent: int, count: int) -> Old:
    """A layer of ``count`` tokens, of which the last ``recent`` were no codes."""
    quant = replace(QuantSpec.parse(kind, "kv", "keys"), scale_dtype=torch.float16)
    codes = PagedLayer(CacheFormat(quant=quant, page_size=128, values=CacheFormat(quant=quant)))
    key, value, sealed = tokens(count, 1), tokens(count, 2), max(count - recent, 0)
    newest = (key[:, :, sealed:], value[:, :, sealed:]) if recent and count else None
    if sealed:
        codes.update(key[:, :, :sealed], value[:, :, :sealed])
    return Old(
        dtype=torch.bfloat16 if count else None,
        assignment=Assignment(),
        recent=recent,
        _codes=codes,
        _recent=newest,
    )


@pytest.mark.parametrize("kind", ["int8:g4", "int4:g8,rotate=both"])
@pytest.mark.parametrize(("recent", "count"), [(0, 0), (3, 0), (0, 20), (5, 3), (5, 5), (3, 7), (32, 200)])
def test_it_is_read_and_goes_on_as_a_layer_of_now(kind: str, recent: int, count: int) -> None:
    layer: QuantizedLayer = by_pickle(written(kind, recent, count))
    now = QuantizedLayer(kind, recent)
    assert type(layer) is QuantizedLayer and layer.get_seq_length() == count
    if count:
        now.update(tokens(count, 1), tokens(count, 2))
    for step in range(3):
        new = tokens(1, 10 + step), tokens(1, 20 + step)
        for got, want in zip(layer.update(*new), now.update(*new), strict=True):
            assert_same_bits(got, want, f"step {step}")
    for a, b in zip(layer.codes(), now.codes(), strict=True):
        assert a is not None and b is not None
        assert_same_bits(a.contiguous(), b.contiguous(), "codes")
    again = by_pickle(layer)
    assert torch.equal(again.keys, layer.keys) and again.format == layer.format


def test_what_was_quantized_is_not_quantized_again() -> None:
    old = written("int4:g8,rotate=both", 5, 40)
    codes: PagedLayer = old.state["_codes"]
    for each in codes.storage.tensors[2:]:  # type: ignore[union-attr]
        if each is not None:  # other scales than those that quantizing would find
            each.mul_(1.5)
    before = codes.gather(torch.bfloat16)
    layer = by_pickle(old)
    for got, want in zip((layer.keys, layer.values), before, strict=True):
        assert_same_bits(got[:, :, :35].contiguous(), want, "sealed")
    for side, scale in zip(layer.codes()[:2], layer.codes()[2:], strict=True):
        assert side is not None and scale is not None and side.shape[1] == scale.shape[1] == 40


def test_a_cache_of_such_layers_goes_on() -> None:
    cache = Cache.quantized("int8:g4", 3, num_layers=2)
    new = tokens(1, 3), tokens(1, 4)
    for i in range(2):
        cache.layers[i] = by_pickle(written("int8:g4", 3, 12))
    cache = Cache(cache.layers)
    fork = cache.fork()
    for i in range(2):
        assert cache.update(*new, i)[0].shape[2] == 13
    cache.crop(5)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert (cache.get_seq_length(), fork.get_seq_length()) == (5, 12)
