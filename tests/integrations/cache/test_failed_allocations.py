"""A ``KVCache`` that finds no memory is as it was, or says that a forward broke off and can be taken back."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from integrations.models.test_families import FAMILIES, family
from integrations.pool.test_pool_rows import NAMES, expect_rows, forward, padded
from integrations.pool.test_pool_windows import model_of, text
from oracles.allocations import STRIDE, Refusing, Run, every_failure, same
from oracles.language_models import make_model
from oracles.pairs import pairwise
from torch import Tensor

from kvloom.caches import Pages
from kvloom.errors import OutOfPages, StateError
from kvloom.integrations.transformers import KVCache, KVPool
from kvloom.paging import PrefixTree, check

KINDS = pytest.mark.parametrize("kv", ["auto", "int8:g8"])


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def states(rows: int, count: int, seed: int) -> Tensor:
    return torch.randn(rows, 2, count, 8, generator=torch.Generator().manual_seed(seed))


class World:
    """Caches that share pages, and the forwards of a model that is nothing but their updates."""

    def __init__(self, cache: KVCache, is_refused: bool) -> None:
        self.caches = [cache]
        self.run = Run(self.look, self.check, is_refused)

    def forward(self, i: int, count: int, seed: int) -> None:
        """A step of all layers. Where it breaks off within it, the cache says so until it is cropped."""
        cache = self.caches[i]
        rows = cache.num_rows or 2

        def step() -> list[Tensor]:
            cache.get_mask_sizes(count, 0)
            read: list[Tensor] = []
            for layer_idx in range(len(cache.layers)):
                new = states(rows, count, 10 * seed + layer_idx)
                keys, values = cache.update(new, new + 1, layer_idx)
                read += (
                    seen(cache.layers[layer_idx], keys, count),
                    seen(cache.layers[layer_idx], values, count),
                )
            return read

        def recover() -> None:
            lengths = {int(layer.get_seq_length()) for layer in cache.layers}
            if len(lengths) > 1:
                with pytest.raises(StateError, match="layers must have one length"):
                    cache.get_mask_sizes(count, 0)
                cache.crop(-count)

        self.run.step(step, recover)

    def look(self) -> list[Tensor]:
        found: list[Tensor] = []
        for cache in self.caches:
            lengths = [int(layer.get_seq_length()) for layer in cache.layers]
            columns = [sequences.num_positions for sequences in cache.sequences]
            found.append(torch.tensor([*lengths, *columns]))
            for layer, length in zip(cache.layers, lengths, strict=True):
                if length:
                    found += seen(layer, layer.keys, 0), seen(layer, layer.values, 0)
        return [x.clone() for x in found]

    def check(self) -> None:
        for cache in self.caches:
            cache.expect_whole()
            for sequences in cache.sequences:
                pool = sequences.pages.pool
                pool._evict = None  # a tree that finds nothing; pools have one at a time
                tables = [table for other in sequences.pages.users for table in other.tables]
                check(pool, PrefixTree(pool, sequences.format.page_size), tables)


def seen(layer: Any, x: Tensor, count: int) -> Tensor:
    """Of the columns of a layer those that its tokens see: fixed storage returns others, too."""
    if not layer.is_compileable:
        return x
    end = layer.pages.num_tokens
    first = 0 if layer.window is None else max(end - count - layer.window + 1, 0)
    return x[:, :, first:end]


@pytest.mark.parametrize(
    ("name", "options", "kv"),
    pairwise(
        ["Llama", "Gemma2"],
        [{"page_size": 4}, {"page_size": 1}, {"static": True, "max_tokens": 160}],
        ["auto", "int8:g8"],
    ),
    ids=str,
)
def test_every_allocation_of_a_cache_can_fail(name: str, options: dict[str, Any], kv: str) -> None:
    model = family(name)

    def program(is_refused: bool) -> Run:
        world = World(KVCache.for_model(model, kv=kv, **options), is_refused)
        world.forward(0, 6, 1)
        world.forward(0, 1, 2)
        world.run.step(lambda: world.caches.append(world.caches[0].fork()))
        world.forward(0, 1, 3)
        world.forward(1, 2, 4)
        if world.caches[0].sequences:  # beams share pages
            world.run.step(lambda: world.caches[0].batch_repeat_interleave(2))
            world.run.step(lambda: world.caches[0].reorder_cache(torch.tensor([3, 0, 1, 1])))
            world.forward(0, 1, 5)
            world.run.step(lambda: world.caches[0].crop([-1, 0, -2, 0]))
            world.forward(0, 1, 6)
        is_ring = "static" in options and name == "Gemma2"  # holds no more than 32 tokens behind the window
        world.forward(1, 20 if is_ring else 50, 7)
        world.run.step(lambda: world.caches[1].crop(-3))
        for seed in range(8, 14):  # past the end of a page
            world.forward(1, 1, seed)
        return world.run

    assert every_failure(program) > 100 // STRIDE


@pytest.mark.parametrize("error", [OutOfPages, torch.OutOfMemoryError])
def test_a_window_that_finds_no_room_takes_none_from_the_others(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family("Gemma2")
    cache = KVCache.for_model(model, page_size=4)

    def refuse(*_: Any) -> None:
        raise error("refused by the test")

    for count, rows in ((6, 2), (1, 2)):
        before = [
            (sequences.size, sequences.num_positions, sequences.num_pages_held)
            for sequences in cache.sequences
        ]
        with monkeypatch.context() as patch, pytest.raises(error, match="refused by the test"):
            patch.setattr(cache.sequences[1], "reserve", refuse)
            cache.update(states(rows, count, 1), states(rows, count, 2), 0)
        assert [
            (sequences.size, sequences.num_positions, sequences.num_pages_held)
            for sequences in cache.sequences
        ] == before
        for layer_idx in range(4):
            cache.update(states(rows, count, 1), states(rows, count, 2), layer_idx)
    cache.expect_whole()


@pytest.mark.parametrize("options", [{}, {"static": True, "max_tokens": 32}], ids=str)
@pytest.mark.parametrize(
    "change",
    [lambda c: c.reorder_cache(torch.tensor([1, 0])), lambda c: c.batch_repeat_interleave(2)],
    ids=["reorder", "repeat"],
)
def test_rows_that_some_layers_changed_are_not_read(
    change: Callable[[KVCache], None], options: dict[str, Any]
) -> None:
    """Layers with storage of their own change one after the other; when one cannot, the cache says so."""
    model = family("Llama")
    outcomes = set()
    for fail_at in itertools.count(1):
        cache = KVCache.for_model(model, **options)
        for layer_idx in range(len(cache.layers)):
            cache.update(states(2, 5, layer_idx), states(2, 5, layer_idx), layer_idx)
        before = cache.to_legacy_cache()
        try:
            with Refusing(fail_at):
                change(cache)
            outcomes.add("done")
            break
        except torch.OutOfMemoryError:
            try:
                cache.get_mask_sizes(1, 0)
            except StateError as error:
                assert "the same rows" in str(error)
                with pytest.raises(StateError, match="the same rows"):
                    cache.update(states(2, 1, 0), states(2, 1, 0), 0)
                cache.reset()
                cache.update(states(2, 1, 0), states(2, 1, 0), 0)
                outcomes.add("torn")
            else:
                same(
                    [x for pair in cache.to_legacy_cache() for x in pair],
                    [x for pair in before for x in pair],
                )
                outcomes.add("unchanged")
    assert outcomes == ({"done", "torn", "unchanged"} if options else {"done"})


def test_every_allocation_of_a_pool_can_fail() -> None:
    model = make_model()
    tokens = torch.arange(3, 30).unsqueeze(0)

    def program(is_refused: bool) -> Run:
        pool = KVPool.for_model(model, page_size=4, max_tokens=64)
        caches: list[KVCache] = []
        run = Run(lambda: [x for c in caches for x in c.layers[0].keys.clone()], pool.check, is_refused)

        def ask(prompt: Tensor) -> int:
            found: list[KVCache] = []
            run.step(lambda: found.append(pool.begin(prompt)))
            cache, start = found[0], found[0].get_seq_length()
            for layer_idx in range(len(cache.layers)):
                rng = torch.Generator().manual_seed(layer_idx)
                new = torch.randn(1, 2, prompt.shape[1] - start, 16, generator=rng)
                run.step(partial(cache.update, new, new, layer_idx))
            caches.append(cache)
            cache.origin.num_seen = prompt.shape[1]  # as in a forward of the model
            run.step(lambda: pool.commit(cache, prompt))
            return start

        assert [ask(tokens[:, :length]) for length in (14, 20, 27, 27)] == [0, 12, 20, 24]
        return run

    assert every_failure(program) >= max(12 // STRIDE, 6)  # each of 12 updates makes a tensor


@pytest.mark.parametrize("kv", ["auto", "int8", "int4:g8"])
@pytest.mark.parametrize("name", NAMES)
def test_a_first_forward_of_padded_rows_that_finds_no_memory_is_taken_back(
    name: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, and behind what was found of two rows, one of them within a page."""
    model, texts = model_of(name), [text(60), text(3, 1), text(70, 2)]
    pool = KVPool.for_model(model, kv, 8, max_tokens=1200)
    ids, mask = padded(texts)
    for start in (0, 64):
        cache = pool.begin(ids, attention_mask=mask)
        assert cache.get_seq_length() == start
        active = pool.report()["active"]
        for target in ("fit", "append"):
            with monkeypatch.context() as patch:
                patch.setattr(Pages, target, _refuse)
                with pytest.raises(MemoryError):
                    forward(model, cache, ids, mask)
            assert (cache.get_seq_length(), cache.begins) == (start, [10, 67, 0])
            assert pool.report()["active"] == active
        pool.check()
        expect_rows(model, kv, texts, forward(model, cache, ids, mask))
        pool.commit(cache, ids)


def _refuse(*args: Any) -> None:
    raise MemoryError("no memory")


@pytest.mark.skipif("Falcon-H1" not in FAMILIES, reason="this transformers has no Falcon-H1")
def test_found_states_for_which_there_is_no_memory_are_let_go() -> None:
    model = family("Falcon-H1")
    pool = KVPool.for_model(model, page_size=4, max_tokens=64, state_interval=8)
    tokens = torch.arange(3, 33).unsqueeze(0)
    cache = pool.begin(tokens)
    model(tokens, past_key_values=cache, use_cache=True)
    pool.commit(cache, tokens)
    del cache
    for fail_at in itertools.count(1):
        gc.collect()
        assert pool.report()["active"] == pool.report()["states"]["active"] == 0
        try:
            with Refusing(fail_at):
                found = pool.begin(tokens)
        except torch.OutOfMemoryError:
            pool.check()
        else:
            break
    assert fail_at > 4 and found.get_seq_length() == 24
