"""A change of rows that broke off between two layers: the cache says so until it is reset."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles.allocations import Refusing
from torch import Tensor

from kvloom.caches import Cache, DynamicLayer, StaticLayer
from kvloom.errors import ArgumentError, StateError

CHANGES: dict[str, Callable[[Cache], None]] = {
    "reorder": lambda c: c.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda c: c.batch_repeat_interleave(2),
    "select": lambda c: c.batch_select_indices(torch.tensor([1])),
}


def tokens(count: int) -> Tensor:
    return torch.ones(2, 2, count, 8)


MAKE: dict[str, tuple[Callable[[], Cache], set[str]]] = {
    # Layers in pages change tables, for which nothing is allocated.
    "recent": (lambda: Cache.quantized("int8:g4", recent=2), {"done"}),
    "mixed": (
        lambda: Cache([StaticLayer(9), DynamicLayer(), StaticLayer(9)]),
        {"as it was", "torn", "done"},
    ),
}


@pytest.mark.parametrize(("make", "expected"), MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_layers_of_different_rows_are_not_read(
    make: Callable[[], Cache], expected: set[str], change: Callable[[Cache], None]
) -> None:
    outcomes: set[str] = set()
    for fail_at in range(1, 60):
        cache = make()
        for i in range(3):
            cache.update(tokens(4), tokens(4), i)
        try:
            with Refusing(fail_at):
                change(cache)
        except torch.OutOfMemoryError:
            if len({layer.keys.shape[0] for layer in cache.layers}) == 1 and fail_at == 1:
                assert cache.get_mask_sizes(1, 1) == (5, 0)
                outcomes.add("as it was")
                continue
            try:
                cache.get_mask_sizes(1)
            except StateError as error:
                assert str(error).startswith("layers must have the same rows")
                outcomes.add("torn")
                for use in (
                    lambda cache=cache: cache.update(tokens(1), tokens(1), 0),
                    lambda cache=cache: cache.crop(1),
                    lambda cache=cache: change(cache),
                ):
                    with pytest.raises(StateError, match="the same rows"):
                        use()
                cache.reset()
                cache.update(tokens(4), tokens(4), 0)
        else:
            outcomes.add("done")
    assert outcomes == expected


def test_rows_that_do_not_exist_tear_nothing() -> None:
    cache = Cache.dynamic()
    for i in range(3):
        cache.update(tokens(4), tokens(4), i)
    with pytest.raises(ArgumentError, match="rows must be in"):
        cache.reorder_cache(torch.tensor([0, 2]))
    cache.update(tokens(1), tokens(1), 0)
