"""Recurrent states in pages: copies, found by the exact tokens that they are behind."""

from __future__ import annotations

import pickle
from itertools import count

import pytest
import torch
from oracles.allocations import Refusing
from torch import Tensor

from kvloom.caches.prefixes.states import StatePages, StateSpec
from kvloom.caches.rows.row import Row
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.paging import check

PAGE = 4
SPECS = {
    0: (StateSpec("conv", 0, (3, 5), torch.bfloat16), StateSpec("recurrent", 0, (2, 7), torch.float32)),
    3: (StateSpec("recurrent", 1, (1,), torch.float16),),
}


def pages_of(texts: int) -> StatePages:
    nbytes = StatePages.nbytes_of(SPECS, PAGE)
    return StatePages(SPECS, PAGE, texts * nbytes, torch.device("cpu"))


def states(seed: int, rows: int = 2) -> dict[int, list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return {
        layer: [torch.randn(rows, *x.shape, generator=draw).to(x.dtype) for x in own]
        for layer, own in SPECS.items()
    }


def write(pages: StatePages, seed: int, row: int, tokens: list[int], scope: str = "") -> Row:
    held = pages.write(states(seed), row, tokens, scope)
    assert held is not None
    return held


def find(pages: StatePages, tokens: list[int], scope: str = "") -> Row | None:
    held = pages.group.new_table()
    found = pages.group.tree.match(tokens, scope)
    held.table.adopt(found)
    return held if found else None


def test_states_come_back_as_they_were_row_by_row() -> None:
    pages = pages_of(4)
    texts = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]]
    held = [write(pages, 7, row, tokens) for row, tokens in enumerate(texts)]
    check(pages.group.pages.pool, pages.group.tree, [x.table for x in held])
    for own, expected in zip(pages.read(held).values(), states(7).values(), strict=True):
        for x, y in zip(own, expected, strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)
    pages.read(held)[0][0].zero_()  # a copy
    assert torch.equal(pages.read(held)[0][0], states(7)[0][0])


def test_states_are_found_by_exact_tokens_and_scope() -> None:
    pages = pages_of(4)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    write(pages, 1, 0, text).table.release()
    assert find(pages, text[:7]) is None and find(pages, text[:4]) is None
    assert find(pages, [9, *text[1:]]) is None and find(pages, text, "other") is None
    held = find(pages, [*text, 9, 9, 9, 9])
    assert held is not None
    assert torch.equal(pages.read([held])[3][0], states(1)[3][0][:1])
    again = write(pages, 2, 0, text)  # known: what is there stays
    assert torch.equal(pages.read([again])[3][0], states(1)[3][0][:1])
    assert pages.group.pages.pool.num_free == 3


def test_states_that_are_held_are_never_evicted() -> None:
    pages = pages_of(1)
    held = write(pages, 1, 0, [1, 2, 3, 4])
    assert pages.write(states(2), 0, [5, 6, 7, 8], "") is None
    assert torch.equal(pages.read([held])[0][1], states(1)[0][1][:1])
    held.table.release()
    write(pages, 2, 0, [5, 6, 7, 8]).table.release()
    assert find(pages, [1, 2, 3, 4]) is None and find(pages, [5, 6, 7, 8]) is not None


def test_states_for_which_there_is_no_memory_hold_no_page() -> None:
    pages = pages_of(2)
    write(pages, 1, 0, [*range(4)]).table.release()
    for fail_at in count(1):
        try:
            with Refusing(fail_at):
                held = write(pages, 2, 0, [*range(8)])
        except torch.OutOfMemoryError:
            pool = pages.group.pages.pool
            check(pool, pages.group.tree, [])
            assert (pool.num_active, pool.num_evictable) == (0, 1)
        else:
            break
    assert fail_at > 6
    assert find(pages, [*range(8)]) is not None and held.table.num_pages == 1


def test_what_is_loaded_is_empty_and_of_the_same_kind() -> None:
    pages = pages_of(3)
    write(pages, 1, 0, [1, 2, 3, 4]).table.release()
    loaded = pickle.loads(pickle.dumps(pages))  # noqa: S301 (our own)
    assert find(loaded, [1, 2, 3, 4]) is None
    assert loaded.nbytes == pages.nbytes and loaded.group.pages.pool.num_free == 3
    held = write(loaded, 5, 1, [1, 2, 3, 4])
    assert torch.equal(loaded.read([held])[0][1], states(5)[0][1][1:])


def test_bad_arguments_are_named() -> None:
    nbytes = StatePages.nbytes_of(SPECS, PAGE)
    assert nbytes == (8 + 1) * PAGE * 4  # 15 + 14 elements, and 1, in four slots of float32
    with pytest.raises(ArgumentError, match=rf"^max_state_bytes must be at least {nbytes} for .*, got 7$"):
        StatePages(SPECS, PAGE, 7, torch.device("cpu"))
    others = {0: (StateSpec("recurrent", 0, (4,), torch.float64),)}
    with pytest.raises(
        UnsupportedError, match=r"^recurrent states must be of one of .*, got {torch.float64}"
    ):
        StatePages(others, PAGE, 1 << 20, torch.device("cpu"))
