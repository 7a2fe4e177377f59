"""A growing cache has little memory beside its tokens, and leaves alone what others hold."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paging.world import append
from torch import Tensor

from kvloom import QuantSpec
from kvloom.caches import CacheFormat, memory
from kvloom.caches.layers.paged import PagedLayer
from kvloom.caches.rows.pages import _PAGE_BYTES
from kvloom.caches.rows.sequences import Sequences
from kvloom.caches.tensors.storage import Storage
from kvloom.core import advice
from kvloom.paging import PagePool, PageTable

ROWS, HEADS, DIM = 2, 3, 64
FORMATS = {
    "rows": CacheFormat(page_size=16, layout="rows"),
    "NHD": CacheFormat(page_size=16, layout="NHD"),
    "HND": CacheFormat(page_size=16, layout="HND"),
    "int4": CacheFormat(quant=QuantSpec(4, 32), page_size=16),
}

NEEDS_ADVICE = pytest.mark.skipif(
    sys.platform != "linux", reason="this system gives memory back with tensors only"
)


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces of some pages of memory; the numbers of bytes that are given back."""
    found, advise = list[int](), memory.advise

    def count(name: str, first: int, last: int) -> bool:
        if name == "MADV_DONTNEED":
            found.append(last - first)
        return advise(name, first, last)

    monkeypatch.setattr(advice, "advise", count)
    monkeypatch.setattr(memory, "_PIECE", 1 << 14)
    return found


def filled(format: CacheFormat, num_tokens: int = 600) -> tuple[PagedLayer, Tensor]:
    layer = PagedLayer(format, Sequences(format))
    keys = torch.randn(ROWS, HEADS, num_tokens, DIM, generator=torch.Generator().manual_seed(0))
    layer.append(keys, -keys)
    return layer, keys


def storage_of(layer: PagedLayer) -> Storage:
    assert layer.storage is not None
    return layer.storage


def grow(layer: PagedLayer) -> None:
    storage = storage_of(layer)
    storage.reserve(storage.num_extents, 2 * storage.stride)


def read(layer: PagedLayer) -> tuple[Tensor, ...]:
    return tuple(x.clone() for x in layer.stored().gather(torch.float32))


@NEEDS_ADVICE
@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_given_back_while_it_is_copied(name: str, given_back: list[int]) -> None:
    layer, _ = filled(FORMATS[name])
    before, nbytes = read(layer), storage_of(layer).nbytes
    given_back.clear()
    grow(layer)
    assert sum(given_back) > nbytes / 2  # the rest is less than a page of the system at the end of each piece
    layer.sequences._changed()
    for now, then in zip(read(layer), before, strict=True):
        assert torch.equal(now, then)


HOLDERS: dict[str, Callable[[PagedLayer], Any]] = {
    "view": lambda layer: storage_of(layer).view,
    "tokens": lambda layer: layer.stored(),
    "canonical tensors": lambda layer: storage_of(layer).view.tensors,
    "tensors": lambda layer: [x.view(-1) for x in storage_of(layer).tensors if x is not None],
    "rows": lambda layer: storage_of(layer).rows(),
    "a part": lambda layer: storage_of(layer).view.tensors[0][:1],
    "a graph": lambda layer: (storage_of(layer).view.tensors[0] * torch.ones(1, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_others_hold_stays_as_it_is(holder: str, given_back: list[int]) -> None:
    layer, keys = filled(FORMATS["rows"])
    held, then = HOLDERS[holder](layer), keys.double().sum()
    layer.sequences._changed()
    if holder == "tokens":
        before = held.gather(torch.float32)[0].clone()
    given_back.clear()
    grow(layer)
    assert not given_back
    if holder == "tokens":
        assert torch.equal(held.gather(torch.float32)[0], before)
    elif holder == "a graph":
        held.backward()
    else:
        first = next(iter(held.tensors if holder == "view" else held))
        assert torch.allclose(first.double().sum(), then) or holder == "a part"


@pytest.mark.parametrize("is_touched", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, (2 << 20) - 3, (2 << 20), (6 << 20) + 5])
def test_allocated_memory_is_zero_wherever_it_was_used_before(num_bytes: int, is_touched: bool) -> None:
    used = torch.full((num_bytes + 1,), 7, dtype=torch.uint8)
    del used
    assert not memory.zeros((num_bytes,), torch.uint8, torch.device("cpu"), is_touched=is_touched).any()


@NEEDS_ADVICE
def test_a_refused_advice_costs_memory_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, advice):
        monkeypatch.setattr(module, "advise", lambda *_: False)
    assert not memory.zeros((5 << 20,), torch.uint8, torch.device("cpu")).any()
    layer, _ = filled(FORMATS["rows"])
    before = read(layer)
    grow(layer)
    layer.sequences._changed()
    assert all(torch.equal(now, then) for now, then in zip(read(layer), before, strict=True))


def test_a_page_takes_no_more_bytes_than_are_planned() -> None:
    """About 200, with the reference that a table holds."""
    num_pages = 10_000
    tracemalloc.start()
    pool = PagePool(num_pages)
    table = PageTable(pool, 16)
    append(table, 16 * num_pages)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.num_pages == num_pages and used < _PAGE_BYTES * num_pages
