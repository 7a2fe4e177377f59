"""A cache of layers: its interface by example, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core.spellings import BAD, ODD
from oracles.bits import assert_same_bits, generator
from torch import Tensor

from kvloom.caches import Cache, DynamicLayer, QuantizedLayer, SlidingWindowLayer, StaticLayer
from kvloom.core.checks import debug
from kvloom.errors import ArgumentError, ConfigError, ShapeError, StateError

KINDS: dict[str, Callable[[], Cache]] = {
    "dynamic": Cache.dynamic,
    "static": lambda: Cache.static(16),
    "quantized": lambda: Cache.quantized("int8:g4", recent=2),
    "mixed": lambda: Cache(
        [DynamicLayer(), SlidingWindowLayer(20), StaticLayer(16), QuantizedLayer("int8:g4", 99)]
    ),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
exact = pytest.mark.parametrize("make", [KINDS["dynamic"], KINDS["static"], KINDS["mixed"]])


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, 2, count, 8, generator=generator(seed))


def fill(cache: Cache, batch: int, count: int, seed: int = 0, layers: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Update every layer with tokens of its own and return them."""
    pairs = [(tokens(batch, count, seed + i), tokens(batch, count, seed + 50 + i)) for i in range(layers)]
    for i, (key, value) in enumerate(pairs):
        cache.update(key, value, i)
    return pairs


def same(got: object, expected: object) -> None:
    """Pairs of tensors with the same bits."""
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):  # type: ignore[call-overload]
        assert_same_bits(a[0].contiguous(), b[0].contiguous(), f"keys of layer {i}")
        assert_same_bits(a[1].contiguous(), b[1].contiguous(), f"values of layer {i}")


# --- interface ----------------------------------------------------------------------------------------------


@exact
def test_cache_gives_pairs_of_stored_tokens(make: Callable[[], Cache]) -> None:
    cache = make()
    first, second = fill(cache, 2, 5), fill(cache, 2, 1, seed=100)
    expected = [
        (torch.cat([a[0], b[0]], 2), torch.cat([a[1], b[1]], 2)) for a, b in zip(first, second, strict=True)
    ]
    assert (len(cache), int(cache.get_seq_length()), int(cache.get_seq_length(3))) == (4, 6, 6)
    same(cache, expected)
    same([cache[2], cache[-1]], [expected[2], expected[3]])


def test_layers_are_made_when_named() -> None:
    cache = Cache.dynamic()
    assert (len(cache), cache.get_seq_length(), cache.nbytes) == (0, 0, 0)
    assert (cache.get_mask_sizes(3), cache.get_max_length(5)) == ((3, 0), -1)
    for layer_idx in range(3):
        cache.update(tokens(1, 2), tokens(1, 2), layer_idx)
    assert [layer.get_seq_length() for layer in cache.layers] == [2, 2, 2]


@pytest.mark.parametrize("layer_idx", [2, 10**7])
def test_only_the_next_layer_is_made(layer_idx: int) -> None:
    """A wrong number would make as many layers."""
    cache = Cache.dynamic()
    cache.update(tokens(1, 2), tokens(1, 2), 0)
    with pytest.raises(ArgumentError, match=rf"layer_idx must be in \[0, 2\), got {layer_idx}"):
        cache.update(tokens(1, 2), tokens(1, 2), layer_idx)
    assert len(cache) == 1


def test_the_legacy_format_needs_tokens_in_every_layer() -> None:
    cache = Cache.dynamic(2)
    cache.update(tokens(1, 2), tokens(1, 2), 1)
    with pytest.raises(StateError, match="no tokens were stored"):
        cache.to_legacy_cache()


def test_a_refused_update_makes_no_layer() -> None:
    cache = Cache.quantized("int8:g3")
    with pytest.raises(ConfigError, match="group"):
        cache.update(tokens(1, 1), tokens(1, 1), 0)
    assert len(cache) == 0


def test_mask_sizes_are_those_of_the_layer() -> None:
    cache = Cache([DynamicLayer(), SlidingWindowLayer(4), StaticLayer(9)])
    fill(cache, 1, 6, layers=3)
    assert [cache.get_mask_sizes(2, i) for i in range(3)] == [(8, 0), (5, 3), (9, 0)]
    assert [cache.get_max_length(i) for i in range(3)] == [-1, 4, 9]


@every_kind
def test_nbytes_is_the_sum_of_the_layers(make: Callable[[], Cache]) -> None:
    cache = make()
    fill(cache, 2, 5)
    assert cache.nbytes == sum(layer.nbytes for layer in cache.layers) > 0


@every_kind
def test_cache_position_counts_on(make: Callable[[], Cache]) -> None:
    cache = make()
    assert cache.cache_position(3).tolist() == [0, 1, 2]
    fill(cache, 2, 10)
    position = cache.cache_position(2)
    assert (position.tolist(), position.dtype) == ([10, 11], torch.int64)
    for dtype in (torch.int64, torch.int32):
        start = int(cache.get_seq_length())
        kwargs = {"cache_position": torch.tensor([start, start + 1], dtype=dtype), "sin": None}
        for layer_idx in range(4):
            cache.update(tokens(2, 2), tokens(2, 2), layer_idx, kwargs)
    assert int(cache.get_seq_length()) == 14


@every_kind
@pytest.mark.parametrize("position", [[9, 10], [11, 12], [10, 10], [11, 10], [0, 1]], ids=str)
def test_wrong_cache_position_is_refused(make: Callable[[], Cache], position: list[int]) -> None:
    cache = make()
    fill(cache, 2, 10)
    with pytest.raises(ArgumentError, match=r"cache_position must be 2 positions from 10 on, got \["):
        cache.update(tokens(2, 2), tokens(2, 2), 0, {"cache_position": torch.tensor(position)})
    for bad in (torch.tensor([10]), torch.tensor([[10, 11]]), torch.tensor([10.0, 11.0]), [10, 11]):
        with pytest.raises(ShapeError, match="cache_position"), debug():
            cache.update(tokens(2, 2), tokens(2, 2), 0, {"cache_position": bad})
    assert int(cache.get_seq_length()) == 10


def test_attention_mask_covers_past_and_new() -> None:
    cache = Cache.dynamic()
    prompt = torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert torch.equal(cache.attention_mask(prompt, 3), prompt)
    fill(cache, 2, 3)
    assert cache.attention_mask(prompt, 1).tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    fill(cache, 2, 1)
    mask = cache.attention_mask(prompt.bool(), 2)
    assert (mask.dtype, mask.tolist()[0]) == (torch.bool, [False, False, True, True, True, True])
    with pytest.raises(ShapeError, match="padding_mask must have at most 5 columns, got 6"):
        cache.attention_mask(torch.ones(2, 6), 1)
    with pytest.raises(ShapeError, match=r"padding_mask must be \[B, M\]"):
        cache.attention_mask(torch.ones(2), 1)
    with pytest.raises(ArgumentError, match="query_length must be at least 0"):
        cache.attention_mask(prompt, -1)


@exact
def test_legacy_round_trip(make: Callable[[], Cache]) -> None:
    cache = make()
    pairs = fill(cache, 2, 5)
    legacy = cache.to_legacy_cache()
    assert isinstance(legacy, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in legacy)
    same(legacy, pairs)
    again = Cache.from_legacy_cache(legacy)
    same(again.to_legacy_cache(), pairs)
    cache.crop(0)
    fill(cache, 2, 5, seed=9)
    fill(again, 2, 3, seed=3)
    same(legacy, pairs)  # copies
    assert (int(cache.get_seq_length()), again.get_seq_length()) == (5, 8)


def test_quantized_cache_gives_legacy_tensors() -> None:
    cache = KINDS["quantized"]()
    fill(cache, 2, 5)
    same(Cache.from_legacy_cache(cache.to_legacy_cache()), cache)


def test_no_legacy_cache_is_an_empty_one() -> None:
    assert len(Cache.from_legacy_cache()) == len(Cache.from_legacy_cache(())) == 0
    assert Cache.from_legacy_cache(None).to_legacy_cache() == ()


@exact
def test_rows_move_in_every_layer(make: Callable[[], Cache]) -> None:
    cache = make()
    pairs = fill(cache, 3, 4)
    rows = [0, 1, 2]
    for call, argument, picked in (
        (cache.reorder_cache, torch.tensor([2, 0, 0]), [2, 0, 0]),
        (cache.batch_repeat_interleave, 2, [0, 0, 1, 1, 2, 2]),
        (cache.batch_select_indices, torch.tensor([5, 0]), [5, 0]),
        (cache.batch_select_indices, torch.tensor([True, False]), [0]),
    ):
        call(argument)  # type: ignore[operator]
        rows = [rows[i] for i in picked]
        same(cache, [(key[rows], value[rows]) for key, value in pairs])
    fill(cache, 1, 2)
    assert int(cache.get_seq_length()) == 6


@exact
def test_crop_and_reset_reach_every_layer(make: Callable[[], Cache]) -> None:
    cache = make()
    pairs = fill(cache, 2, 9)
    cache.crop(7)
    cache.crop(-2)
    same(cache, [(key[:, :, :5], value[:, :, :5]) for key, value in pairs])
    cache.reset()
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [0] * 4
    same([fill(cache, 2, 3)[1]], [cache[1]])


def test_crop_that_one_layer_refuses_changes_none() -> None:
    cache = Cache([DynamicLayer(), SlidingWindowLayer(4)])
    fill(cache, 1, 9, layers=2)
    with pytest.raises(StateError, match="num_tokens must keep at least 9 tokens or none, got 7"):
        cache.crop(7)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]


@every_kind
def test_cache_can_be_copied(make: Callable[[], Cache]) -> None:
    cache = make()
    fill(cache, 2, 5)
    before = cache.to_legacy_cache()
    other = copy.deepcopy(cache)
    fill(other, 2, 2, seed=5)
    same(cache, before)


# --- refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_idx", [-1, 4, True, 1.0, None])
def test_layers_that_do_not_exist_are_refused(layer_idx: int) -> None:
    cache = Cache.dynamic(4)
    with pytest.raises(ArgumentError, match=r"^layer_idx must be"):
        cache.update(tokens(1, 1), tokens(1, 1), layer_idx)
    with pytest.raises(IndexError):
        _ = cache[4]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Cache.dynamic(0), "num_layers"),
        (lambda: Cache.static(0), "max_length"),
        (lambda: Cache.quantized("int8", recent=-1), "recent"),
    ],
)
def test_bad_settings_are_refused_by_name(make: Callable[[], Cache], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        make()


@pytest.mark.parametrize("text", [*BAD, "auto", "float16"], ids=lambda text: repr(text)[:20])
def test_what_spells_no_codes_is_refused_by_name(text: Any) -> None:
    for options, name in (({"kv": text}, "kv"), ({"values": text}, "values")):
        with pytest.raises(ArgumentError, match=f"^{name} must be one of int8, .*, codes .*, got "):
            Cache.quantized(**options)


@pytest.mark.parametrize("text", ODD)
def test_an_odd_group_of_4_bits_is_refused_by_name(text: str) -> None:
    for options, name in (({"kv": text}, "kv"), ({"values": text}, "values")):
        with pytest.raises(ArgumentError, match=f"^{name} must have a group of a multiple"):
            Cache.quantized(**options)


def test_each_side_has_codes_and_a_group_of_its_own() -> None:
    cache = Cache.quantized("int8:g4", values="int4:g2")
    cache.update(tokens(1, 3), tokens(1, 3), 0)
    layer = cache.layers[0]
    assert isinstance(layer, QuantizedLayer)
    key, value, key_scale, value_scale = layer.codes()
    dim = tokens(1, 3).shape[3]
    assert [x.dtype for x in (key, value)] == [torch.int8, torch.uint8]
    assert [x.shape[3] for x in (key, value)] == [dim, dim // 2]
    assert key_scale is not None and value_scale is not None
    assert [x.shape[3] for x in (key_scale, value_scale)] == [dim // 4, dim // 2]


def test_tokens_that_are_none_are_refused() -> None:
    with pytest.raises(ShapeError, match="key must be"):
        Cache.dynamic().update(torch.ones(2, 2), torch.ones(2, 2), 0, {"cache_position": torch.arange(1)})


def test_a_layer_that_was_replaced_is_changed_with_the_others() -> None:
    cache = Cache.dynamic(2)
    fill(cache, 2, 5, layers=2)
    cache.layers[1] = cache.layers[1].fork()
    expected = cache[1][0][[1, 0], :, :4].clone()
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(4)
    assert torch.equal(cache[1][0], expected)
