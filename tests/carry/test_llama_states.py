"""States and files of llama.cpp: read, written with the same bytes, and refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from carry import states as made

from kvloom.carry import (
    CacheGeometry,
    CarriedCache,
    CarriedLayer,
    CarriedSide,
    LayerGeometry,
    llama_state,
    read_llama,
    write_llama,
)
from kvloom.errors import ArgumentError, UnsupportedError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("v_trans", [0, 1])
def test_numbers_are_those_of_the_state_and_bytes_come_back(dtype: torch.dtype, v_trans: int) -> None:
    data, keys, values = made.plain(v_trans, dtype)
    cache = read_llama(data, made.GEOMETRY, tokens=range(made.TOKENS))
    for layer, key, value in zip(cache.layers, keys, values, strict=True):
        torch.testing.assert_close(layer.keys.load(), key, rtol=0, atol=0)
        torch.testing.assert_close(layer.values.load(), value, rtol=0, atol=0)
    assert llama_state(cache, made.GEOMETRY, flash_attention=not v_trans) == data
    sides = [[CarriedSide.of(x) for x in layer] for layer in zip(keys, values, strict=True)]
    halves = CarriedCache(tuple(CarriedLayer(*x) for x in sides), made.TOKENS, (*range(made.TOKENS),))
    assert llama_state(halves, made.GEOMETRY, flash_attention=not v_trans) == data


def test_cells_may_have_any_order(tmp_path: Path) -> None:
    _, keys, values = made.plain()
    order = [3, 0, 4, 2, 1]
    k, v = made.adjacent(keys).flatten(2)[:, order], values.flatten(2)[:, order]
    cache = read_llama(made.state_bytes(made.cache_bytes(order, [*k], [*v], v_trans=1)), made.GEOMETRY)
    assert torch.equal(cache.layers[1].keys.load(), keys[1])
    assert torch.equal(cache.layers[1].values.load(), values[1])


@pytest.mark.parametrize(("form", "head"), [("sequence", (0x67677371, 3)), ("context", (0x6767736E, 10))])
def test_files_have_tokens_and_the_state(form: str, head: tuple[int, int], tmp_path: Path) -> None:
    data, _, _ = made.plain()
    tokens = [7, 8, 9, 10, 11]
    path = tmp_path / "cache.bin"
    write_llama(read_llama(data, made.GEOMETRY, tokens=tokens), path, made.GEOMETRY, form=form)
    name = struct.pack("<I", 5) + b"llama" if form == "context" else b""
    assert path.read_bytes() == struct.pack("<III5i", *head, 5, *tokens) + name + data[8:]
    again = read_llama(path, made.GEOMETRY)
    assert again.tokens == tuple(tokens)
    assert llama_state(again, made.GEOMETRY) == data
    assert [x.name for x in tmp_path.iterdir()] == ["cache.bin"]


def test_windows_have_a_cache_of_their_own() -> None:
    keys, values = made.numbers(2, 9, 2, 64, seed=1), made.numbers(2, 9, 2, 64, seed=2)
    full = made.cache_bytes(range(9), [keys[1].flatten(1)], [values[1].flatten(1)])
    held = made.cache_bytes(range(5, 9), [keys[0, 5:].flatten(1)], [values[0, 5:].flatten(1)])
    cache = read_llama(made.state_bytes(full, held), made.WINDOWED)
    assert torch.equal(cache.layers[1].keys.load(), keys[1])
    assert torch.equal(cache.layers[0].keys.load(), keys[0, 6:])  # the next token sees three earlier ones
    least = made.cache_bytes(range(6, 9), [keys[0, 6:].flatten(1)], [values[0, 6:].flatten(1)])
    assert llama_state(cache, made.WINDOWED) == made.state_bytes(full, least)
    few = made.cache_bytes(range(7, 9), [keys[0, 7:].flatten(1)], [values[0, 7:].flatten(1)])
    with pytest.raises(ArgumentError, match="must have positions 6 to 8, got those from 7 on"):
        read_llama(made.state_bytes(full, few), made.WINDOWED)
    with pytest.raises(ArgumentError, match="must have 2 caches for layers of this model, got 1"):
        read_llama(made.state_bytes(full), made.WINDOWED)


def test_a_window_without_other_layers_is_not_written() -> None:
    """llama.cpp keeps all tokens of such a model, and sees them."""
    geometry = CacheGeometry((LayerGeometry(2, 64, 64, 64, window=4),), "mistral")
    rows = made.numbers(1, 9, 128)
    cache = read_llama(made.state_bytes(made.cache_bytes(range(9), [*rows], [*rows])), geometry)
    assert cache.layers[0].keys.num_tokens == 3
    with pytest.raises(UnsupportedError, match="must hold all 9 tokens where"):
        llama_state(cache, geometry)


def test_latents_have_no_values_and_an_adjacent_rope_key() -> None:
    latent, rope = made.numbers(2, 5, 1, 64, seed=1), made.numbers(2, 5, 1, 16, seed=2)
    rows = torch.cat((latent, made.adjacent(rope)), -1).flatten(2)
    data = made.state_bytes(made.cache_bytes(range(5), [*rows], None))
    cache = read_llama(data, made.LATENTS)
    assert torch.equal(cache.layers[1].keys.load(), latent[1])
    assert torch.equal(cache.layers[1].values.load(), rope[1])
    assert llama_state(cache, made.LATENTS) == data


def test_only_rotary_elements_are_permuted() -> None:
    keys = made.numbers(1, 5, 2, 64)
    turned = torch.cat((made.adjacent(keys[..., :16]), keys[..., 16:]), -1).flatten(2)
    data = made.state_bytes(made.cache_bytes(range(5), [*turned], [*turned]))
    geometry = CacheGeometry.uniform(1, 2, 64, "llama", rotary=16)
    cache = read_llama(data, geometry)
    assert torch.equal(cache.layers[0].keys.load(), keys[0])
    assert llama_state(cache, geometry) == data


def state(**more: int) -> bytes:
    return made.plain(**more)[0]


BASE, CELLS = state(), 16
WRONG = {
    "none": (b"", "source must have bytes, got none"),
    "magic": (b"\0" + BASE[1:], "must be a state of llama.cpp or a file of one, got magic 0xaf143c00"),
    "one byte less": (BASE[:-1], "must have 2,560 bytes of values of layer 1 at byte"),
    "one byte more": (BASE + b"\0", "must have 8 bytes of streams and cells at byte .*, got 1"),
    "streams": (state(streams=2), "must have one stream, got 2"),
    "no id": (state(ids=0), "must have one sequence in cell 0, got"),
    "two ids": (state(ids=2), "must have one sequence in cell"),
    "cells": (
        BASE[:12] + struct.pack("<I", 2**31) + BASE[CELLS:],
        "must have 25,769,803,776 bytes of cells at byte 16, got",
    ),
    "layers": (
        BASE[: CELLS + 60 + 4] + struct.pack("<I", 2**32 - 1) + BASE[CELLS + 68 :],
        "must have room for its layers, got 4,294,967,295",
    ),
    "row": (
        BASE[: CELLS + 72] + struct.pack("<Q", 2**62) + BASE[CELLS + 80 :],
        "bytes of keys of layer 0 at byte",
    ),
    "version": (
        struct.pack("<III", 0x67677371, 2, 0) + BASE[8:],
        "must be of version 3 or 4 of a sequence's file, got 2",
    ),
    "tokens": (struct.pack("<III", 0x67677371, 3, 2**31) + BASE[8:], "bytes of tokens at byte 12"),
    "name": (
        struct.pack("<IIII", 0x6767736E, 10, 0, 2**31) + BASE[8:],
        "must name an architecture in 256 bytes",
    ),
    "architecture": (
        struct.pack("<IIII", 0x6767736E, 10, 0, 5) + b"qwen2" + BASE[8:],
        "must be of architecture llama, got 'qwen2'",
    ),
    "other tokens": (
        struct.pack("<III2i", 0x67677371, 3, 2, 1, 2) + BASE[8:],
        "must have the ids of its 5 tokens, got 2",
    ),
    "third cache": (BASE + 2 * BASE[8:], "must end with its second cache"),
}


@pytest.mark.parametrize("name", WRONG)
def test_damage_is_named(name: str) -> None:
    data, said = WRONG[name]
    with pytest.raises(ArgumentError, match=said):
        read_llama(data, made.GEOMETRY)


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ((0, 1, 2, 4, 5), "each position once, got 5 from 0 to 5"),
        ((0, 1, 2, 2, 3), "each position once"),
        ((-1, 0, 1, 2, 3), "each position once, got 5 from -1 to 3"),
        ((1, 2, 3, 4, 5), "positions 0 to 5, got those from 1 on: keys carry their positions"),
    ],
)
def test_positions_are_all_from_zero(positions: tuple[int, ...], said: str) -> None:
    x = made.numbers(2, 5, 128)
    with pytest.raises(ArgumentError, match=said):
        read_llama(made.state_bytes(made.cache_bytes(positions, [*x], [*x])), made.GEOMETRY)


def test_a_state_of_another_model_is_refused() -> None:
    for geometry, said in (
        (CacheGeometry.uniform(3, 2, 64, "llama"), "must have 3 layers that see all tokens, got 2"),
        (CacheGeometry.uniform(2, 3, 64, "llama"), "keys of layer 0 of 192 elements a token, got 128"),
        (CacheGeometry.uniform(2, 2, 64, "rwkv"), "pairs must be given for an architecture"),
    ):
        with pytest.raises(ArgumentError, match=said):
            read_llama(BASE, geometry)
    with pytest.raises(ArgumentError, match="tokens must be those of the source"):
        read_llama(
            struct.pack("<III5i", 0x67677371, 3, 5, *range(5)) + BASE[8:], made.GEOMETRY, tokens=[0] * 5
        )


def test_types_that_are_not_carried_are_named() -> None:
    q4_1 = BASE[: CELLS + 68] + struct.pack("<i", 3) + BASE[CELLS + 72 :]
    with pytest.raises(UnsupportedError, match="must have elements of f32, f16, bf16, q8_0, q4_0, got q4_1"):
        read_llama(q4_1, made.GEOMETRY)


def test_what_cannot_be_written_is_said_before_anything_is(tmp_path: Path) -> None:
    cache = read_llama(BASE, made.GEOMETRY)
    for options, said in (
        ({"kind": "f16"}, "must hold float32 without rounding, got float16"),
        ({"kind": "q8_0"}, "rotated must be given for codes"),
        ({"kind": "q8_0", "rotated": True}, "must hold keys in float32 without rounding, got q8_0,rotated"),
        ({"kind": "q4_1"}, "kind must be one of"),
        ({"form": "slot"}, "form must be one of state, sequence, context"),
        ({"rotated": True}, "rotated must be left out where elements are floats"),
    ):
        with pytest.raises(ArgumentError, match=said):
            write_llama(cache, tmp_path / "out", made.GEOMETRY, **options)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_a_nan_is_not_written_and_leaves_no_file(tmp_path: Path) -> None:
    x = made.numbers(2, 5, 128)
    x[1, 3, 7] = torch.nan
    cache = read_llama(made.state_bytes(made.cache_bytes(range(5), [*x], [*x])), made.GEOMETRY)
    with pytest.raises(ArgumentError, match="got NaN or infinity in keys of layer 1"):
        write_llama(cache, tmp_path / "out", made.GEOMETRY)
    assert not [*tmp_path.iterdir()]
    large = made.numbers(2, 5, 128) * 1e6
    cache = read_llama(made.state_bytes(made.cache_bytes(range(5), [*large], [*large])), made.GEOMETRY)
    with pytest.raises(ArgumentError, match="got NaN or infinity in keys of layer 0"):
        write_llama(cache, tmp_path / "out", made.GEOMETRY, kind="f16", rounding=True)
