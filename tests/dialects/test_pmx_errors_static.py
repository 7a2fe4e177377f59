"""``key_value_cache`` refuses bad arguments by name and writes nothing."""

from __future__ import annotations

import pytest
import torch
from oracles import bits
from oracles.pmx_cases import Call, Numerics, static_call
from oracles.rejection import Bad, assert_refused, rows

from kvloom.dialects import pmx
from kvloom.errors import KVError

INT8 = Numerics(torch.float32, torch.int8, torch.float16, bit=8)
PLAIN = {"quant_bit": 0, "scale": None}


def good_call() -> Call:
    """B 2 of 3, S 3 at 2 of 7, H 2, D 32, layer 1 of 2, int8 in groups of 8."""
    return static_call(INT8, 0, 1, bits.generator(0))


def both(call: Call, dtype: torch.dtype) -> Call:
    return {name: call[name].to(dtype) for name in ("current_key", "current_value")}


ATTRIBUTES = [
    *(Bad(f"quant_bit {n}", "quant_bit", lambda c, n=n: {"quant_bit": n}) for n in (-8, 1, 2, 3, 5, 7, 16)),
    *(
        Bad(f"quant_group {n}", "quant_group", lambda c, n=n: {"quant_group": n})
        for n in (-8, 0, 3, 5, 12, 64)
    ),
    *(Bad(f"layer_idx {n}", "layer_idx", lambda c, n=n: {"layer_idx": n}) for n in (-1, 2, 99)),
    *(Bad(f"num_layer {n}", "num_layer", lambda c, n=n: {"num_layer": n}) for n in (-1, 0)),
    *(Bad(f"num_layer {n} of 2", "num_layer|cache", lambda c, n=n: {"num_layer": n}) for n in (3, 4)),
    Bad("num_layer 1 of 2", "num_layer|cache|layer_idx", lambda c: {"num_layer": 1}),
    *(Bad(f"num_repeat {n}", "num_repeat", lambda c, n=n: {"num_repeat": n}) for n in (-1, 0)),
    *(Bad(f"cache_layout {n}", "cache_layout", lambda c, n=n: {"cache_layout": n}) for n in (-1, 2, 3, 4)),
    Bad("the other layout", "cache|cache_layout", lambda c: {"cache_layout": 1}),
]

START_POS = [
    Bad("start_pos negative", "start_pos", lambda c: {"start_pos": -1}),
    Bad("start_pos negative tensor", "start_pos", lambda c: {"start_pos": torch.tensor(-1)}),
    Bad("start_pos two elements", "start_pos", lambda c: {"start_pos": torch.tensor([1, 1])}),
    Bad("start_pos no element", "start_pos", lambda c: {"start_pos": torch.tensor([], dtype=torch.int64)}),
    Bad("start_pos float", "start_pos", lambda c: {"start_pos": 1.0}),
    Bad("start_pos float tensor", "start_pos", lambda c: {"start_pos": torch.tensor(1.0)}),
    Bad("one position too many", "start_pos|cache", lambda c: {"start_pos": 5}),
    Bad("start_pos far away", "start_pos|cache", lambda c: {"start_pos": 2**40}),
    Bad("start_pos overflows", "start_pos|cache", lambda c: {"start_pos": 2**63 - 1}),
]

CURRENT = [
    Bad("current_key of 3 axes", "current_key", lambda c: {"current_key": c["current_key"][0]}),
    Bad("current_key of 5 axes", "current_key", lambda c: {"current_key": c["current_key"][None]}),
    Bad("current_value of 3 axes", "current_value", lambda c: {"current_value": c["current_value"][0]}),
    Bad("current_value shorter batch", "current_value", lambda c: {"current_value": c["current_value"][:1]}),
    Bad("current_value shorter", "current_value", lambda c: {"current_value": c["current_value"][:, :2]}),
    Bad(
        "current_value fewer heads",
        "current_value",
        lambda c: {"current_value": c["current_value"][:, :, :1]},
    ),
    Bad("current_value narrower", "current_value", lambda c: {"current_value": c["current_value"][..., :16]}),
    Bad("current_value half", "current_value", lambda c: {"current_value": c["current_value"].half()}),
    Bad("current_value on meta", "current_value", lambda c: {"current_value": c["current_value"].to("meta")}),
    Bad(
        "batch of 4 in 3 slots",
        "current_key|cache",
        lambda c: {name: torch.cat([c[name], c[name]]) for name in ("current_key", "current_value")},
    ),
    Bad(
        "inputs with 3 heads",
        "current_key|cache",
        lambda c: {
            name: torch.cat([c[name], c[name][:, :, :1]], 2) for name in ("current_key", "current_value")
        },
    ),
    Bad(
        "inputs narrower",
        "current_key|cache",
        lambda c: {name: c[name][..., :16] for name in ("current_key", "current_value")},
    ),
    Bad("inputs float64", "current_key", lambda c: both(c, torch.float64)),
    Bad("inputs int32", "current_key", lambda c: both(c, torch.int32)),
    Bad("inputs bool", "current_key", lambda c: both(c, torch.bool)),
    Bad("inputs complex", "current_key", lambda c: both(c, torch.complex64)),
    Bad("inputs int8 with a quantizer", "current_key|quant_bit", lambda c: both(c, torch.int8)),
]

CACHE = [
    Bad("cache of 5 axes", "cache", lambda c: {"cache": c["cache"][0]}),
    Bad("cache of 7 axes", "cache", lambda c: {"cache": c["cache"][None]}),
    Bad("cache without values", "cache", lambda c: {"cache": c["cache"][:, :, :1]}),
    Bad("cache with three sides", "cache", lambda c: {"cache": c["cache"][:, :, [0, 1, 1]]}),
    Bad("cache of fewer heads", "cache|current_key", lambda c: {"cache": c["cache"][:, :, :, :, :1]}),
    Bad("cache narrower", "cache|current_key", lambda c: {"cache": c["cache"][..., :16]}),
    Bad("cache of fewer layers", "cache|num_layer", lambda c: {"cache": c["cache"][:, :1]}),
    Bad("cache float32 with a quantizer", "cache", lambda c: {"cache": c["cache"].float()}),
    Bad("cache uint8 at 8 bits", "cache", lambda c: {"cache": c["cache"].view(torch.uint8)}),
    Bad(
        "cache of 2 bits at 4 bits",
        "cache",
        lambda c: {"cache": c["cache"][..., :16].clone().view(torch.bits2x4), "quant_bit": 4},
    ),
    Bad("cache int8 at 4 bits", "cache", lambda c: {"cache": c["cache"][..., :16].clone(), "quant_bit": 4}),
    Bad(
        "cache unpacked at 4 bits", "cache", lambda c: {"cache": c["cache"].view(torch.uint8), "quant_bit": 4}
    ),
    Bad("cache float64", "cache", lambda c: {"cache": c["cache"].double(), **PLAIN}),
    Bad("cache int32", "cache", lambda c: {"cache": c["cache"].int(), **PLAIN}),
    Bad("cache int8 for float inputs", "cache|current_key|quant_bit", lambda c: PLAIN),
    Bad(
        "cache uint8 for float inputs",
        "cache|current_key|quant_bit",
        lambda c: {"cache": c["cache"].view(torch.uint8), **PLAIN},
    ),
    Bad(
        "cache float for int8 inputs",
        "cache|current_key",
        lambda c: {**both(c, torch.int8), "cache": c["cache"].float(), **PLAIN},
    ),
    Bad(
        "cache uint8 for int8 inputs",
        "cache|current_key",
        lambda c: {**both(c, torch.int8), "cache": c["cache"].view(torch.uint8), **PLAIN},
    ),
    Bad("cache on meta", "cache", lambda c: {"cache": c["cache"].to("meta")}),
    Bad("cache overlaps itself", "cache", lambda c: {"cache": c["cache"][:1].expand(3, -1, -1, -1, -1, -1)}),
    Bad(
        "cache positions overlap",
        "cache",
        lambda c: {"cache": c["cache"][:, :, :, :1].expand(3, 2, 2, 7, 2, 32)},
    ),
    Bad(
        "odd group at 4 bits",
        "quant_group",
        lambda c: {
            "cache": c["cache"][..., :16].clone().view(torch.uint8),
            "quant_bit": 4,
            "quant_group": 1,
            "scale": torch.zeros(3, 2, 2, 7, 2, 32, dtype=torch.float16),
        },
    ),
]

SCALE = [
    Bad("scale missing", "scale", lambda c: {"scale": None}),
    Bad("scale empty", "scale", lambda c: {"scale": torch.empty(0, dtype=torch.float16)}),
    Bad("scale of 5 axes", "scale", lambda c: {"scale": c["scale"][0]}),
    Bad("scale per vector", "scale", lambda c: {"scale": c["scale"][..., 0]}),
    Bad("scale for other groups", "scale|quant_group", lambda c: {"scale": c["scale"][..., :2]}),
    Bad("quant_group of another scale", "scale|quant_group", lambda c: {"quant_group": 16}),
    Bad("scale of fewer positions", "scale", lambda c: {"scale": c["scale"][:, :, :, :6]}),
    Bad("scale of fewer batch slots", "scale", lambda c: {"scale": c["scale"][:2]}),
    Bad("scale of fewer heads", "scale", lambda c: {"scale": c["scale"][:, :, :, :, :1]}),
    Bad("scale in the other layout", "scale", lambda c: {"scale": c["scale"].permute(1, 0, 2, 4, 3, 5)}),
    Bad("scale float64", "scale", lambda c: {"scale": c["scale"].double()}),
    Bad("scale int16", "scale", lambda c: {"scale": c["scale"].view(torch.int16)}),
    Bad("scale on meta", "scale", lambda c: {"scale": c["scale"].to("meta")}),
    Bad("scale overlaps itself", "scale", lambda c: {"scale": c["scale"][:1].expand(3, -1, -1, -1, -1, -1)}),
]


@rows([*ATTRIBUTES, *START_POS, *CURRENT, *CACHE, *SCALE])
def test_bad_argument_is_named_and_nothing_is_written(bad: Bad) -> None:
    assert_refused(pmx.key_value_cache, good_call(), bad, KVError)


def test_the_good_call_is_good() -> None:
    key, _ = pmx.key_value_cache(**good_call())
    assert key.shape == (2, 5, 2, 32)


@pytest.mark.parametrize("value", [1, 2, 3, 16])
def test_message_says_the_value_it_got(value: int) -> None:
    with pytest.raises(KVError, match=rf"\b{value}\b"):
        pmx.key_value_cache(**{**good_call(), "quant_bit": value})
