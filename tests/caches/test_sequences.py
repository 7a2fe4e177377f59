"""The sequences of a paged cache by example: what steps, removals and refusals leave behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from oracles.bits import generator
from torch import Tensor

from kvloom.caches import CacheFormat, PagedLayer, Sequences
from kvloom.caches.rows.sequences import ROLLBACK
from kvloom.errors import ShapeError, StateError

CPU = torch.device("cpu")


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 2, count, 8, generator=generator(seed))


def two_layers(window: int | None = None, page_size: int = 4) -> tuple[Sequences, list[PagedLayer]]:
    """Layers over the same sequences, both empty."""
    sequences = Sequences(CacheFormat(page_size=page_size), window)
    return sequences, [PagedLayer(sequences.format, sequences, i) for i in range(2)]


def test_tokens_of_a_wrong_shape_take_no_pages() -> None:
    sequences, (layer, _) = two_layers()
    layer.append(tokens(2, 4), tokens(2, 4))
    with pytest.raises(ShapeError, match=r"key must be .* H=2"):
        layer.append(torch.ones(2, 1, 3, 8), torch.ones(2, 1, 3, 8))
    assert (sequences.num_positions, sequences.num_pages_held) == (4, 2)


def test_places_of_earlier_steps_are_let_go() -> None:
    """A table for every step of a long text would take memory with the square of its length."""
    sequences, (layer, _) = two_layers()
    layer.append(tokens(1, 1), tokens(1, 1))
    seen = weakref.ref(sequences.place(0, 1, layer.storage))
    layer.append(tokens(1, 1), tokens(1, 1))
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("page_size", [1, 4])
def test_as_many_tokens_as_promised_can_be_removed_behind_a_window(page_size: int) -> None:
    sequences, (layer, _) = two_layers(window=10, page_size=page_size)
    layer.append(tokens(1, 300), tokens(1, 300))
    with pytest.raises(StateError, match="sequence 0 must keep at least"):
        sequences.remove([ROLLBACK + page_size])
    sequences.remove([ROLLBACK])
    assert sequences.num_positions == 300 - ROLLBACK


def test_a_removal_gives_back_what_the_last_step_has_evicted() -> None:
    sequences, (layer, _) = two_layers(window=10)
    layer.append(tokens(1, 40), tokens(1, 40))
    layer.append(tokens(1, 300), tokens(1, 300))
    assert sequences.previous is not None
    held = sequences.num_pages_held
    sequences.remove([0])
    assert sequences.previous is None
    assert sequences.num_pages_held < held


def test_a_refused_removal_within_a_step_leaves_the_step_whole() -> None:
    sequences, layers = two_layers(window=10)
    first, second = tokens(1, 40), tokens(1, 300, 1)
    for layer in layers:
        layer.append(first, first)
    read = [layers[0].append(second, second)]
    with pytest.raises(StateError, match="sequence 0 must keep at least"):
        sequences.remove([200])
    read.append(layers[1].append(second, second))
    for stored in read:
        assert torch.equal(stored.gather(torch.float32)[0], torch.cat([first[:, :, -9:], second], dim=2))


@pytest.mark.parametrize("rows", [1, 3])
def test_every_layer_has_the_rows_of_the_batch(rows: int) -> None:
    sequences, (first, second) = two_layers()
    first.append(tokens(2, 4), tokens(2, 4))
    with pytest.raises(ShapeError, match=rf"key must be .* with B=2, got \[{rows},"):
        second.append(tokens(rows, 6), tokens(rows, 6))
    assert (sequences.num_positions, second.num_tokens, second.nbytes) == (4, 0, 0)


@pytest.mark.parametrize("window", [None, 3])
def test_pages_taken_in_inference_mode_can_be_written_outside_it(window: int | None) -> None:
    _, (layer, _) = two_layers(window)
    with torch.inference_mode():
        layer.append(tokens(2, 5), tokens(2, 5))
    layer.append(tokens(2, 1, 1), tokens(2, 1, 1))
    assert torch.equal(layer.gather(torch.float32)[0][:, :, -1:], tokens(2, 1, 1))
