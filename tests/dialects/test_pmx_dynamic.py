"""``dynamic_batching.key_value_cache``: bit-equal to the golden over modes, layouts and dtypes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from oracles import bits
from oracles.pairs import pairwise
from oracles.pmx_cases import (
    Call,
    Numerics,
    assert_matches_golden,
    dynamic_call,
    plain_numerics,
    quantized_numerics,
    random_batch,
    with_copies,
)

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import pmx

FORMS = [("offset", 128), ("token", 128), ("page", 1), ("page", 3), ("page", 4), ("page", 128)]
SEQLENS, START_POS = (2, 0, 1), (3, 2, 0)


def matches_golden(call: Call) -> pmx_golden.Stored:
    operator = pmx.dynamic_batching.key_value_cache
    return assert_matches_golden(operator, pmx_golden.dynamic_key_value_cache, call)


def grid_call(form: str, page_size: int, layout: int, how: Numerics, num_repeat: int, seed: int) -> Call:
    batch = random_batch(form, page_size, SEQLENS, START_POS, random.Random(seed))
    call = dynamic_call(batch, how, pmx_golden.DYNAMIC_AXES[layout], bits.generator(seed))
    return {**call, "cache_layout": layout, "num_repeat": num_repeat}


@pytest.mark.parametrize(("form", "page_size"), FORMS)
@pytest.mark.parametrize("layout", [0, 1, 2, 3])
@pytest.mark.parametrize("inputs", [*bits.FLOATS, torch.int8])
def test_unquantized_grid(form: str, page_size: int, layout: int, inputs: torch.dtype) -> None:
    for seed, how in enumerate(plain_numerics(inputs)):
        matches_golden(grid_call(form, page_size, layout, how, 1 + 2 * (seed % 2), seed))


@pytest.mark.parametrize(("paging", "layout", "bit"), pairwise(FORMS, [0, 1, 2, 3], [8, 4]), ids=str)
def test_quantized_grid(paging: tuple[str, int], layout: int, bit: int) -> None:
    groups = itertools.cycle([(8,), (16,), (2,)])
    for inputs in bits.FLOATS:
        for seed, how in enumerate(quantized_numerics(inputs, bit, next(groups))):
            matches_golden(grid_call(*paging, layout, how, 1 + 2 * (seed % 2), seed))


@pytest.mark.parametrize("bit", [0, 8, 4])
@pytest.mark.parametrize(("form", "page_size"), [("offset", 1), ("token", 1), ("page", 4)])
@pytest.mark.parametrize(
    ("seqlens", "start_pos"),
    [
        ((), ()),
        ((0,), (0,)),
        ((0, 0, 0), (4, 0, 3)),
        ((1,), (0,)),
        ((4, 8, 5), (0, 0, 0)),
        ((1, 1, 1, 1), (3, 4, 7, 0)),
        ((3, 1, 6), (1, 8, 5)),
    ],
    ids=["no entries", "empty entry", "history only", "one token", "prefill", "decode", "chunks"],
)
def test_ragged_shapes(bit: int, form: str, page_size: int, seqlens: tuple, start_pos: tuple) -> None:
    how = quantized_numerics(torch.float16, bit, (8,))[0] if bit else Numerics(torch.float32, torch.float16)
    batch = random_batch(form, page_size, seqlens, start_pos, random.Random(7))
    matches_golden(dynamic_call(batch, how, "TLKHD", bits.generator(7)))


@pytest.mark.parametrize("hint", [0, 1, 3, 10**6, 2**40], ids=str)
@pytest.mark.parametrize(
    "as_tensor", [int, torch.tensor, lambda x: torch.tensor([x])], ids=["int", "0-d", "1-d"]
)
def test_length_hints_do_not_change_results(hint: int, as_tensor: object) -> None:
    assert callable(as_tensor)
    call = grid_call("page", 3, 3, Numerics(torch.float32, torch.float32), 1, seed=2)
    matches_golden(with_copies(call, max_seqlen=as_tensor(hint), max_kvlen=as_tensor(hint)))


@pytest.mark.parametrize(
    "scale", [None, torch.empty(0), torch.full((3,), 7.0)], ids=["none", "empty", "something"]
)
def test_scale_is_left_alone_when_not_quantized(scale: torch.Tensor | None) -> None:
    call = grid_call("offset", 1, 0, Numerics(torch.float16, torch.float16), 1, seed=3)
    matches_golden({**call, "scale": scale})


@pytest.mark.parametrize("layer_idx", [0, 1])
@pytest.mark.parametrize("layout", [0, 1, 2, 3])
def test_only_its_layer_changes(layer_idx: int, layout: int) -> None:
    how = Numerics(torch.float16, torch.int8, torch.float16, bit=8)
    call = with_copies(grid_call("page", 3, layout, how, 1, seed=4), layer_idx=layer_idx)
    axis = pmx_golden.DYNAMIC_AXES[layout].index("L")
    call["scale"].fill_(0.25)
    before = bits.snapshot(call)
    matches_golden(call)
    for name in ("cache", "scale"):
        now, old = (x.select(axis, 1 - layer_idx) for x in (call[name], before[name]))
        bits.assert_same_bits(now, old, name)


def test_outputs_are_fresh_memory() -> None:
    call = grid_call("offset", 1, 2, Numerics(torch.float32, torch.float32), 1, seed=5)
    key, value = pmx.dynamic_batching.key_value_cache(**call)
    after = bits.snapshot(call)
    key.fill_(3)
    value.fill_(5)
    bits.assert_unchanged(call, after)
    assert bool((key == 3).all())


def test_arguments_may_be_positional() -> None:
    call = grid_call("page", 4, 3, Numerics(torch.float32, torch.int8, torch.float16, bit=8), 3, seed=6)
    expected = pmx_golden.dynamic_key_value_cache(**call)
    names = (
        "current_key",
        "current_value",
        "seqstarts",
        "kvstarts",
        "cachestarts",
        "start_pos",
        "max_seqlen",
        "max_kvlen",
        "cache",
        "scale",
        "num_layer",
        "layer_idx",
        "quant_bit",
        "quant_group",
        "num_repeat",
        "cache_mode",
        "cache_layout",
        "page_size",
    )
    key, value = pmx.dynamic_batching.key_value_cache(*(call[name] for name in names))
    bits.assert_same_bits(key, expected.key, "key")
    bits.assert_same_bits(value, expected.value, "value")
