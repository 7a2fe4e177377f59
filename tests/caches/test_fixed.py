"""A layer of fixed storage by example: what it holds, what stays in place, what it refuses."""

from __future__ import annotations

import pytest
import torch
from oracles.bits import generator
from torch import Tensor

from kvloom.caches import CacheFormat, FixedLayer, PagedLayer, Sequences
from kvloom.core.specs import QuantSpec
from kvloom.errors import ConfigError, ShapeError, StateError

FORMAT = CacheFormat(page_size=1, max_tokens=8)


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 2, count, 8, generator=generator(seed))


def filled(count: int, rows: int = 2, window: int | None = None) -> tuple[FixedLayer, Tensor]:
    """A layer of ``count`` tokens, and its keys, which are its values too."""
    layer, key = FixedLayer(FORMAT, window), tokens(rows, count)
    layer.append(key, key)
    return layer, key


def held(layer: FixedLayer) -> Tensor:
    """Keys of the tokens that are stored; the values must be the same."""
    key, value = layer.stored().gather(torch.float32)
    assert torch.equal(key, value)
    return key[:, :, : layer.num_tokens]


def addresses(layer: FixedLayer) -> list[int]:
    storage = layer.storage
    assert storage is not None
    return [x.data_ptr() for x in (*storage.tensors, layer.length) if x is not None]


def test_it_can_be_filled_to_the_last_slot() -> None:
    layer, key = filled(5)
    more = tokens(2, 3, 1)
    layer.append(more, more)
    assert torch.equal(held(layer), torch.cat([key, more], dim=2))
    with pytest.raises(StateError, match="max_tokens must hold 1 more token, got 8 with 8 taken"):
        layer.append(tokens(2, 1), tokens(2, 1))
    assert torch.equal(held(layer), torch.cat([key, more], dim=2))


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("count", [10, 11, 13])
def test_a_prompt_may_fill_all_but_a_window(start: int, count: int) -> None:
    layer = FixedLayer(CacheFormat(page_size=1, max_tokens=16), window=6, rollback=2)
    key, query = tokens(2, start + count), tokens(2, start + count, 1)
    layer.append(key[:, :, :start], key[:, :, :start])
    out = layer.append(key[:, :, start:], key[:, :, start:]).attend(query[:, :, start:])
    want = PagedLayer(CacheFormat(), Sequences(CacheFormat(), 6)).append(key, key).attend(query)
    torch.testing.assert_close(out, want[:, start:], rtol=1e-5, atol=1e-6)


def test_memory_and_length_stay_where_they_are() -> None:
    """A compiled step reads both at the addresses it was compiled for."""
    layer, _ = filled(3)
    where = addresses(layer)
    layer.append(tokens(2, 2), tokens(2, 2))
    layer.truncate(1)
    layer.select(torch.tensor([1, 1]))
    layer.reset()
    layer.append(tokens(2, 2), tokens(2, 2))
    assert addresses(layer) == where
    assert layer.num_tokens == 2


@pytest.mark.parametrize("rows", [[1, 0], [1], [1, 1, 0]], ids=str)
def test_rows_are_what_the_selected_ones_were(rows: list[int]) -> None:
    layer, key = filled(5)
    layer.select(torch.tensor(rows))
    assert layer.size == len(rows)
    assert torch.equal(held(layer), key[rows])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [[1, 0], [1], [1, 1, 0]], ids=str)
def test_rows_of_a_full_layer_keep_their_last_token(rows: list[int], window: int | None) -> None:
    layer, key = filled(8, window=window)
    query, fork = tokens(len(rows), 1, 9), layer.fork()
    layer.select(torch.tensor(rows))
    fork.select(torch.tensor(rows))
    first = 0 if window is None else 5
    for other in (layer, fork):
        assert torch.equal(held(other)[:, :, first:], key[rows][:, :, first:])
        weights = (query @ key[rows][:, :, first:].mT / 8**0.5).softmax(-1)
        expected = (weights @ key[rows][:, :, first:]).transpose(1, 2)
        torch.testing.assert_close(other.stored().attend(query), expected, rtol=1e-4, atol=1e-5)


def test_a_fork_has_memory_and_length_of_its_own() -> None:
    layer, key = filled(4, window=3)
    fork = layer.fork()
    assert not set(addresses(layer)) & set(addresses(fork))
    layer.truncate(1)
    layer.append(tokens(2, 2, 5), tokens(2, 2, 5))
    assert fork.window == 3
    assert torch.equal(held(fork), key)


def test_a_window_hides_what_is_stored_before_it() -> None:
    layer, query = FixedLayer(FORMAT, window=3), tokens(2, 1, 9)
    key = tokens(2, 6)
    out = layer.append(key, key).attend(query)
    weights = (query @ key[:, :, -3:].mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(out, (weights @ key[:, :, -3:]).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_attention_sees_no_slot_behind_the_stored_tokens() -> None:
    layer, query = FixedLayer(FORMAT), tokens(2, 1, 9)
    key = tokens(2, 6)
    layer.append(key, key)
    layer.truncate(2)
    out = layer.append(key[:, :, 2:3], key[:, :, 2:3]).attend(query)
    weights = (query @ key[:, :, :3].mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(out, (weights @ key[:, :, :3]).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_values_may_be_kept_otherwise_than_keys() -> None:
    layer = FixedLayer(CacheFormat(page_size=1, max_tokens=8, values=CacheFormat(quant=QuantSpec(8, 4))))
    layer.append(tokens(2, 3), tokens(2, 3))
    key, value = layer.stored().gather(torch.float32)
    assert torch.equal(key[:, :, :3], tokens(2, 3))
    assert not torch.equal(value[:, :, :3], tokens(2, 3))
    torch.testing.assert_close(value[:, :, :3], tokens(2, 3), rtol=0, atol=0.02)
    assert layer.nbytes == 2 * 8 * layer.nbytes_per_token == 2 * 8 * (2 * 8 * 4 + 2 * 8 + 2 * 2 * 2)


@pytest.mark.parametrize("shape", [(1, 2, 1, 8), (3, 2, 1, 8), (2, 1, 1, 8), (2, 2, 1, 4)], ids=str)
def test_tokens_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    layer, key = filled(4)
    with pytest.raises(ShapeError, match="key must be"):
        layer.append(torch.ones(shape), torch.ones(shape))
    assert torch.equal(held(layer), key)


@pytest.mark.parametrize("count", [-1, 5])
def test_truncate_beyond_what_is_stored_is_refused(count: int) -> None:
    layer, key = filled(4)
    with pytest.raises(StateError, match=rf"num_tokens must be in \[0, 4\], got {count}"):
        layer.truncate(count)
    assert torch.equal(held(layer), key)


def test_an_empty_layer_can_be_selected_and_forked_and_has_nothing_to_read() -> None:
    layer = FixedLayer(FORMAT)
    layer.select(torch.tensor([0, 0]))
    assert (layer.fork().size, layer.nbytes, layer.nbytes_per_token) == (0, 0, 0)
    with pytest.raises(StateError, match="gather needs"):
        layer.stored()


def test_its_size_must_be_given() -> None:
    with pytest.raises(ConfigError, match="max_tokens must be given for fixed storage"):
        FixedLayer(CacheFormat())
