"""Assigning keys and values of a layer replaces what it holds, or raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles.bits import generator
from torch import Tensor

from kvloom.caches import (
    Cache,
    DynamicLayer,
    Layer,
    QuantizedLayer,
    SlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from kvloom.errors import ShapeError, StateError, UnsupportedError

LAYERS: dict[str, Callable[[], Layer]] = {
    "dynamic": DynamicLayer,
    "static": lambda: StaticLayer(16),
    "sliding": lambda: SlidingWindowLayer(6, rollback=2),
    "static sliding": lambda: StaticSlidingWindowLayer(6, rollback=2),
    "int8": lambda: QuantizedLayer("int8:g4"),
    "int4, recent": lambda: QuantizedLayer("int4:g8", recent=5),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
FIXED = pytest.mark.parametrize("kind", ["static", "sliding", "static sliding"])
FREE = pytest.mark.parametrize("kind", ["dynamic", "int8", "int4, recent"])


def tokens(count: int, seed: int = 0, rows: int = 2) -> Tensor:
    return torch.randn(rows, 2, count, 8, generator=generator(seed))


def filled(make: Callable[[], Layer], count: int = 11) -> Layer:
    layer = make()
    layer.update(tokens(count), tokens(count, 1))
    return layer


@every_layer
@pytest.mark.parametrize("side", ["keys", "values"])
def test_one_side_is_replaced_and_the_other_stays(make: Callable[[], Layer], side: str) -> None:
    layer, other = filled(make), {"keys": "values", "values": "keys"}[side]
    before, kept = getattr(layer, side).clone(), getattr(layer, other).clone()
    new = tokens(before.shape[2], 7)
    setattr(layer, side, new)
    # Where a side is assigned, all tokens are read as codes, those of a residual window too.
    tolerance = 0.0 if not isinstance(layer, QuantizedLayer) else 0.3
    has_recent = isinstance(layer, QuantizedLayer) and layer.format.recent > 0
    torch.testing.assert_close(getattr(layer, other), kept, rtol=0, atol=tolerance if has_recent else 0.0)
    torch.testing.assert_close(getattr(layer, side).clone(), new, rtol=0, atol=tolerance)
    assert int(layer.get_seq_length()) == 11
    new.zero_()
    assert getattr(layer, side).any(), "what was assigned is copied"


@FREE
def test_concatenation_as_the_caching_document_writes_it(kind: str) -> None:
    layer, expected = filled(LAYERS[kind]), filled(LAYERS[kind])
    key, value = tokens(3, 5), tokens(3, 6)
    layer.keys = torch.cat([layer.keys, key], dim=-2)
    layer.values = torch.cat([layer.values, value], dim=-2)
    expected.update(key, value)
    assert layer.get_seq_length() == 14
    num_newest = 4 if kind == "int4, recent" else 0  # which are codes in the one, as they were assigned
    for side in ("keys", "values"):
        a, b = (getattr(x, side).clone() for x in (layer, expected))
        torch.testing.assert_close(a, b, rtol=0, atol=0.3)
        a, b = (x[:, :, : 14 - num_newest] for x in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        assert torch.equal(a[:, :, 11:], b[:, :, 11:])
    layer.update(key, value)
    assert layer.get_seq_length() == 17


@FREE
def test_fewer_tokens_can_be_assigned(kind: str) -> None:
    layer = filled(LAYERS[kind])
    layer.values = layer.values[:, :, :4]
    layer.keys = layer.keys[:, :, :4]
    assert (layer.get_seq_length(), layer.keys.shape[2], layer.values.shape[2]) == (4, 4, 4)


@FREE
def test_the_first_tokens_can_be_assigned(kind: str) -> None:
    layer, expected = LAYERS[kind](), filled(LAYERS[kind])
    layer.keys = tokens(11)
    layer.values = tokens(11, 1)
    assert torch.equal(layer.keys, expected.keys)
    assert torch.equal(layer.values, expected.values)


@FREE
def test_nothing_else_is_done_while_values_are_missing(kind: str) -> None:
    layer = filled(LAYERS[kind])
    longer = torch.cat([layer.keys, tokens(2)], dim=2)
    layer.keys = longer
    assert torch.equal(layer.keys, longer)
    assert layer.values.shape[2] == 11
    message = "values must be assigned 13 tokens before anything else, as keys were, got 11"
    for use in (
        lambda: layer.update(tokens(1), tokens(1)),
        lambda: layer.crop(-1),
        lambda: layer.reorder(torch.tensor([1, 0])),
        lambda: layer.select(torch.tensor([1])),
        lambda: layer.repeat_interleave(2),
    ):
        with pytest.raises(StateError, match=message):
            use()
    with pytest.raises(ShapeError, match="values must have 13 tokens as keys were assigned, got 12"):
        layer.values = longer[:, :, :12]
    layer.keys = longer[:, :, :11]  # as many as there are: nothing is missing any more
    layer.update(tokens(1), tokens(1))
    layer.keys = longer
    layer.reset()
    layer.update(tokens(1), tokens(1))
    assert layer.get_seq_length() == 1


@FIXED
def test_fixed_columns_take_as_many(kind: str) -> None:
    layer = filled(LAYERS[kind])
    count, before = layer.keys.shape[2], layer.keys.clone()
    with pytest.raises(ShapeError, match=f"keys must have {count} columns, .*, got {count + 1}"):
        layer.keys = tokens(count + 1)
    assert torch.equal(layer.keys, before)
    with pytest.raises(StateError, match="keys can be assigned after the first update"):
        LAYERS[kind]().keys = tokens(count)


@every_layer
@pytest.mark.parametrize(
    "bad",
    [None, torch.zeros(2, 2, 11), torch.zeros(1, 2, 11, 8), torch.zeros(2, 2, 11, 8).half()],
    ids=["none", "rank", "rows", "dtype"],
)
def test_what_does_not_fit_is_refused(make: Callable[[], Layer], bad: Tensor) -> None:
    layer = filled(make)
    before = layer.values.clone()
    with pytest.raises(ShapeError, match=r"^values must be"):
        layer.values = bad
    assert torch.equal(layer.values, before)


@pytest.mark.parametrize("kind", ["sliding", "static sliding", "int8", "int4, recent"])
def test_gathered_keys_cannot_be_changed_in_place(kind: str) -> None:
    layer = filled(LAYERS[kind])
    before = layer.keys.clone()
    with pytest.raises(UnsupportedError, match="cannot be changed in place"):
        layer.keys.zero_()
    assert torch.equal(layer.keys, before)
    layer.update(tokens(1), tokens(1))[0].zero_()  # what an update returned is the caller's
    assert type(Cache([layer]).to_legacy_cache()[0][0]) is Tensor


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_keys_that_are_storage_can_be_changed_in_place(kind: str) -> None:
    layer = filled(LAYERS[kind])
    layer.keys.zero_()
    assert not layer.keys.any()
    assert layer.values.any()
