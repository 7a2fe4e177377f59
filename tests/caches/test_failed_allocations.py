"""Memory that cannot be had changes nothing, and the same step is right when it is tried again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles.allocations import STRIDE, Run, every_failure
from oracles.bits import assert_same_bits, generator
from torch import Tensor

from kvloom.caches import (
    CacheFormat,
    DynamicLayer,
    FixedLayer,
    Layer,
    PagedLayer,
    Pages,
    PrefixCache,
    QuantizedLayer,
    Sequences,
    SlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from kvloom.caches.tensors.storage import Storage
from kvloom.caches.tensors.tokens import Tokens
from kvloom.core.specs import QuantSpec
from kvloom.errors import ShapeError
from kvloom.paging import PrefixTree, check

FORMATS: dict[str, Any] = {"float32": None, "int8": QuantSpec(8, 4), "int4": QuantSpec(4, 8, rotated=True)}
every_format = pytest.mark.parametrize("quant", FORMATS.values(), ids=FORMATS)


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 2, count, 8, generator=generator(seed))


def stored(layer: PagedLayer | FixedLayer, new: Tensor) -> tuple[Tensor, Tensor]:
    """What attention reads when new tokens are stored; if it cannot be gathered, nothing is."""
    return layer.update(new, new)


# --- pages --------------------------------------------------------------------------------------------------


class Forks:
    """Batches that share one memory, each with two layers."""

    def __init__(self, pages: Pages, window: int | None) -> None:
        self.pages = pages
        self.caches = [self.over(Sequences(pages, window))]

    def over(self, sequences: Sequences) -> list[PagedLayer]:
        layers = [PagedLayer(sequences.format, sequences, i) for i in range(2)]
        for layer in layers:
            layer.num_tokens = sequences.num_positions
        return layers

    def fork(self, i: int) -> None:
        self.caches.append(self.over(self.caches[i][0].sequences.fork()))

    def remove(self, i: int, counts: list[int]) -> None:
        sequences = self.caches[i][0].sequences
        sequences.remove(counts)
        for layer in self.caches[i]:
            layer.num_tokens = sequences.num_positions

    def look(self) -> list[Tensor]:
        """Everything that attention would read, and how long it is."""
        layers = [layer for layers in self.caches for layer in layers]
        gathered = [
            layer.gather(torch.float32) for layer in layers if layer.storage is not None and layer.size
        ]
        lengths = [n for x in layers for n in (x.num_tokens, x.sequences.num_positions, x.size)]
        return [torch.tensor(lengths), *(x for pair in gathered for x in pair)]

    def check(self) -> None:
        tables = [table for sequences in self.pages.users for table in sequences.tables]
        pool = self.pages.pool
        pool._evict = None  # a tree that finds nothing; pools have one at a time
        check(pool, PrefixTree(pool, self.pages.format.page_size), tables)


def forks(quant: QuantSpec | None, window: int | None, page_size: int, is_refused: bool) -> Run:
    """Prompts, forks, beams, rows of their own, long steps: all that sequences can do."""
    world = Forks(Pages(CacheFormat(quant=quant, page_size=page_size)), window)
    run = Run(world.look, world.check, is_refused)
    seeds = iter(range(1000))

    def append(i: int, rows: int, count: int) -> None:
        for layer in world.caches[i]:
            new = tokens(rows, count, next(seeds))
            run.step(lambda layer=layer, new=new: stored(layer, new))

    append(0, 2, 6)
    run.step(lambda: world.fork(0))
    append(0, 2, 1)
    append(1, 2, 2)
    run.step(lambda: world.caches[0][0].sequences.select([1, 1, 0]))
    append(0, 3, 1)
    run.step(lambda: world.fork(0))
    run.step(lambda: world.remove(2, [0, 2, 1]))
    append(2, 3, 3)
    append(0, 3, 45)
    append(1, 2, 5)
    run.step(lambda: world.remove(0, [45, 45, 45]))
    append(0, 3, 2)
    new = tokens(2, world.caches[1][0].num_columns, 77)
    run.step(lambda: world.caches[1][0].replace({0: new}))
    run.step(lambda: world.caches[1][1].replace({0: new, 1: new + 1}))
    append(1, 2, 1)
    return run


@every_format
@pytest.mark.parametrize(("window", "page_size"), [(None, 1), (None, 4), (5, 4), (5, 2)])
def test_forks_of_pages(quant: QuantSpec | None, window: int | None, page_size: int) -> None:
    refused = every_failure(lambda is_refused: forks(quant, window, page_size, is_refused))
    assert refused > 50 // STRIDE


@every_format
def test_sequences_that_find_each_others_prefixes(quant: QuantSpec | None) -> None:
    form = CacheFormat(quant=quant, page_size=4, max_tokens=96)

    def program(is_refused: bool) -> Run:
        cache = PrefixCache(form, num_layers=2, heads=2, head_dim=8, dtype=torch.float32)
        live: list[Any] = []

        def look() -> list[Tensor]:
            query = torch.ones(1, 4, 8)
            return [cache.attend(query, [x], i) for x in live for i in range(2) if min(x.stored)]

        run = Run(look, cache.check, is_refused)

        def store(sequence: Any) -> None:
            for i in range(2):
                count = len(sequence.tokens) - sequence.stored[i]
                new = tokens(1, count, 10 * len(sequence.tokens) + i)[0].transpose(0, 1)
                run.step(lambda i=i, new=new: cache.append(sequence, i, new, new))

        run.step(lambda: live.append(cache.begin(range(10))))
        store(live[0])
        run.step(lambda: cache.commit(live[0]))
        run.step(lambda: live.append(cache.begin([*range(8), 77])))
        store(live[1])
        run.step(lambda: live.append(cache.fork(live[0])))
        for sequence in live:
            run.step(lambda sequence=sequence: cache.extend(sequence, [5, 6]), None)
            store(sequence)
        run.step(lambda: cache.truncate(live[0], 7))
        run.step(lambda: cache.extend(live[0], [9]))
        store(live[0])
        return run

    assert every_failure(program) > 20 // STRIDE


# --- storage of a layer's own -------------------------------------------------------------------------------


LAYERS: dict[str, Callable[[], Layer]] = {
    "dynamic": DynamicLayer,
    "static": lambda: StaticLayer(80),
    "sliding": lambda: SlidingWindowLayer(6, rollback=2),
    "static sliding": lambda: StaticSlidingWindowLayer(6, rollback=2),
    "int8": lambda: QuantizedLayer("int8:g4"),
    "int4, recent": lambda: QuantizedLayer("int4:g8", recent=5),
}


def held(layer: Layer) -> list[Tensor]:
    if not int(layer.get_seq_length()):  # memory alone may stay
        return []
    return [torch.tensor(int(layer.get_seq_length())), layer.keys.clone(), layer.values.clone()]


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str) -> None:
    def program(is_refused: bool) -> Run:
        layer = LAYERS[kind]()
        run = Run(lambda: held(layer), lambda: None, is_refused)
        rows = 2
        for seed, count in enumerate((3, 1, 20, 1)):
            new = tokens(rows, count, seed)
            run.step(lambda new=new: layer.update(new, new))
        run.step(lambda: layer.crop(-2))
        run.step(lambda: layer.reorder(torch.tensor([1, 0])))
        run.step(lambda: layer.update(new, new))
        run.step(lambda: layer.repeat_interleave(2))
        run.step(lambda: layer.update(*[tokens(4, 18, 9)] * 2))
        run.step(lambda: layer.select(torch.tensor([2, 0, 1])))
        run.step(lambda: setattr(layer, "keys", layer.keys * 2))
        run.step(lambda: setattr(layer, "values", layer.values + 1))
        run.step(lambda: layer.update(*[tokens(3, 1, 9)] * 2))
        return run

    assert every_failure(program) > 15 // STRIDE


@every_format
@pytest.mark.parametrize("window", [None, 5])
def test_fixed_pages(quant: QuantSpec | None, window: int | None) -> None:
    def program(is_refused: bool) -> Run:
        layers = [FixedLayer(CacheFormat(quant=quant, page_size=1, max_tokens=80), window)]

        def look() -> list[Tensor]:
            seen: list[Tensor] = []
            for layer in layers:
                if layer.num_tokens:  # memory alone may stay
                    end, start = layer.num_tokens, max(layer.num_tokens - (window or 99) + 1, 0)
                    seen += [x[:, :, start:end] for x in layer.stored().gather(torch.float32)]
            return seen

        run = Run(look, lambda: None, is_refused)

        def append(i: int, count: int, seed: int) -> None:
            new = tokens(layers[i].size or 2, count, seed)
            length = layers[i].num_tokens
            first = max(length - (window or 99) + 1, 0)
            run.step(lambda: [x[:, :, first : length + count] for x in stored(layers[i], new)])

        append(0, 6, 0)
        append(0, 1, 1)
        run.step(lambda: layers[0].select(torch.tensor([1, 0])))
        append(0, 50, 2)
        run.step(lambda: layers.append(layers[0].fork()))
        run.step(lambda: layers[0].truncate(layers[0].num_tokens - 3))
        append(0, 2, 3)
        append(1, 1, 4)
        run.step(lambda: layers[1].select(torch.tensor([1, 1, 0])))
        append(1, 3, 5)
        return run

    assert every_failure(program) > 30 // STRIDE


# --- the first step -----------------------------------------------------------------------------------------


def second_of_two() -> PagedLayer:
    """A layer whose sequences have tokens of another layer, which stored them first."""
    form = CacheFormat(quant=QuantSpec(8, 4), recent=4)
    first = PagedLayer(form)
    first.append(*[tokens(2, 6)] * 2)
    return PagedLayer(form, first.sequences, 1)


RECENT = CacheFormat(quant=QuantSpec(8, 4), page_size=1, recent=4)
FIRST: dict[str, Callable[[], Layer]] = LAYERS | {
    "newest": lambda: PagedLayer(RECENT),
    "newest, window": lambda: PagedLayer(RECENT, Sequences(RECENT, 5)),
    "newest, second layer": second_of_two,
    "newest, fixed": lambda: FixedLayer(replace(RECENT, max_tokens=80)),
    "newest, fixed, window": lambda: FixedLayer(RECENT, 5),
}
OTHERS: dict[str, Tensor] = {
    "dtype": tokens(2, 6),
    "rows": tokens(3, 6).bfloat16(),
    "heads": torch.cat([tokens(2, 6)] * 2, 1).bfloat16(),
    "head dim": torch.cat([tokens(2, 6)] * 2, 3).bfloat16(),
}


def fail_to_store(layer: Layer, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of so many tokens that finds no memory when they are stored."""

    def refuse(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Tokens, "gather", refuse)
        patch.setattr(Storage, "rows_of", lambda x, *_: None if x.has_codes else refuse())
        layer.update(*[tokens(2, count).bfloat16()] * 2)


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("kind", FIRST)
def test_after_a_first_step_that_failed_a_layer_is_new(
    kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (kind, what) == ("newest, second layer", "rows"):
        pytest.skip("the sequences have their rows")
    layer, new, other = FIRST[kind](), FIRST[kind](), OTHERS[what]
    fail_to_store(layer, 6, monkeypatch)
    assert layer.nbytes == new.nbytes
    for x, y in zip(layer.update(other, other), new.update(other, other), strict=True):
        assert_same_bits(x, y, kind)


@pytest.mark.parametrize("kind", [kind for kind in FIRST if kind != "newest, second layer"])
def test_a_long_first_step_that_failed_leaves_no_room(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose pages would be allocated with the next tokens, however few they are."""
    layer, new = FIRST[kind](), FIRST[kind]()
    fail_to_store(layer, 60, monkeypatch)
    for each in (layer, new):
        each.update(*[tokens(2, 6)] * 2)
    assert layer.nbytes == new.nbytes


def test_forks_that_share_storage_have_one_dtype() -> None:
    first = PagedLayer(CacheFormat())
    second = PagedLayer(CacheFormat(), first.sequences.fork())
    first.update(*[tokens(2, 6).bfloat16()] * 2)
    with pytest.raises(ShapeError, match=r"key must be torch\.bfloat16, got torch\.float32"):
        second.update(*[tokens(2, 6)] * 2)
    second.update(*[tokens(2, 6).bfloat16()] * 2)
