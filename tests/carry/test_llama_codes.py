"""q8_0: how it is rounded, which vectors are rotated, and that its codes come back with the same bytes."""

from __future__ import annotations

import struct

import pytest
import torch
from carry import states as made
from torch import Tensor

from kvloom.carry import CacheGeometry, LayerGeometry, llama_state, read_llama
from kvloom.carry.carried import AffineCodes, Int8Codes, floats_of
from kvloom.errors import ArgumentError, UnsupportedError

T = 5


def block(x: list[float]) -> bytes:
    """A block as ggml rounds it: codes by the unrounded scale, which is stored as float16."""
    wide = torch.tensor(x)
    largest = wide.abs().max()
    codes = torch.round(wide * (127 / largest)).char() if largest > 0 else torch.zeros(32).char()
    scale = (largest / 127).half()
    return struct.pack("<e32b", float(scale), *codes.tolist())


def rows(x: Tensor) -> Tensor:
    """Rows of q8_0 of ``[T, n]``."""
    return torch.stack(
        [torch.frombuffer(bytearray(b"".join(block(part) for part in row)), dtype=torch.uint8)
         for row in x.unflatten(1, (-1, 32)).tolist()]
    )  # fmt: skip


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix over the root of its size."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def turned(x: Tensor, size: int) -> Tensor:
    return (x.unflatten(-1, (-1, size)) @ hadamard(size)).flatten(-2) if size else x


def state(geometry: CacheGeometry, keys: int, values: int) -> tuple[bytes, Tensor, Tensor]:
    """A state of codes, of keys and values rotated in blocks, and what they were made of ``[T, H, D]``."""
    layer, is_adjacent = geometry.layers[0], geometry.architecture == "llama"
    k = made.numbers(T, layer.heads, layer.key_dim, seed=1)
    v = made.numbers(T, layer.heads, layer.value_dim, seed=2)
    k[0], v[0, 0] = k[0] * 100, 0.0
    row = rows(turned(made.adjacent(k) if is_adjacent else k, keys).flatten(1))
    return (
        made.state_bytes(made.cache_bytes(range(T), [row], [rows(turned(v, values).flatten(1))], kind=8)),
        k,
        v,
    )


# Head dim, elements that are rotated together in keys and in values, and whether codes stay codes of int8.
SIZES = [
    (32, 0, 0, True, True),
    (64, 64, 64, True, True),
    (96, 0, 0, True, True),
    (128, 128, 64, True, False),
    (192, 64, 64, False, True),
    (256, 256, 64, True, False),
]


@pytest.mark.parametrize(("dim", "keys", "values", "key_codes", "value_codes"), SIZES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_rotated_codes(
    architecture: str, dim: int, keys: int, values: int, key_codes: bool, value_codes: bool
) -> None:
    geometry = CacheGeometry.uniform(1, 2, dim, architecture)
    data, k, v = state(geometry, keys, values)
    cache = read_llama(data, geometry, rotated=True)
    [layer] = cache.layers
    loaded = layer.keys.load(), layer.values.load()
    is_permuted = architecture == "llama"
    assert isinstance(loaded[0], Int8Codes) is (key_codes or not is_permuted)
    assert isinstance(loaded[1], Int8Codes) is value_codes
    for x, wanted in zip(loaded, (k, v), strict=True):
        # An element errs by half a step and by the rounding of the scale, all of it in the rotation.
        step = wanted.abs().amax((1, 2), keepdim=True) * max(keys, values, 1) ** 0.5 / 127
        assert bool(((floats_of(x) - wanted).abs() <= step + 1e-6).all())
    assert llama_state(cache, geometry, rotated=True) == data
    exact = llama_state(cache, geometry, kind="f32")
    assert (
        llama_state(read_llama(exact, geometry), geometry, kind="q8_0", rotated=True, rounding=True) == data
    )


def test_rotation_must_be_said_where_bytes_do_not() -> None:
    geometry = CacheGeometry.uniform(1, 2, 64, "llama")
    data, k, _ = state(geometry, 0, 0)
    with pytest.raises(ArgumentError, match="rotated must be given for codes"):
        read_llama(data, geometry)
    plain = read_llama(data, geometry, rotated=False)
    assert float((floats_of(plain.layers[0].keys.load()) - k).abs().max()) < 2
    with pytest.raises(ArgumentError, match="must hold keys in q8_0 without rounding, got q8_0,rotated"):
        llama_state(plain, geometry, rotated=True)
    assert llama_state(plain, geometry, rotated=False) == data
    small = CacheGeometry.uniform(1, 2, 32, "llama")
    read_llama(state(small, 0, 0)[0], small)  # is never rotated


def test_partial_rotary_codes_are_decoded() -> None:
    geometry = CacheGeometry((LayerGeometry(2, 64, 64, 16),), "llama")
    data, _, _ = state(CacheGeometry.uniform(1, 2, 64, "llama"), 0, 0)
    cache = read_llama(data, geometry, rotated=False)
    assert isinstance(cache.layers[0].keys.load(), Tensor)
    assert llama_state(cache, geometry, rotated=False) == data


def test_codes_are_refused_where_llama_cpp_has_none() -> None:
    cache = read_llama(made.plain()[0], made.GEOMETRY)
    with pytest.raises(UnsupportedError, match="must be floats without flash attention, got q8_0"):
        llama_state(cache, made.GEOMETRY, kind="q8_0", rotated=True, rounding=True, flash_attention=False)


def test_words_have_their_first_code_in_the_lowest_bits() -> None:
    words = torch.tensor([[[0x76543210, 0x0EDCBA98]]], dtype=torch.int32)
    one = torch.ones(1, 1, 1)
    assert AffineCodes(words, one, 2 * one, 4).floats().tolist() == [[[2.0 + x for x in range(15)] + [2.0]]]
