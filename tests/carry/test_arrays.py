"""Arrays of OpenVINO, ONNX Runtime and ExecuTorch, by name."""

from __future__ import annotations

import pytest
import torch
from carry import states as made
from torch import Tensor

from kvloom.carry import CacheGeometry, CarriedCache, read_arrays, read_llama, write_arrays
from kvloom.carry.arrays import side_and_layer
from kvloom.errors import ArgumentError

NAMES = [(f"past_key_values.{i}.key", f"past_key_values.{i}.value") for i in range(2)]
AXES = {"openvino": (1, 0, 2), "onnxruntime": (1, 0, 2), "executorch": (0, 1, 2)}


def cache(dtype: torch.dtype = torch.float32) -> CarriedCache:
    return read_llama(made.plain(dtype=dtype)[0], made.GEOMETRY)


def loaded(carried: CarriedCache) -> list[Tensor]:
    found = [side.load() for layer in carried.layers for _, side in layer.sides]
    return [x for x in found if isinstance(x, Tensor)]


@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
@pytest.mark.parametrize("engine", AXES)
def test_arrays_have_the_engines_axes(engine: str, pairs: str) -> None:
    arrays = write_arrays(cache(), engine, made.GEOMETRY, names=NAMES, pairs=pairs, slots=8)
    _, keys, values = made.plain()
    wanted = made.adjacent(keys[1]) if pairs == "adjacent" else keys[1]
    found = arrays[NAMES[1][0]][0].permute(AXES[engine])
    assert torch.equal(found[: made.TOKENS], wanted)
    assert torch.equal(arrays[NAMES[0][1]][0].permute(AXES[engine])[: made.TOKENS], values[0])
    assert not found[made.TOKENS :].any()
    again = read_arrays(arrays, engine, made.GEOMETRY, num_tokens=made.TOKENS, pairs=pairs)
    assert all(torch.equal(x, y) for x, y in zip(loaded(again), loaded(cache()), strict=True))


def test_openvino_takes_float32_of_every_cache() -> None:
    arrays = write_arrays(cache(torch.bfloat16), "openvino", made.GEOMETRY, names=NAMES)
    assert {x.dtype for x in arrays.values()} == {torch.float32}
    kept = write_arrays(cache(torch.float16), "onnxruntime", made.GEOMETRY, names=NAMES)
    assert {x.dtype for x in kept.values()} == {torch.float16}
    with pytest.raises(ArgumentError, match="must hold float32 without rounding, got float16"):
        write_arrays(cache(), "onnxruntime", made.GEOMETRY, names=NAMES, kind="float16")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("past_key_values.3.key", (0, 3)),
        ("present.11.value", (1, 11)),
        ("key.0", (0, 0)),
        ("layers.7.attention.v_cache", (1, 7)),
        ("past_key_4", (0, 4)),
    ],
)
def test_names_say_side_and_layer(name: str, place: tuple[int, int]) -> None:
    assert side_and_layer(name) == place


def test_other_arrays_are_refused() -> None:
    arrays = write_arrays(cache(), "openvino", made.GEOMETRY, names=NAMES)
    for wrong, said in (
        ({k: v for k, v in arrays.items() if "1.value" not in k}, "keys and values of 2 layers"),
        ({**arrays, "state": torch.zeros(1)}, "names of a side and a layer"),
        ({k: x.repeat(2, 1, 1, 1) for k, x in arrays.items()}, "must have one row"),
        ({k: x[:, :, :, :32] for k, x in arrays.items()}, "must have 2 heads of 64 and 5 tokens"),
        ({k: x.int() for k, x in arrays.items()}, "arrays must be float32"),
        ({k: x[:, :, : 5 - ("0.key" in k)] for k, x in arrays.items()}, r"arrays of \[4, 5\] slots"),
    ):
        with pytest.raises(ArgumentError, match=said):
            read_arrays(wrong, "openvino", made.GEOMETRY)
    with pytest.raises(ArgumentError, match="num_tokens must be given of buffers of executorch"):
        read_arrays(arrays, "executorch", made.GEOMETRY)
    with pytest.raises(ArgumentError, match="slots must be at least 5, got 4"):
        write_arrays(cache(), "openvino", made.GEOMETRY, names=NAMES, slots=4)
    with pytest.raises(ArgumentError, match="cache must have heads"):
        write_arrays(cache(), "openvino", CacheGeometry.uniform(2, 4, 32), names=NAMES)
