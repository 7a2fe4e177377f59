"""Prompt caches of mlx-lm, of two versions: read, written, and refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from carry import states as made
from torch import Tensor

from kvloom.carry import CarriedCache, CarriedLayer, CarriedSide, read_mlx, write_mlx
from kvloom.carry.carried import AffineCodes, floats_of
from kvloom.carry.mlx.affine import quantize
from kvloom.errors import ArgumentError, UnsupportedError

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, save_file

T, H, D = 5, 2, 64
VERSIONS = ["0.32.2", "0.28.4"]


def cache(dtype: torch.dtype = torch.float32, window: int | None = None, tokens: int = T) -> CarriedCache:
    layers = []
    for i in range(2):
        held = tokens if window is None else min(tokens, window - 1)
        sides = [CarriedSide.of(made.numbers(held, H, D, seed=2 * i + x).to(dtype)) for x in (0, 1)]
        layers.append(CarriedLayer(sides[0], sides[1], window))
    return CarriedCache(tuple(layers), tokens, tuple(range(10, 10 + tokens)))


def vectors(carried: CarriedCache) -> list[Tensor]:
    return [floats_of(side.load()) for layer in carried.layers for _, side in layer.sides]


def same(one: CarriedCache, other: CarriedCache) -> bool:
    return all(torch.equal(x, y) for x, y in zip(vectors(one), vectors(other), strict=True))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_floats_come_back(dtype: torch.dtype, version: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_mlx(cache(dtype), path, version=version, metadata={"kvloom": "abc"})
    found = load_file(path)  # by the format's own library
    assert torch.equal(found["1.1"], vectors(cache(dtype))[3].transpose(0, 1)[None])
    again = read_mlx(path)
    assert same(again, cache(dtype))
    assert again.tokens == tuple(range(10, 15))
    assert again.said == (("kvloom", "abc"),)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("version", VERSIONS)
def test_codes_keep_their_words_scales_and_offsets(version: str, bits: int, tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_mlx(cache(), first, bits=bits, version=version, rounding=True)
    read = read_mlx(first)
    assert read.kinds == (f"affine{bits}:g64",)
    for x, wanted in zip(vectors(read), vectors(cache()), strict=True):
        # The step of a group, once more where the end opposite to its edge is clipped.
        step = (wanted.amax(-1) - wanted.amin(-1)) / ((1 << bits) - 1)
        assert bool(((x - wanted).abs().amax(-1) <= 1.5 * step).all())
    write_mlx(read, second, version=version)
    assert second.read_bytes() == first.read_bytes()
    other = VERSIONS[version == VERSIONS[0]]
    write_mlx(read, second, version=other)
    assert same(read_mlx(second), read)


def test_zero_is_a_code_and_the_far_end_is_clipped() -> None:
    x = torch.tensor([[[*[0.0] * 30, -1.0, 3.0]]])
    found = quantize(x, 4, 32, torch.float32)
    assert (float(found.scales), float(found.biases)) == (pytest.approx(-3 / 11), 3.0)
    assert floats_of(found).flatten().tolist()[-3:] == pytest.approx([0.0, 3 - 15 * 3 / 11, 3.0], abs=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_slots_behind_the_tokens_do_not_count(version: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors, meta = {}, {}
    for i in range(2):
        for side in (0, 1):
            x = torch.full((1, H, 8 if version == VERSIONS[0] else T, D), torch.nan)
            x[:, :, :T] = vectors(cache())[2 * i + side].transpose(0, 1)
            tensors[f"{i}.{side}"] = x
        if version == VERSIONS[0]:
            tensors[f"{i}.2"] = torch.tensor(T, dtype=torch.int32)
            meta |= {f"1.{i}": "KVCache", f"2.{i + 1}.0": f"{i}.2", f"2.{i + 1}.1": "scalar", "2.0": ""}
        else:
            meta |= {f"2.{i}": "KVCache", f"0.{i}": ""}
    save_file(tensors, path, meta)
    assert same(read_mlx(path), cache())


@pytest.mark.parametrize(("tokens", "slots"), [(3, 3), (7, 7), (8, 8), (30, 8)])
def test_a_window_is_a_ring_whose_first_slot_the_next_token_takes(
    tokens: int, slots: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    windowed = cache(window=8, tokens=tokens)
    write_mlx(windowed, path)
    found = load_file(path)
    assert [int(found[f"0.{i}"]) for i in range(2, 6)] == [tokens, 0, 8, slots]
    assert found["0.0"].shape[2] == slots
    again = read_mlx(path)
    assert again.layers[0].window == 8
    assert same(again, windowed)


def test_a_ring_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    positions = torch.tensor([8, 9, 10, 3, 4, 5, 6, 7])  # of a window of 8, the next slot is 3
    x = positions.float().view(1, 1, 8, 1).expand(1, 1, 8, 32).contiguous()
    numbers = {f"0.{i}": torch.tensor(n, dtype=torch.int32) for i, n in enumerate((11, 0, 8, 3), 2)}
    meta = {"1.0": "RotatingKVCache", "2.0": ""}
    save_file({"0.0": x, "0.1": x.clone(), **numbers}, path, meta)
    read = read_mlx(path)
    assert floats_of(read.layers[0].keys.load())[:, 0, 0].tolist() == [4, 5, 6, 7, 8, 9, 10]


def test_adjacent_pairs_are_those_of_a_traditional_rope(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_mlx(cache(), path, pairs="adjacent")
    assert torch.equal(load_file(path)["0.0"][0].transpose(0, 1), made.adjacent(vectors(cache())[0]))
    assert same(read_mlx(path, pairs="adjacent"), cache())


def damaged(path: Path, change: Any) -> bytes:
    """A file whose header was changed."""
    data = path.read_bytes()
    [size] = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def changed(*path: Any, to: Any) -> Any:
    def change(header: Any) -> None:
        for key in path[:-1]:
            header = header[key]
        header[path[-1]] = to

    return change


META = "__metadata__"
WRONG = {
    "shape": (changed("0.0", "shape", to=[1, H, T, 32]), "must have tensor 0.0 from byte 0 on"),
    "large": (changed("0.0", "shape", to=[1, 2**40, 2**40, D]), "must have tensor 0.0 from byte 0 on"),
    "negative": (changed("0.0", "shape", to=[1, -1, T, D]), "dtype, shape and offsets of tensor 0.0"),
    "offset": (changed("0.0", "data_offsets", to=[0, 2**50]), "must have tensor 0.0 from byte 0 on"),
    "dtype": (changed("0.0", "dtype", to="F8"), "must have tensors of F32, F16"),
    "classes": (changed(META, to={}), "must be a prompt cache of mlx-lm"),
    "text": (changed(META, to={"a": 1}), "must have texts as metadata"),
    "tokens": (changed(META, "0.kvloom_tokens", to="[1,2]"), "tokens must be the 5 of the cache, got 2"),
    "no list": (changed(META, "0.kvloom_tokens", to="[[]"), "must have its tokens as a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    write_mlx(cache(), tmp_path / "a")
    change, said = WRONG[name]
    with pytest.raises(ArgumentError, match=said):
        read_mlx(damaged(tmp_path / "a", change))


def test_other_classes_and_fewer_layers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_mlx(cache(), path)
    with pytest.raises(UnsupportedError, match=r"must have layers of .*, got ChunkedKVCache in 1"):
        read_mlx(damaged(path, changed(META, "1.1", to="ChunkedKVCache")))
    with pytest.raises(ArgumentError, match="cache must have 3 layers, got 2"):
        read_mlx(path, type(made.GEOMETRY).uniform(3, H, D, "llama"))
    with pytest.raises(ArgumentError, match="must have one row and 9999 tokens in layer 0"):
        data = bytearray(path.read_bytes())
        with safe_open(path, "pt") as file:
            assert int(file.get_tensor("0.2")) == T
        at = len(data) - 8  # both numbers are the last tensors
        data[at:] = struct.pack("<ii", 9999, 9999)
        read_mlx(bytes(data))
    for text, said in ((b"[" * 100_000, "must have a header of JSON"), (b"[]", "must have an object")):
        with pytest.raises(ArgumentError, match=said):
            read_mlx(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ArgumentError, match="bytes of a header at byte 8"):
        read_mlx(struct.pack("<Q", 2**60) + b"{}")


def test_what_mlx_cannot_hold_is_refused(tmp_path: Path) -> None:
    for options, said in (
        ({"kind": "float16"}, "must hold float32 without rounding, got float16"),
        ({"kind": "int64"}, "kind must be float32, float16 or bfloat16, got 'int64'"),
        ({"bits": 8}, "bits must hold float32 without rounding, got 8"),
        ({"bits": 3, "rounding": True}, "bits must be of"),
        ({"version": "0.30"}, "version must be one of"),
    ):
        with pytest.raises(ArgumentError, match=said):
            write_mlx(cache(), tmp_path / "a", **options)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"version must be 0.32.2 for layers with a window"):
        write_mlx(cache(window=8), tmp_path / "a", version="0.28.4")
    assert not [*tmp_path.iterdir()]
    assert isinstance(quantize(torch.zeros(1, 1, 64), 8, 64, torch.float32), AffineCodes)


def test_latents_have_adjacent_rope_keys(tmp_path: Path) -> None:
    """As DeepSeek's layer in mlx-lm 0.32.2 gives them to its cache; the older one keeps whole keys."""
    latents, rope = made.numbers(2, 7, 1, 64), made.numbers(2, 7, 1, 16, seed=1)
    sides = [[CarriedSide.of(x) for x in layer] for layer in zip(latents, rope, strict=True)]
    given = CarriedCache(tuple(CarriedLayer(*x, has_latents=True) for x in sides), 7)
    write_mlx(given, tmp_path / "latents")
    stored = load_file(tmp_path / "latents")
    assert torch.equal(stored["1.0"], latents[1].transpose(0, 1)[None])
    assert torch.equal(stored["1.1"], made.adjacent(rope[1]).transpose(0, 1)[None])
    again = read_mlx(tmp_path / "latents", made.LATENTS)
    assert again.layers[1].has_latents
    assert same(again, given)
    for more in ({"version": "0.28.4"}, {"bits": 8, "rounding": True}):
        with pytest.raises(UnsupportedError, match="got latents in layer 0"):
            write_mlx(given, tmp_path / "other", **more)
