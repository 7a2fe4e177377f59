"""What is saved and loaded holds the same tokens and shares what it shared; pages of others are not saved."""

from __future__ import annotations

import io
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.bits import generator
from oracles.round_trips import by_pickle, by_torch, every_way
from torch import Tensor

from kvloom.caches import (
    Cache,
    CacheFormat,
    FixedLayer,
    PagedLayer,
    Pages,
    PrefixCache,
    Sequences,
    SlidingWindowLayer,
    StaticSlidingWindowLayer,
    saving,
)
from kvloom.caches.rows.saving import SavedStorage
from kvloom.core.specs import QuantSpec

FORMATS: dict[str, Any] = {"float32": None, "int8": QuantSpec(8, 4), "int4": QuantSpec(4, 8, rotated=True)}
every_format = pytest.mark.parametrize("quant", FORMATS.values(), ids=FORMATS)


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 2, count, 8, generator=generator(seed))


def gathered(layers: list[PagedLayer]) -> list[Tensor]:
    return [x for layer in layers for x in layer.gather(torch.float32)]


def both_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def two_layers(sequences: Sequences) -> list[PagedLayer]:
    layers = [PagedLayer(sequences.format, sequences, i) for i in range(2)]
    for layer in layers:
        layer.num_tokens = sequences.num_positions
    return layers


@every_way
@every_format
@pytest.mark.parametrize("window", [None, 5])
def test_forks_share_their_pages_again(
    quant: QuantSpec | None, window: int | None, again: Callable[[Any], Any]
) -> None:
    memory = Pages(CacheFormat(quant=quant, page_size=4))
    first = two_layers(Sequences(memory, window))
    for layer in first:
        layer.append(tokens(2, 50, layer.index), tokens(2, 50, 7))
    second = two_layers(first[0].sequences.fork())
    for layer in second:
        layer.append(tokens(2, 1, 3), tokens(2, 1, 4))
    unsaved = two_layers(first[0].sequences.fork())
    for layer in unsaved:
        layer.append(tokens(2, 40, 5), tokens(2, 40, 5))
    held = len({ref for x in (first, second) for table in x[0].sequences.tables for ref in table.pages})
    assert held < memory.pool.num_active
    one, two = again((first, second))
    both_same(gathered(one + two), gathered(first + second))
    assert one[0].sequences.pages is two[0].sequences.pages
    assert one[0].sequences.num_pages_held == held
    for layers in ((one, first), (two, second)):
        for a, b in zip(*layers, strict=True):
            new = tokens(2, 3, 9)
            both_same(
                list(a.append(new, new).gather(torch.float32)), list(b.append(new, new).gather(torch.float32))
            )
    both_same(gathered(one + two), gathered(first + second))


def test_a_fork_that_is_saved_alone_brings_nothing_of_the_other() -> None:
    layers = two_layers(Sequences(CacheFormat(page_size=4)))
    for layer in layers:
        layer.append(tokens(1, 8), tokens(1, 8))
    fork = two_layers(layers[0].sequences.fork())
    secret = torch.full((1, 2, 64, 8), 4242.0)
    for layer in layers:
        layer.append(secret, secret)
    data = pickle.dumps(fork)
    assert torch.tensor(4242.0).numpy().tobytes() * 4 not in data
    assert len(data) < 12_000


def test_what_was_written_since_is_saved() -> None:
    """A pickler remembers what it has written, pages included; they hold something else now."""
    layers = two_layers(Sequences(CacheFormat(page_size=4)))
    for layer in layers:
        layer.append(tokens(1, 2), tokens(1, 2))
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dump(layers)
    before = gathered(layers)
    for layer in layers:
        layer.append(tokens(1, 1, 5), tokens(1, 1, 5))
    fork = two_layers(layers[0].sequences.fork())
    pickler.dump(fork)
    file.seek(0)
    unpickler = pickle.Unpickler(file)  # noqa: S301 (our own)
    both_same(gathered(unpickler.load()), before)
    both_same(gathered(unpickler.load()), gathered(fork))


def test_a_long_step_can_be_taken_back_after_loading() -> None:
    layers = two_layers(Sequences(CacheFormat(page_size=4), window=5))
    for count in (20, 60):
        for layer in layers:
            layer.append(tokens(1, count, count), tokens(1, count, count))
    loaded = by_pickle(layers)
    for each in (layers, loaded):
        each[0].sequences.remove([60])
        for layer in each:
            layer.num_tokens = 20
    both_same(gathered(loaded), gathered(layers))


@every_format
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("count", [3, 70])
def test_fixed_pages(quant: QuantSpec | None, window: int | None, count: int) -> None:
    layer = FixedLayer(CacheFormat(quant=quant, page_size=1, max_tokens=100), window)
    layer.append(tokens(2, count), tokens(2, count))
    loaded = by_torch(layer)
    assert (loaded.num_tokens, loaded.nbytes) == (count, layer.nbytes)
    new, query = tokens(2, 2, 1), tokens(2, 2, 2)
    assert torch.equal(loaded.append(new, new).attend(query), layer.append(new, new).attend(query))
    loaded.truncate(count - 1)
    layer.truncate(count - 1)
    assert torch.equal(loaded.append(new, new).attend(query), layer.append(new, new).attend(query))
    empty = by_torch(FixedLayer(CacheFormat(page_size=1, max_tokens=100), window))
    empty.append(new, new)


@every_way
@every_format
def test_prefixes_are_found_again(quant: QuantSpec | None, again: Callable[[Any], Any]) -> None:
    form = CacheFormat(quant=quant, page_size=4, max_tokens=128)
    cache = PrefixCache(form, num_layers=2, heads=2, head_dim=8, dtype=torch.float32)
    a = cache.begin(range(11), "salt")
    for i in range(2):
        cache.append(a, i, tokens(1, 11, i)[0].transpose(0, 1), tokens(1, 11, 5)[0].transpose(0, 1))
    cache.commit(a)
    ended = cache.begin([*range(100, 109)], "salt")
    for i in range(2):
        cache.append(ended, i, tokens(1, 9, i)[0].transpose(0, 1), tokens(1, 9, 5)[0].transpose(0, 1))
    cache.commit(ended)
    cache.end(ended)
    loaded, b = again((cache, a))
    query = tokens(2, 1)[:1, :, 0].repeat(1, 2, 1)
    for i in range(2):
        assert torch.equal(loaded.attend(query, [b], i), cache.attend(query, [a], i))
    assert loaded.report() == cache.report()
    for prompt in (range(12), range(100, 110)):
        assert loaded.begin(prompt, "salt").num_cached == 8
        assert loaded.begin(prompt, "other").num_cached == 0
    loaded.check()


KINDS: dict[str, Callable[[], Cache]] = {
    "dynamic": Cache.dynamic,
    "static": lambda: Cache.static(40),
    "quantized": lambda: Cache.quantized("int8:g4", recent=3),
    "windows": lambda: Cache([SlidingWindowLayer(5, 2), StaticSlidingWindowLayer(5, 2)]),
}


@every_way
@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_layers(kind: str, again: Callable[[Any], Any]) -> None:
    cache = KINDS[kind]()
    for layer_idx in range(2):
        cache.update(tokens(2, 20, layer_idx), tokens(2, 20, 5), layer_idx)
    loaded = again(cache)
    for count in (1, 4):
        for layer_idx in range(2):
            new = tokens(2, count, 8)
            both_same(list(loaded.update(new, new, layer_idx)), list(cache.update(new, new, layer_idx)))


class Nothing(io.RawIOBase):
    """A file that keeps nothing of what is written."""

    def write(self, data: Any) -> int:
        return len(memoryview(data))


@pytest.mark.parametrize("kind", ["pages", "fixed", "prefixes"])
def test_protocol_5_has_a_small_part_of_the_tokens_in_memory(kind: str) -> None:
    held = torch.randn(1, 2, 4096, 64)
    if kind == "prefixes":
        form = CacheFormat(page_size=16, max_tokens=4096)
        cache: Any = PrefixCache(form, num_layers=4, heads=2, head_dim=64, dtype=torch.float32)
        sequence = cache.begin(range(4096))
        for layer in range(4):
            cache.append(sequence, layer, held[0].transpose(0, 1), held[0].transpose(0, 1))
    else:
        cache = [
            PagedLayer(CacheFormat()) if kind == "pages" else FixedLayer(CacheFormat(max_tokens=4096))
            for _ in range(4)
        ]
        for layer in cache:
            layer.append(held, held)
    nbytes = 4 * 2 * held.nbytes
    tracemalloc.start()
    pickle.dump(cache, Nothing(), protocol=5)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < nbytes / 4, most / nbytes


def test_what_earlier_releases_pickled_is_read() -> None:
    storage = two_layers(Sequences(CacheFormat(page_size=4)))[0]
    storage.append(tokens(1, 8), -tokens(1, 8))
    kept = storage.storage
    assert kept is not None
    specs, tensors = saving._copied(kept, torch.arange(8))
    old = SavedStorage.__new__(SavedStorage)
    own = {"specs": specs, "page_size": 4, "layout": "auto", "is_gathered": False}
    old.__setstate__(own | {"tensors": tensors, "smoothing": None})
    read = old.storage()
    read.reserve(1, 2)
    old.write(read, torch.arange(8))
    assert old.num_pages == 2
    for x, y in zip(saving._copied(read, torch.arange(8)).tensors, tensors, strict=True):
        assert x is y is None or torch.equal(x, y)
