"""``append`` and ``fork`` of every kind of layer: attention in place gives what it gives of gathered keys."""

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

WINDOW, STEPS = 6, (3, 1, 1, 9, 1, 1, 12, 1, 1, 1)
KINDS: dict[str, Callable[[], Layer]] = {
    "dynamic": DynamicLayer,
    "static": lambda: StaticLayer(40),
    "sliding": lambda: SlidingWindowLayer(WINDOW, rollback=2),
    "static sliding": lambda: StaticSlidingWindowLayer(WINDOW, rollback=2),
    "int8": lambda: QuantizedLayer("int8:g4"),
    "int4": lambda: QuantizedLayer("int4:g8", values="int8:g8"),
    "int4, rotated": lambda: QuantizedLayer("int4:g8,rotate=both"),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def tokens(count: int, seed: int, heads: int = 2) -> Tensor:
    return torch.randn(2, heads, count, 8, generator=generator(seed))


def dense(layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over what ``update`` returns, masked by position."""
    position = int(layer.get_seq_length()) + torch.arange(key.shape[2])
    columns, first = layer.get_mask_sizes(key.shape[2])
    keys, values = layer.update(key, value)
    column = torch.arange(columns) + first
    seen = column <= position[:, None]
    if layer.window is not None:
        seen = seen & (column > position[:, None] - layer.window)
    out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen, enable_gqa=True)
    return out.transpose(1, 2)


@every_kind
def test_attention_in_place_is_that_of_gathered_keys(make: Callable[[], Layer]) -> None:
    layer, gathered = make(), make()
    for step, count in enumerate(STEPS):
        query, key, value = tokens(count, step, heads=4), tokens(count, step + 100), tokens(count, step + 200)
        expected = dense(gathered, query, key, value)
        out = layer.append(key, value).attend(query)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(layer.keys, gathered.keys)
        assert torch.equal(layer.values, gathered.values)


@every_kind
def test_a_fork_and_its_source_do_not_see_each_other(make: Callable[[], Layer]) -> None:
    layer, alone = make(), make()
    for step, count in enumerate(STEPS):
        new = tokens(count, step)
        fork = layer.fork()
        fork.append(tokens(2, 77), tokens(2, 78)).attend(tokens(2, 79, heads=4))
        fork.reorder(torch.tensor([1, 0]))
        for other in (layer, alone):
            other.update(new, new)
        fork.update(tokens(1, 80), tokens(1, 80))
        assert torch.equal(layer.keys, alone.keys)
        assert torch.equal(layer.values, alone.values)
        assert int(fork.get_seq_length()) == int(layer.get_seq_length()) - count + 3


def test_a_fork_of_a_cache_continues_the_same_prompt() -> None:
    cache = Cache(
        [DynamicLayer(), StaticLayer(20), SlidingWindowLayer(4), QuantizedLayer("int8:g4", recent=3)]
    )
    expected = Cache(
        [DynamicLayer(), StaticLayer(20), SlidingWindowLayer(4), QuantizedLayer("int8:g4", recent=3)]
    )
    for i in range(4):
        for other in (cache, expected):
            other.update(tokens(9, i), tokens(9, i), i)
    fork = cache.fork()
    cache.batch_repeat_interleave(2)
    for i in range(4):
        new = tokens(2, 50 + i)
        for got, wanted in zip(fork.update(new, new, i), expected.update(new, new, i), strict=True):
            assert torch.equal(got, wanted)
    assert [layer.size for layer in cache.layers] == [4] * 4


def test_a_dynamic_fork_takes_no_memory_until_it_writes() -> None:
    layer = DynamicLayer()
    layer.update(tokens(300, 1), tokens(300, 2))
    held = layer.sequences.num_pages_held
    forks = [layer.fork() for _ in range(5)]
    assert layer.sequences.num_pages_held == held
    forks[0].update(tokens(1, 3), tokens(1, 4))
    assert layer.sequences.num_pages_held == held + 2  # the last page of each sequence


def test_recent_tokens_are_read_in_place_too() -> None:
    layer = QuantizedLayer("int8:g4", recent=3)
    read = layer.append(tokens(9, 1), tokens(9, 2))
    assert read.exact is not None and read.exact.num_newest == 3
    assert torch.equal(layer.gather(torch.float32)[0][:, :, 7:], tokens(9, 1)[:, :, 7:])
