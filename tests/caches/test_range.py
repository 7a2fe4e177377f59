"""Of which range codes of 4 and 2 bits are: what each door of a cache writes follows the format."""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles.bits import generator
from oracles.round_trips import every_way
from torch import Tensor

from kvloom import ops
from kvloom.caches import CacheFormat, FixedLayer, Layer, PagedLayer, PrefixCache, QuantizedLayer, Sequences
from kvloom.caches.format import kept_as
from kvloom.core.specs import QuantSpec
from kvloom.errors import ArgumentError, ConfigError
from kvloom.quant.affine import dequantize, quantize

DIM, WINDOW = 32, 12
DOORS: dict[str, Callable[[CacheFormat], Layer]] = {
    "pages": PagedLayer,
    "pages of a window": lambda format: PagedLayer(format, Sequences(format, WINDOW)),
    "fixed": lambda format: FixedLayer(replace(format, page_size=1, max_tokens=64)),
    "ring": lambda format: FixedLayer(replace(format, page_size=1, max_tokens=64), WINDOW),
}
every_door = pytest.mark.parametrize("make", DOORS.values(), ids=DOORS)
KINDS = ["int4:g16,range=full", "int4:g16,range=symmetric", "int2:g16,range=full", "int2:g16,range=symmetric"]
every_range = pytest.mark.parametrize("kind", KINDS)


def format_of(kind: str, **options: Any) -> CacheFormat:
    """Codes of both sides that are not rotated."""
    _, quant = kept_as("kv", f"{kind},rotate=none")
    return CacheFormat(quant=quant, **options)


def tokens(count: int, seed: int) -> Tensor:
    return torch.randn(2, 2, count, DIM, generator=generator(seed))


def quantized(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return quantize(x, int(kind[3]), 16, torch.float16, full_range=kind.endswith("full"))


def as_codes(x: Tensor, kind: str) -> Tensor:
    return dequantize(*quantized(x, kind), int(kind[3]), x.dtype)


@every_range
@every_door
def test_new_tokens(make: Callable[[CacheFormat], Layer], kind: str) -> None:
    layer = make(format_of(kind))
    for step in (20, 1, 9):
        key, value = tokens(step, step), tokens(step, step + 1)
        found = layer.update(key, value)
    for got, x in zip(found, (key, value), strict=True):
        end = min(got.shape[2], 30)  # fixed storage has all its positions
        assert torch.equal(got[:, :, end - 9 : end], as_codes(x, kind))


@every_range
@pytest.mark.parametrize("door", ["pages", "pages of a window", "fixed"])
def test_assigned_tokens(door: str, kind: str) -> None:
    layer = DOORS[door](format_of(kind))
    layer.update(tokens(20, 1), tokens(20, 2))
    new = tokens(layer.keys.shape[2], 7)
    layer.values = new  # one side alone, beside keys that stay
    assert torch.equal(layer.values[:, :, :20], as_codes(new, kind)[:, :, :20])
    assert torch.equal(layer.keys[:, :, :20], as_codes(tokens(20, 1), kind)[:, :, -layer.keys.shape[2] :])


@every_range
@pytest.mark.parametrize("recent", [0, 4])
def test_steps_that_later_layers_share(recent: int, kind: str) -> None:
    format = format_of(kind, recent=recent)
    sequences = Sequences(format)
    layers = [PagedLayer(format, sequences, i) for i in builtins.range(3)]
    for step in (6, 1, 1, 5):
        for i, layer in enumerate(layers):
            layer.append(tokens(step, 10 * step + i), tokens(step, 20 * step + i))
    for i, layer in enumerate(layers):
        key, value = (
            torch.cat([tokens(step, seed * step + i) for step in (6, 1, 1, 5)], 2) for seed in (10, 20)
        )
        storage = layer.storage
        assert storage is not None
        slots = sequences.place(0, 13, storage).slots
        for found, x in zip(ops.load(slots, storage.view, dtype=torch.float32), (key, value), strict=True):
            assert torch.equal(found, as_codes(x, kind))


@every_range
def test_tokens_that_a_residual_window_has_passed(kind: str) -> None:
    layer = PagedLayer(format_of(kind, recent=4))
    layer.update(tokens(20, 1), tokens(20, 2))
    key, _ = layer.update(tokens(6, 3), tokens(6, 4))
    assert torch.equal(key[:, :, :17], as_codes(tokens(20, 1)[:, :, :17], kind))
    assert torch.equal(key[:, :, 17:20], tokens(20, 1)[:, :, 17:])


@every_range
def test_codes_of_a_layer_with_a_residual_window(kind: str) -> None:
    layer = QuantizedLayer(f"{kind},rotate=none", recent=3)
    layer.update(tokens(20, 1), tokens(20, 2))
    key, value, key_scale, value_scale = layer.codes()
    for codes, scale, seed in ((key, key_scale, 1), (value, value_scale, 2)):
        x = tokens(20, seed).transpose(1, 2)
        want, want_scale = quantized(x, kind)
        assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scale, want_scale)


@every_range
def test_many_tokens_that_are_rotated_a_piece_at_a_time(kind: str) -> None:
    _, quant = kept_as("kv", f"{kind},rotate=both")
    layer, x = PagedLayer(CacheFormat(quant=quant)), tokens(1300, 1)
    key, _ = layer.update(x, x)
    assert torch.equal(key, ops.rotate(as_codes(ops.rotate(x, DIM), kind), DIM))


@every_range
def test_a_prefix_cache(kind: str) -> None:
    format = format_of(kind, page_size=4, max_tokens=64)
    cache = PrefixCache(format, num_layers=1, heads=2, head_dim=DIM, dtype=torch.float32)
    sequence = cache.begin([*builtins.range(10)])
    x = torch.randn(10, 2, DIM, generator=generator(5))
    cache.append(sequence, 0, x, x)
    slots = cache.pages.slots([ref.id for ref in sequence.table.pages], cache.layers[0])[:10]
    assert torch.equal(ops.load(slots, cache.layers[0].view, dtype=torch.float32)[0], as_codes(x, kind))


@every_range
@every_way
def test_a_cache_that_is_loaded_goes_on_as_it_was(again: Callable[[Any], Any], kind: str) -> None:
    layer = PagedLayer(format_of(kind))
    layer.update(tokens(9, 1), tokens(9, 1))
    loaded = again(layer)
    key, _ = loaded.update(tokens(5, 2), tokens(5, 2))
    assert torch.equal(key, as_codes(torch.cat([tokens(9, 1), tokens(5, 2)], 2), kind))


def test_a_cache_that_an_earlier_release_saved_goes_on_in_symmetric_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = PagedLayer(CacheFormat(quant=QuantSpec(4, 16)))
    layer.update(tokens(9, 1), tokens(9, 1))
    state = QuantSpec.__getstate__
    monkeypatch.setattr(QuantSpec, "__getstate__", lambda self: state(self)[:-1])
    saved = pickle.dumps(layer)
    monkeypatch.undo()
    loaded = pickle.loads(saved)  # noqa: S301 (our own)
    assert loaded.storage.specs[0].quant == QuantSpec(4, 16)
    key, _ = loaded.update(tokens(5, 2), tokens(5, 2))
    assert torch.equal(key, as_codes(torch.cat([tokens(9, 1), tokens(5, 2)], 2), "int4:g16,range=symmetric"))


@pytest.mark.parametrize(
    ("keys", "values", "kind"),
    [
        ("int4:g16", "int4:g16", "int4:g16"),
        ("int4:g16,range=symmetric", "int4:g16,range=symmetric", "int4:g16,range=symmetric"),
        ("int8:g16", "int4:g16,range=symmetric", "int8:g16/int4:g16,range=symmetric"),
        ("int8:g16", "int4:g16", "int8:g16/int4:g16"),
    ],
)
def test_a_format_is_named_as_it_is_spelled(keys: str, values: str, kind: str) -> None:
    (_, key), (_, value) = kept_as("kv", keys, "keys"), kept_as("values", values, "values")
    assert CacheFormat(quant=key, values=CacheFormat(quant=value)).kind() == f"{kind},recent=0,smooth=none"


def test_keys_and_values_of_two_ranges_are_refused() -> None:
    full, symmetric = (format_of(kind) for kind in KINDS[:2])
    for one, other in ((full, symmetric), (symmetric, full)):
        with pytest.raises(ConfigError, match=r"^values must have the range of keys, "):
            replace(one, values=other)
    with pytest.raises(ConfigError, match=r"^values must have the range of keys, full, got symmetric$"):
        QuantizedLayer("int4", values="int4,range=symmetric")
    with pytest.raises(ConfigError, match=r"^values must have the range of keys, symmetric, got full$"):
        QuantizedLayer("int4,range=symmetric", values="int2")
    replace(symmetric, values=CacheFormat(quant=QuantSpec(2, 16)))  # which is symmetric


def test_codes_of_other_bits_have_no_such_option() -> None:
    with pytest.raises(ArgumentError, match=r"^kv must have no range for 8 bits"):
        QuantizedLayer("int8,range=full")
