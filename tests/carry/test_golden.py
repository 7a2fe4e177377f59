"""Files that real engines saved: read, found to hold the same numbers, and written with the same bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvloom.carry import (
    CacheGeometry,
    CarriedCache,
    LayerGeometry,
    describe,
    llama_state,
    read_llama,
    read_mlx,
    write_llama,
)
from kvloom.carry.carried import Int8Codes, floats_of
from kvloom.carry.llama.codes import coded_rows
from kvloom.carry.llama.ggml import Q4_0, Q8_0, quantize, rows_of
from kvloom.carry.llama.state import parse_state
from kvloom.carry.mlx import affine
from kvloom.carry.rope_pairs import to_adjacent
from kvloom.errors import ArgumentError
from kvloom.layouts import KVTensors, convert
from kvloom.quant.rotation import rotate

load_file = pytest.importorskip("safetensors.torch").load_file

GOLDEN = Path(__file__).parent / "golden"
GEOMETRY = CacheGeometry.uniform(2, 2, 64, "llama")
LATENTS = CacheGeometry((LayerGeometry(1, 64, 16, 16, has_latents=True),) * 2, "deepseek_v3")
ROTATED = {"llama_q8_0.state": True, "llama_q8_0_unrotated.state": False}
# Largest relative distance of a token: some times the rounding of each kind.
BOUNDS = {
    "llama_f16_flash.ctx": 2e-3,
    "llama_q8_0.state": 2e-2,
    "llama_q8_0_unrotated.state": 2e-2,
    "server_q8_0.slot": 2e-2,
    "server_q4_0.slot": 0.25,
    "mlx_f32.safetensors": 1e-5,
    "mlx_8.safetensors": 2e-2,
    "mlx_4.safetensors": 0.25,
}


def read(name: str) -> CarriedCache:
    if name.startswith("mlx"):
        return read_mlx(GOLDEN / name, GEOMETRY)
    return read_llama(GOLDEN / name, GEOMETRY, rotated=ROTATED.get(name))


def vectors(cache: CarriedCache) -> list[Tensor]:
    return [floats_of(side.load()).float() for layer in cache.layers[:1] for _, side in layer.sides]


@pytest.mark.parametrize("name", BOUNDS)
def test_engines_hold_the_same_numbers(name: str) -> None:
    """Of the first layer, which depends on tokens and positions alone."""
    for x, y in zip(vectors(read(name)), vectors(read("llama_f32.seq")), strict=True):
        assert x.shape == y.shape == (5, 2, 64)
        assert float(((x - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).max()) <= BOUNDS[name]


@pytest.mark.parametrize("name", [x.name for x in GOLDEN.iterdir() if x.name.startswith("llama")])
def test_llama_cpps_bytes_come_back(name: str, tmp_path: Path) -> None:
    form = {"seq": "sequence", "ctx": "context", "state": "state"}[name.rpartition(".")[2]]
    flash = name != "llama_f32.seq"
    write_llama(
        read(name), tmp_path / "a", GEOMETRY, form=form, rotated=ROTATED.get(name), flash_attention=flash
    )
    assert (tmp_path / "a").read_bytes() == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_a_slot_of_a_server_says_its_rotation_and_its_tokens(kind: str, tmp_path: Path) -> None:
    slot, out = GOLDEN / f"server_{kind}.slot", tmp_path / "out"
    cache = read_llama(slot, GEOMETRY)
    assert cache.tokens == read("llama_f32.seq").tokens and cache.kinds == (f"{kind},rotated",)
    assert "codes: rotated by 64 and 64" in describe(slot)
    with pytest.raises(ArgumentError, match="rotated must be True, as the source says"):
        read_llama(slot, GEOMETRY, rotated=False)
    write_llama(cache, out, GEOMETRY, rotated=True, version="0.6.0")
    packed = 4  # no token, a version, how many tokens and how many pictures
    assert out.read_bytes()[12 + 4 * 5 :] == slot.read_bytes()[12 + 4 * (5 + packed) :]
    assert read_llama(out, GEOMETRY).tokens == cache.tokens
    write_llama(cache, out, GEOMETRY, rotated=True)  # of 0.5.0, which has none of this
    with pytest.raises(ArgumentError, match="rotated must be given for codes"):
        read_llama(out, GEOMETRY)


def test_a_slot_with_pictures_is_refused() -> None:
    data = bytearray((GOLDEN / "server_q8_0.slot").read_bytes())
    data[12 + 4 * 8 : 12 + 4 * 9] = (1).to_bytes(4, "little")
    with pytest.raises(ArgumentError, match="must have no pictures or sounds among its tokens, got 1"):
        read_llama(bytes(data), GEOMETRY)
    data[12 + 4 : 12 + 8] = (2).to_bytes(4, "little")
    with pytest.raises(ArgumentError, match="must have tokens as a server packs them"):
        read_llama(bytes(data), GEOMETRY)


@pytest.mark.parametrize("rotated", [True, False])
def test_a_state_in_memory_is_of_either_version(rotated: bool) -> None:
    cache = read("llama_q8_0.state" if rotated else "llama_q8_0_unrotated.state")
    new = llama_state(cache, GEOMETRY, rotated=rotated, version="0.6.0")
    assert len(new) == len(llama_state(cache, GEOMETRY, rotated=rotated)) + 8
    found = read_llama(new, GEOMETRY)  # it says so itself
    assert found.kinds == cache.kinds
    for x, y in zip(vectors(found), vectors(cache), strict=True):
        assert torch.equal(x, y)
    with pytest.raises(ArgumentError, match=r"must have .* bytes of values of layer 1 at byte"):
        read_llama(new[:-1], GEOMETRY)
    at = 8 + 8 + 12 * 5 + 8  # behind magic and id, streams and cells, five cells, v_trans and layers
    wrong = new[:at] + struct.pack("<II", 128, 64) + new[at + 8 :]
    with pytest.raises(ArgumentError, match=r"must have heads rotated by .64, 64. or none"):
        read_llama(wrong, GEOMETRY)


@pytest.mark.parametrize("name", [*ROTATED, "server_q8_0.slot", "server_q4_0.slot"])
def test_codes_are_rounded_as_llama_cpp_rounds(name: str) -> None:
    """The engines computed the first layer of all files from the same numbers."""
    exact, codes = vectors(read("llama_f32.seq")), read(name).layers[0]
    kind = Q4_0 if "q4_0" in name else Q8_0
    for side, (x, found) in enumerate(zip(exact, (codes.keys.load(), codes.values.load()), strict=True)):
        assert isinstance(found, Int8Codes)
        x = to_adjacent(x, 64) if side == 0 else x
        rows = rows_of(*quantize((rotate(x, 64) if ROTATED.get(name, True) else x).flatten(1), kind), kind)
        assert torch.equal(rows, coded_rows(found, kind, side == 0, found.rotated))


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_rounded_as_mlx_rounds(bits: int) -> None:
    exact, codes = read("mlx_f32.safetensors").layers[0], read(f"mlx_{bits}.safetensors").layers[0]
    for x, found in ((exact.keys.load(), codes.keys.load()), (exact.values.load(), codes.values.load())):
        assert isinstance(x, Tensor)
        made = affine.quantize(x, bits, 64, torch.float32)
        for name in ("words", "scales", "biases"):
            assert torch.equal(getattr(made, name), getattr(found, name)), name


def test_latents_come_back(tmp_path: Path) -> None:
    cache = read_llama(GOLDEN / "deepseek_f32.seq", LATENTS)
    write_llama(cache, tmp_path / "a", LATENTS, flash_attention=False)
    assert (tmp_path / "a").read_bytes() == (GOLDEN / "deepseek_f32.seq").read_bytes()


def test_all_are_described() -> None:
    said = {x.name: describe(x) for x in GOLDEN.iterdir() if x.suffix != ".md"}
    assert len(said) == 10
    assert "  values: none, so keys are latents with rope keys" in said["deepseek_f32.seq"]
    assert said["llama_f16_flash.ctx"][0].startswith("llama.cpp, file of a context, architecture llama, ")
    assert "  2 of affine4:g64, 2 heads of 64, all tokens" in said["mlx_4.safetensors"]


@pytest.mark.parametrize("name", ["llama_f32.seq", "llama_f16_flash.ctx"])
def test_states_have_the_layouts_that_are_named(name: str) -> None:
    [stored] = parse_state(GOLDEN / name).caches
    dtype = stored.keys[0].type.dtype
    assert dtype is not None
    keys, values = (x[0].raw.contiguous().clone().view(dtype) for x in (stored.keys, stored.values))
    layout = "llama_cpp_no_flash" if stored.v_trans else "llama_cpp"
    found = convert(KVTensors({"key": keys, "value": values}, layout, heads=2), "T H D").tensors
    layer = read(name).layers[0]
    assert torch.equal(found["key"], to_adjacent(floats_of(layer.keys.load()), 64))
    assert torch.equal(found["value"], floats_of(layer.values.load()))


def test_a_file_of_mlx_has_the_layout_that_is_named() -> None:
    stored = load_file(GOLDEN / "mlx_f32.safetensors")
    found = convert(KVTensors({"key": stored["0.0"], "value": stored["0.1"]}, "mlx"), "T H D").tensors
    assert torch.equal(found["key"][:5], floats_of(read("mlx_f32.safetensors").layers[0].keys.load()))
