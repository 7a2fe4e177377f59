"""``key_value_cache``: bit-equal to the golden over every layout, dtype and quantizer."""

from __future__ import annotations

import pytest
import torch
from oracles import bits
from oracles.pairs import pairwise
from oracles.pmx_cases import (
    Call,
    Numerics,
    assert_matches_golden,
    plain_numerics,
    quantized_numerics,
    static_call,
    with_copies,
)

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import pmx

F32 = Numerics(torch.float32, torch.float32)
INT8 = Numerics(torch.float32, torch.int8, torch.float16, bit=8, group=16)


def matches_golden(call: Call) -> pmx_golden.Stored:
    return assert_matches_golden(pmx.key_value_cache, pmx_golden.key_value_cache, call)


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("num_repeat", [1, 3])
@pytest.mark.parametrize("inputs", [*bits.FLOATS, torch.int8])
def test_unquantized_grid(layout: int, num_repeat: int, inputs: torch.dtype) -> None:
    for seed, how in enumerate(plain_numerics(inputs)):
        matches_golden(static_call(how, layout, num_repeat, bits.generator(seed)))


@pytest.mark.parametrize(
    ("layout", "num_repeat", "inputs", "bit"), pairwise([0, 1], [1, 3], bits.FLOATS, [8, 4]), ids=str
)
def test_quantized_grid(layout: int, num_repeat: int, inputs: torch.dtype, bit: int) -> None:
    for seed, how in enumerate(quantized_numerics(inputs, bit, groups=(2, 8, 16, 32))):
        matches_golden(static_call(how, layout, num_repeat, bits.generator(seed), num_new=2))


@pytest.mark.parametrize("how", [F32, INT8], ids=["plain", "int8"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"start_pos": 0, "num_new": 7},
        {"start_pos": 6, "num_new": 1},
        {"start_pos": 4, "num_new": 0},
        {"start_pos": 0, "num_new": 0},
        {"batch": 3, "max_batch": 3},
        {"batch": 1, "max_batch": 3},
        {"batch": 0},
        {"heads": 1, "head_dim": 16},
        {"heads": 3, "head_dim": 48},
    ],
    ids=str,
)
def test_edge_sizes(how: Numerics, sizes: dict[str, int]) -> None:
    for layout in (0, 1):
        matches_golden(static_call(how, layout, 2, bits.generator(layout), **sizes))


@pytest.mark.parametrize(
    "as_tensor",
    [torch.tensor, lambda p: torch.tensor([p]), lambda p: torch.tensor([[p]])],
    ids=["0-d", "1-d", "2-d"],
)
def test_start_pos_may_be_a_one_element_tensor(as_tensor: object) -> None:
    assert callable(as_tensor)
    call = static_call(F32, 0, 1, bits.generator(0))
    matches_golden(with_copies(call, start_pos=as_tensor(2)))


@pytest.mark.parametrize(
    "scale", [None, torch.empty(0), torch.full((3,), 7.0)], ids=["none", "empty", "something"]
)
def test_scale_is_left_alone_when_not_quantized(scale: torch.Tensor | None) -> None:
    matches_golden({**static_call(F32, 1, 1, bits.generator(0)), "scale": scale})


@pytest.mark.parametrize("start_pos", [0, 2])
@pytest.mark.parametrize("layer_idx", [0, 1])
def test_only_its_layer_changes(layer_idx: int, start_pos: int) -> None:
    call = with_copies(static_call(INT8, 0, 1, bits.generator(4), start_pos=start_pos), layer_idx=layer_idx)
    before = bits.snapshot(call)
    matches_golden(call)
    other = 1 - layer_idx
    bits.assert_same_bits(call["cache"][:, other], before["cache"][:, other], "cache")
    bits.assert_same_bits(call["scale"][:, other], before["scale"][:, other], "scale")


@pytest.mark.parametrize("how", [F32, INT8], ids=["plain", "int8"])
def test_roll_back_overwrites_from_there_and_keeps_what_follows(how: Numerics) -> None:
    cache = scale = None
    for seed, (start_pos, num_new) in enumerate([(0, 5), (5, 1), (2, 2), (4, 2), (0, 1)]):
        call = static_call(how, 1, 1, bits.generator(seed), start_pos=start_pos, num_new=num_new)
        if cache is not None:
            call |= {"cache": cache, "scale": scale}
        matches_golden(call)
        cache, scale = call["cache"], call["scale"]


@pytest.mark.parametrize("how", [F32, INT8], ids=["plain", "int8"])
@pytest.mark.parametrize("layout", [0, 1])
def test_outputs_are_fresh_memory(how: Numerics, layout: int) -> None:
    call = static_call(how, layout, 1, bits.generator(0), start_pos=0)
    key, value = pmx.key_value_cache(**call)
    after = bits.snapshot(call)
    key.fill_(3)
    value.fill_(5)
    bits.assert_unchanged(call, after)
    assert bool((key == 3).all())


def test_arguments_may_be_positional() -> None:
    call = static_call(INT8, 1, 3, bits.generator(0))
    expected = pmx_golden.key_value_cache(**call)
    names = (
        "current_key",
        "current_value",
        "start_pos",
        "cache",
        "scale",
        "num_layer",
        "layer_idx",
        "quant_bit",
        "quant_group",
        "num_repeat",
        "cache_layout",
    )
    key, value = pmx.key_value_cache(*(call[name] for name in names))
    bits.assert_same_bits(key, expected.key, "key")
    bits.assert_same_bits(value, expected.value, "value")
