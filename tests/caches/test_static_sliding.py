"""A window in fixed storage: one graph for all steps, columns where masks expect them, memory that stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracles.bits import generator
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from kvloom.caches import Cache, StaticLayer, StaticSlidingWindowLayer
from kvloom.errors import ConfigError, OutOfPages, StateError

WINDOW = 6


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 2, count, 8, generator=generator(seed))


def addresses(layer: StaticSlidingWindowLayer) -> list[int]:
    assert layer.storage is not None
    return [x.data_ptr() for x in (*layer.storage.tensors, layer.length) if x is not None]


def attend(cache: Cache, query: Tensor, key: Tensor) -> Tensor:
    """A layer of a model that masks by position."""
    position = cache.cache_position(key.shape[2])
    columns, first = cache.get_mask_sizes(key.shape[2])
    keys, values = cache.update(key, key, 0)
    column = torch.arange(columns) + first
    seen = (column <= position[:, None]) & (column > position[:, None] - WINDOW)
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen)


@pytest.mark.compile
def test_every_step_is_one_graph_whatever_the_length() -> None:
    layer = StaticSlidingWindowLayer(WINDOW)
    layer.allocate(2, 2, 8, 8, torch.float32)
    cache = Cache([layer])
    counter = CompileCounter()
    step = torch.compile(attend, fullgraph=True, backend=counter)
    every = tokens(30)
    where = addresses(layer)
    for i in range(30):
        query = tokens(1, i)
        out = step(cache, query, every[:, :, i : i + 1])
        key = every[:, :, max(i - WINDOW + 1, 0) : i + 1]
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, key)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1
    assert addresses(layer) == where
    assert cache.nbytes == 2 * 2 * 2 * 16 * 8 * 4  # slots for a multiple of 16


@pytest.mark.parametrize("counts", [(1,) * 9, (3, 9, 1), (40, 1, 7), (5, 1, 1)], ids=str)
def test_prompts_and_steps_see_their_windows(counts: tuple[int, ...]) -> None:
    cache, every, end = Cache([StaticSlidingWindowLayer(WINDOW)]), tokens(60), 0
    for count in counts:
        query, key = tokens(count, end), every[:, :, end : end + count]
        out = attend(cache, query, key)
        end += count
        position = torch.arange(end)
        seen = (position <= position[end - count :, None]) & (
            position > position[end - count :, None] - WINDOW
        )
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, every[:, :, :end], every[:, :, :end], seen
        )
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert int(cache.get_seq_length()) == end


def test_a_crop_beyond_the_rollback_is_refused() -> None:
    layer = StaticSlidingWindowLayer(WINDOW, rollback=2)
    layer.update(tokens(20), tokens(20))
    with pytest.raises(StateError, match=r"num_tokens must keep at least 18 tokens or none, got -3"):
        layer.crop(-3)
    layer.crop(-2)
    assert int(layer.get_seq_length()) == 18
    layer.crop(0)
    assert not layer.keys.any()


@pytest.mark.parametrize(("window", "rollback"), [(0, 0), (6, -1), (True, 0)])
def test_bad_sizes_are_refused(window: int, rollback: int) -> None:
    with pytest.raises(ConfigError, match="must be an int of at least"):
        StaticSlidingWindowLayer(window, rollback)


@pytest.mark.parametrize("many", [10**13, 10**18, 10**30])
@pytest.mark.parametrize("name", ["max_length", "window"])
def test_too_little_memory_says_what_would_fit(name: str, many: int) -> None:
    layer = StaticLayer(many) if name == "max_length" else StaticSlidingWindowLayer(many)
    asked = 2 * 2 * many * 16 * 4
    sentence = (
        rf"{name} must be at most \d+ for \d+ free bytes, .*, which takes {asked} bytes for 2 sequences"
    )
    with pytest.raises(OutOfPages, match=sentence):
        layer.update(tokens(1), tokens(1))
    assert layer.nbytes == 0
