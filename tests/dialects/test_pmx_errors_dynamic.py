"""``dynamic_batching.key_value_cache`` refuses bad arguments by name and writes nothing."""

from __future__ import annotations

import pytest
import torch
from oracles import bits
from oracles.pmx_cases import Batch, Call, Numerics, as_tokens, dynamic_call
from oracles.rejection import Bad, assert_refused, rows
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import pmx
from kvloom.errors import KVError

INT8 = Numerics(torch.float32, torch.int8, torch.float16, bit=8)
PLAIN = {"quant_bit": 0, "scale": None}
PAGES = Batch("page", (2, 1), (4, 1), ((8, 3), (0, -1)), 12, page_size=4)
OFFSETS = Batch("offset", (2, 1), (4, 1), (6, 0), 12)
FAR = 2**63 - 1


def good_call(batch: Batch = PAGES, layout: int = 0) -> Call:
    """Two entries: 2 tokens after 4, 1 after 1; 12 slots, H 2, D 16, layer 1 of 2, int8 in groups of 8."""
    call = dynamic_call(batch, INT8, pmx_golden.DYNAMIC_AXES[layout], bits.generator(0))
    return {**call, "cache_layout": layout}


def ints(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def both(call: Call, dtype: torch.dtype) -> Call:
    return {name: call[name].to(dtype) for name in ("current_key", "current_value")}


def bad(what: str, names: str, name: str, *values: object) -> Bad:
    """Replace one index tensor."""
    return Bad(f"{name} {what}", names, lambda call: {name: ints(*values)})


INDEX_TENSORS = ("seqstarts", "kvstarts", "cachestarts", "start_pos")

OF_EVERY_INDEX = [
    row
    for name in INDEX_TENSORS
    for row in (
        Bad(f"{name} float", name, lambda c, name=name: {name: c[name].float()}),
        Bad(f"{name} bool", name, lambda c, name=name: {name: c[name].bool()}),
        Bad(f"{name} 0-d", name, lambda c, name=name: {name: torch.tensor(0)}),
        Bad(f"{name} too many axes", name, lambda c, name=name: {name: c[name][None]}),
        Bad(f"{name} on meta", name, lambda c, name=name: {name: c[name].to("meta")}),
    )
]

STARTS = [
    bad("begin at 1", "seqstarts", "seqstarts", 1, 2, 3),
    bad("decrease", "seqstarts", "seqstarts", 0, 4, 3),
    bad("negative", "seqstarts", "seqstarts", 0, -1, 3),
    bad("end before the inputs", "seqstarts|current_key", "seqstarts", 0, 1, 2),
    bad("end beyond the inputs", "seqstarts|current_key", "seqstarts", 0, 2, 4),
    bad("one entry more", "seqstarts|kvstarts|start_pos", "seqstarts", 0, 2, 3, 3),
    bad("one entry fewer", "seqstarts|kvstarts|start_pos|cachestarts", "seqstarts", 0, 3),
    bad("empty", "seqstarts", "seqstarts"),
    bad("begin at 1", "kvstarts", "kvstarts", 1, 7, 9),
    bad("decrease", "kvstarts", "kvstarts", 0, 9, 8),
    bad("longer than start_pos and new tokens", "kvstarts|start_pos", "kvstarts", 0, 6, 9),
    bad("shorter than start_pos and new tokens", "kvstarts|start_pos", "kvstarts", 0, 5, 7),
    bad("share tokens otherwise", "kvstarts|start_pos", "kvstarts", 0, 5, 8),
    bad("one entry more", "kvstarts|seqstarts|start_pos", "kvstarts", 0, 6, 8, 8),
    bad("one entry fewer", "kvstarts|seqstarts|start_pos", "kvstarts", 0, 8),
    bad("negative", "start_pos|kvstarts", "start_pos", -1, 1),
    bad("too small", "start_pos|kvstarts", "start_pos", 3, 1),
    bad("too large", "start_pos|kvstarts", "start_pos", 4, 2),
    bad("one entry more", "start_pos|seqstarts|kvstarts|cachestarts", "start_pos", 4, 1, 0),
    bad("one entry fewer", "start_pos|seqstarts|kvstarts|cachestarts", "start_pos", 4),
    bad("overflow", "start_pos|kvstarts", "start_pos", FAR, 1),
    Bad(
        "negative start_pos that adds up",
        "start_pos",
        lambda c: {"start_pos": ints(4, -1), "kvstarts": ints(0, 6, 6)},
    ),
]

PAGE_TABLE = [
    bad("page -1 in use", "cachestarts", "cachestarts", [8, -1], [0, -1]),
    bad("page INT64_MAX in use", "cachestarts", "cachestarts", [8, FAR], [0, -1]),
    bad("page beyond the pool", "cachestarts|cache", "cachestarts", [12, 3], [0, -1]),
    bad("page ends beyond the pool", "cachestarts|cache", "cachestarts", [9, 3], [0, -1]),
    bad("last token beyond the pool", "cachestarts|cache", "cachestarts", [8, 11], [0, -1]),
    bad("of another batch", "cachestarts", "cachestarts", [8, 3]),
    bad("row too many", "cachestarts", "cachestarts", [8, 3], [0, -1], [0, -1]),
    bad("too narrow", "cachestarts", "cachestarts", [8], [0]),
    bad("without columns", "cachestarts", "cachestarts", [], []),
    bad("token table too short", "cachestarts", "cachestarts", *range(7)),
    bad("token table with -1", "cachestarts", "cachestarts", 0, 1, 2, 3, 4, 5, -1, 7),
    bad("token table beyond the pool", "cachestarts|cache", "cachestarts", 0, 1, 2, 3, 4, 5, 6, 12),
    bad("token table INT64_MAX", "cachestarts|cache", "cachestarts", FAR, 1, 2, 3, 4, 5, 6, 7),
    Bad(
        "cachestarts wrong only where history is read",
        "cachestarts",
        lambda c: {"cachestarts": ints([-3, 3], [0, -1])},
    ),
    Bad(
        "cachestarts wrong for an entry without new tokens",
        "cachestarts",
        lambda c: {
            "cachestarts": ints([8, 3], [12, -1]),
            "start_pos": ints(3, 2),
            "seqstarts": ints(0, 3, 3),
        },
    ),
    *(Bad(f"page_size {n}", "page_size", lambda c, n=n: {"page_size": n}) for n in (-4, 0)),
]

OFFSET = [
    bad("offset negative", "cachestarts", "cachestarts", -1, 0),
    bad("offset beyond the pool", "cachestarts|cache", "cachestarts", 7, 0),
    bad("offset INT64_MAX", "cachestarts|cache", "cachestarts", FAR, 0),
    bad("offset that wraps to a slot", "cachestarts|cache", "cachestarts", FAR - 2, 0),
    bad("offset INT64_MIN", "cachestarts|cache", "cachestarts", -FAR - 1, 0),
    bad("one offset more", "cachestarts", "cachestarts", 6, 0, 0),
    bad("one offset fewer", "cachestarts", "cachestarts", 6),
    bad("page table in offset mode", "cachestarts|cache_mode", "cachestarts", [6], [0]),
]

ATTRIBUTES = [
    *(Bad(f"cache_mode {n}", "cache_mode", lambda c, n=n: {"cache_mode": n}) for n in (-1, 2, 3)),
    *(Bad(f"cache_layout {n}", "cache_layout", lambda c, n=n: {"cache_layout": n}) for n in (-1, 4, 5)),
    *(Bad(f"quant_bit {n}", "quant_bit", lambda c, n=n: {"quant_bit": n}) for n in (-4, 1, 2, 6, 9)),
    *(Bad(f"quant_group {n}", "quant_group", lambda c, n=n: {"quant_group": n}) for n in (-1, 0, 7, 32)),
    *(Bad(f"layer_idx {n}", "layer_idx", lambda c, n=n: {"layer_idx": n}) for n in (-1, 2)),
    *(Bad(f"num_layer {n}", "num_layer", lambda c, n=n: {"num_layer": n}) for n in (-2, 0)),
    Bad("num_layer of another cache", "num_layer|cache", lambda c: {"num_layer": 3}),
    *(Bad(f"num_repeat {n}", "num_repeat", lambda c, n=n: {"num_repeat": n}) for n in (-1, 0)),
]

TENSORS = [
    Bad("current_key of 4 axes", "current_key", lambda c: {"current_key": c["current_key"][None]}),
    Bad("current_value shorter", "current_value", lambda c: {"current_value": c["current_value"][:2]}),
    Bad("current_value fewer heads", "current_value", lambda c: {"current_value": c["current_value"][:, :1]}),
    Bad("current_value narrower", "current_value", lambda c: {"current_value": c["current_value"][..., :8]}),
    Bad(
        "current_value bfloat16", "current_value", lambda c: {"current_value": c["current_value"].bfloat16()}
    ),
    Bad("current_value on meta", "current_value", lambda c: {"current_value": c["current_value"].to("meta")}),
    Bad("inputs float64", "current_key", lambda c: both(c, torch.float64)),
    Bad("inputs int64", "current_key", lambda c: both(c, torch.int64)),
    Bad("inputs int8 with a quantizer", "current_key|quant_bit", lambda c: both(c, torch.int8)),
    Bad("cache of 4 axes", "cache", lambda c: {"cache": c["cache"][:, 0]}),
    Bad("cache without values", "cache", lambda c: {"cache": c["cache"][:, :, :1]}),
    Bad("cache of fewer heads", "cache|current_key", lambda c: {"cache": c["cache"][:, :, :, :1]}),
    Bad("cache narrower", "cache|current_key", lambda c: {"cache": c["cache"][..., :8]}),
    Bad("cache of fewer layers", "cache|num_layer", lambda c: {"cache": c["cache"][:, :1]}),
    Bad(
        "cache of fewer slots than in use",
        "cache|cachestarts",
        lambda c: {"cache": c["cache"][:11], "scale": c["scale"][:11]},
    ),
    Bad("cache float32 with a quantizer", "cache", lambda c: {"cache": c["cache"].float()}),
    Bad("cache uint8 at 8 bits", "cache", lambda c: {"cache": c["cache"].view(torch.uint8)}),
    Bad("cache int8 at 4 bits", "cache", lambda c: {"cache": c["cache"][..., :8].clone(), "quant_bit": 4}),
    Bad("cache int8 for float inputs", "cache|current_key|quant_bit", lambda c: PLAIN),
    Bad(
        "cache float for int8 inputs",
        "cache|current_key",
        lambda c: {**both(c, torch.int8), "cache": c["cache"].float(), **PLAIN},
    ),
    Bad("cache on meta", "cache", lambda c: {"cache": c["cache"].to("meta")}),
    Bad("cache slots overlap", "cache", lambda c: {"cache": c["cache"][:1].expand(12, -1, -1, -1, -1)}),
    Bad("scale missing", "scale", lambda c: {"scale": None}),
    Bad("scale empty", "scale", lambda c: {"scale": torch.empty(0)}),
    Bad("scale of fewer slots", "scale", lambda c: {"scale": c["scale"][:11]}),
    Bad("scale of other groups", "scale|quant_group", lambda c: {"scale": c["scale"][..., :1]}),
    Bad("scale float64", "scale", lambda c: {"scale": c["scale"].double()}),
    Bad("scale on meta", "scale", lambda c: {"scale": c["scale"].to("meta")}),
    Bad("scale slots overlap", "scale", lambda c: {"scale": c["scale"][:1].expand(12, -1, -1, -1, -1)}),
]


@rows([*OF_EVERY_INDEX, *STARTS, *PAGE_TABLE, *ATTRIBUTES, *TENSORS])
def test_bad_argument_is_named_and_nothing_is_written(bad: Bad) -> None:
    assert_refused(pmx.dynamic_batching.key_value_cache, good_call(), bad, KVError)


@rows(OFFSET)
def test_bad_offset_is_named_and_nothing_is_written(bad: Bad) -> None:
    assert_refused(pmx.dynamic_batching.key_value_cache, good_call(OFFSETS), bad, KVError)


@pytest.mark.parametrize("layout", [0, 1, 2, 3])
@pytest.mark.parametrize("batch", [PAGES, OFFSETS, as_tokens(PAGES)], ids=lambda batch: batch.form)
def test_the_good_call_is_good(batch: Batch, layout: int) -> None:
    key, _ = pmx.dynamic_batching.key_value_cache(**good_call(batch, layout))
    assert key.shape == (8, 2, 16)
