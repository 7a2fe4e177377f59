"""Tokens that lie one behind the other come out as views of the cache, and all others as copies."""

from __future__ import annotations

import pytest
import torch
from oracles.bits import assert_same_bits, generator
from torch import Tensor

from kvloom import QuantSpec
from kvloom.caches import CacheFormat, PagedLayer, Sequences
from kvloom.errors import OutOfPages

LAYOUTS = ("auto", "rows", "NHD")


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 2, count, 8, generator=generator(seed))


def is_view(x: Tensor, layer: PagedLayer) -> bool:
    """Whether ``x`` is memory of the keys of a layer."""
    assert layer.storage is not None
    return x.untyped_storage().data_ptr() == layer.storage.tensors[0].untyped_storage().data_ptr()


def layer_of(layout: str = "auto", page_size: int = 4, max_tokens: int | None = None) -> PagedLayer:
    return PagedLayer(CacheFormat(page_size=page_size, max_tokens=max_tokens, layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("prompt", [1, 7, 40])
def test_greedy_decoding_of_a_batch_copies_nothing(layout: str, rows: int, prompt: int) -> None:
    layer, every = layer_of(layout), tokens(rows, prompt)
    for step in range(60):
        new = every if step == 0 else tokens(rows, 1, step)
        every = every if step == 0 else torch.cat((every, new), dim=2)
        keys, values = layer.update(new, 2 * new)
        assert is_view(keys, layer)
        assert_same_bits(keys.contiguous(), every, f"keys at step {step}")
        assert_same_bits(values.contiguous(), 2 * every, f"values at step {step}")
        assert layer.storage is not None
        assert layer.storage.num_pages <= 2 * rows * -(-every.shape[2] // 4)


def test_views_stay_as_they_are_while_tokens_are_added() -> None:
    layer = layer_of()
    returned = [layer.update(tokens(3, 1 + i % 3, i), tokens(3, 1 + i % 3, i + 100)) for i in range(30)]
    again = [layer.update(tokens(3, 0), tokens(3, 0))]
    for keys, values in returned:
        assert torch.equal(keys, again[0][0][:, :, : keys.shape[2]])
        assert torch.equal(values, again[0][1][:, :, : values.shape[2]])


def test_a_fork_shares_pages_and_is_gathered() -> None:
    layer = layer_of()
    layer.update(tokens(1, 9), tokens(1, 9))
    other = PagedLayer(layer.sequences.format, layer.sequences.fork(), layer.index)
    other.num_tokens = layer.num_tokens
    new = tokens(1, 1, 1), tokens(1, 1, 2)
    keys, _ = other.update(new[0], new[0])
    assert not is_view(keys, layer)
    assert_same_bits(keys, torch.cat((tokens(1, 9), new[0]), 2), "the fork")
    keys, _ = layer.update(new[1], new[1])
    assert is_view(keys, layer)
    assert_same_bits(keys.contiguous(), torch.cat((tokens(1, 9), new[1]), 2), "the first")


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3], [2]])
def test_rows_at_one_distance_are_a_view(rows: list[int]) -> None:
    layer = layer_of(page_size=8)
    layer.update(tokens(4, 9), tokens(4, 9))
    layer.sequences.select(rows)
    new = tokens(len(rows), 7)
    keys, _ = layer.update(new, new)
    assert is_view(keys, layer)
    assert_same_bits(keys.contiguous(), torch.cat((tokens(4, 9)[rows], new), 2), "keys")


@pytest.mark.parametrize("rows", [[3, 2, 1, 0], [0, 1, 3], [1, 1, 1]])
def test_other_rows_are_gathered(rows: list[int]) -> None:
    layer = layer_of(page_size=8)
    layer.update(tokens(4, 9), tokens(4, 9))
    layer.sequences.select(rows)
    new = tokens(len(rows), 1)
    keys, _ = layer.update(new, new)
    assert not is_view(keys, layer)
    assert_same_bits(keys.contiguous(), torch.cat((tokens(4, 9)[rows], new), 2), "keys")


def test_beams_are_gathered_and_right() -> None:
    layer, every = layer_of(), tokens(3, 6)
    layer.update(every, every)
    for step, rows in enumerate(([0, 0, 1], [2, 1, 0], [1, 1, 1])):
        layer.sequences.select(rows)
        every = torch.cat((every[rows], tokens(3, 1, step)), dim=2)
        keys, values = layer.update(tokens(3, 1, step), tokens(3, 1, step))
        assert_same_bits(keys.contiguous(), every, f"keys at step {step}")
        assert_same_bits(values.contiguous(), every, f"values at step {step}")


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [1, 5, 12])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("prompt", [1, 30])
def test_decoding_within_a_window_copies_nothing(prompt: int, rows: int, window: int, page_size: int) -> None:
    format = CacheFormat(page_size=page_size)
    layer, every = PagedLayer(format, Sequences(format, window, rollback=3)), tokens(rows, 0)
    returned = []
    for step in range(200):
        new = tokens(rows, prompt if step == 0 else 1, step)
        every = torch.cat((every, new), dim=2)
        keys, values = layer.update(new, 2 * new)
        visible = every if step == 0 else every[:, :, -window:]
        assert is_view(keys, layer) or step == 0
        assert_same_bits(keys.contiguous(), visible, f"keys at step {step}")
        assert_same_bits(values.contiguous(), 2 * visible, f"values at step {step}")
        assert layer.storage is not None
        held = -(-(window + 3) // page_size) + 1
        assert step == 0 or layer.storage.stride <= 2 * max(-(-prompt // page_size), 1.25 * (held + 1)) + 1
        returned.append((keys, keys.clone()))
    assert all(torch.equal(*pair) for pair in returned)


def test_a_window_that_is_shared_or_cropped_is_read_right() -> None:
    format = CacheFormat(page_size=4)
    layer, every = PagedLayer(format, Sequences(format, 10, rollback=8)), tokens(2, 25)
    layer.update(every, every)
    others = []
    for step in range(1, 60):
        if step % 9 == 0:
            others.append((layer.fork(), every))
        if step % 7 == 0:
            layer.truncate(every.shape[2] - 5)
            every = every[:, :, :-5]
        every = torch.cat((every, tokens(2, 1, step)), dim=2)
        keys, _ = layer.update(every[:, :, -1:], every[:, :, -1:])
        assert_same_bits(keys.contiguous(), every[:, :, -10:], f"keys at step {step}")
    for other, its in others:
        keys, _ = other.update(its[:, :, :1], its[:, :, :1])
        assert torch.equal(keys, torch.cat((its[:, :, -9:], its[:, :, :1]), dim=2))


def test_a_truncated_cache_is_a_view_again() -> None:
    layer, every = layer_of(), tokens(2, 9)
    layer.update(every, every)
    layer.truncate(5)
    keys, _ = layer.update(tokens(2, 6, 1), tokens(2, 6, 1))
    assert is_view(keys, layer)
    assert_same_bits(keys.contiguous(), torch.cat((every[:, :, :5], tokens(2, 6, 1)), 2), "keys")


def test_rows_cropped_apart_are_gathered() -> None:
    layer, every = layer_of(), tokens(2, 9)
    layer.update(every, every)
    layer.sequences.remove([0, 3])
    layer.num_tokens = layer.sequences.num_positions
    keys, _ = layer.update(tokens(2, 1, 1), tokens(2, 1, 1))
    assert not is_view(keys, layer)
    assert torch.equal(keys[1, :, 3:9], every[1, :, :6])


@pytest.mark.parametrize(
    "layer",
    [
        PagedLayer(CacheFormat(quant=QuantSpec(8, 8))),
        PagedLayer(CacheFormat(dtype=torch.float16)),
        PagedLayer(CacheFormat(layout="HND")),
    ],
    ids=["codes", "another dtype", "pages apart"],
)
def test_what_cannot_be_a_view_is_gathered(layer: PagedLayer) -> None:
    layer.update(tokens(2, 20), tokens(2, 20))
    keys, _ = layer.update(tokens(2, 1, 1), tokens(2, 1, 1))
    assert not is_view(keys, layer) and keys.dtype == torch.float32
    torch.testing.assert_close(keys[:, :, -1:], tokens(2, 1, 1), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("rows", "max_tokens"), [(3, 24), (2, 28), (3, 30), (1, 6)])
def test_a_bounded_cache_holds_as_many_tokens_as_it_says(rows: int, max_tokens: int) -> None:
    layer, every = layer_of(page_size=2, max_tokens=max_tokens), tokens(rows, max_tokens // rows)
    for i in range(every.shape[2]):
        keys, _ = layer.update(every[:, :, i : i + 1], every[:, :, i : i + 1])
    assert is_view(keys, layer) and torch.equal(keys, every)
    assert layer.storage is not None and layer.storage.num_pages == max_tokens // 2
    with pytest.raises(OutOfPages, match="max_tokens must be at least"):
        layer.update(tokens(rows, 1), tokens(rows, 1))
    assert torch.equal(keys, every)
