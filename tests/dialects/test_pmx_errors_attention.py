"""Both attention operators refuse bad arguments by name; the fused one writes nothing then."""

from __future__ import annotations

import pytest
import torch
from oracles import bits
from oracles.pmx_attention import random_unfused_call
from oracles.pmx_cases import Batch, Call, Numerics, as_tokens, attention_call
from oracles.rejection import Bad, assert_refused, rows
from torch import Tensor

from kvloom.dialects import pmx
from kvloom.errors import KVError

INT8 = Numerics(torch.float32, torch.int8, torch.float16, bit=8)
PAGES = Batch("page", (2, 1), (4, 1), ((8, 3), (0, -1)), 12, page_size=4)
FAR = 2**63 - 1


def good_call(batch: Batch = PAGES, layout: int = 0, spec: str = "pmx") -> Call:
    """3 new tokens, 8 stored ones, 6 query heads over 3, D 16, layer 1 of 2, int8 in groups of 8."""
    rng = bits.generator(0)
    return attention_call(
        batch, INT8, rng, layout=layout, spec=spec, kv_heads=3, ratio=2, attn_mask=torch.zeros(3, 8)
    )


def good_unfused_call() -> Call:
    """3 query tokens over 8 keys, 6 query heads over 3, D 16."""
    return random_unfused_call(
        torch.float32, [2, 1], [6, 2], kv_heads=3, ratio=2, attn_mask=torch.zeros(3, 8)
    )


def ints(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def cast(call: Call, dtype: torch.dtype, *names: str) -> Call:
    return {name: call[name].to(dtype) for name in names}


OF_BOTH = [
    Bad("query of 2 axes", "query", lambda c: {"query": c["query"].flatten(1)}),
    Bad("query of 4 axes", "query", lambda c: {"query": c["query"][None]}),
    Bad("query of fewer tokens", "query|seqstarts|current_key", lambda c: {"query": c["query"][:2]}),
    Bad("query of fewer heads", "query|num_heads", lambda c: {"query": c["query"][:, :4]}),
    Bad("query narrower", "query|head_dim", lambda c: {"query": c["query"][..., :8]}),
    Bad("query on meta", "query|current_key|key", lambda c: {"query": c["query"].to("meta")}),
    Bad("seqstarts begin at 1", "seqstarts", lambda c: {"seqstarts": ints(1, 2, 3)}),
    Bad("seqstarts decrease", "seqstarts", lambda c: {"seqstarts": ints(0, 4, 3)}),
    Bad("seqstarts end early", "seqstarts|query|current_key", lambda c: {"seqstarts": ints(0, 1, 2)}),
    Bad("seqstarts float", "seqstarts", lambda c: {"seqstarts": c["seqstarts"].float()}),
    Bad(
        "seqstarts of another batch",
        "seqstarts|kvstarts|start_pos",
        lambda c: {"seqstarts": ints(0, 2, 3, 3)},
    ),
    Bad("kvstarts begin at 1", "kvstarts", lambda c: {"kvstarts": ints(1, 7, 9)}),
    Bad("kvstarts decrease", "kvstarts", lambda c: {"kvstarts": ints(0, 9, 8)}),
    Bad("kvstarts float", "kvstarts", lambda c: {"kvstarts": c["kvstarts"].float()}),
    Bad("kvstarts of another batch", "kvstarts|seqstarts|start_pos", lambda c: {"kvstarts": ints(0, 8)}),
    *(Bad(f"num_heads {n}", "num_heads|query", lambda c, n=n: {"num_heads": n}) for n in (-6, 0, 3, 5, 12)),
    *(
        Bad(f"num_kv_heads {n}", "num_kv_heads|num_heads", lambda c, n=n: {"num_kv_heads": n})
        for n in (-3, 4, 5)
    ),
    *(Bad(f"head_dim {n}", "head_dim|query", lambda c, n=n: {"head_dim": n}) for n in (-16, 0, 8, 32)),
    *(
        Bad(f"decoding_batches {n}", "decoding_batches", lambda c, n=n: {"decoding_batches": n})
        for n in (-1, 3, 99)
    ),
    Bad("decoding_batches two elements", "decoding_batches", lambda c: {"decoding_batches": ints(0, 1)}),
    Bad("decoding_batches float", "decoding_batches", lambda c: {"decoding_batches": torch.tensor(1.0)}),
    Bad("mask of 1 axis", "attn_mask", lambda c: {"attn_mask": torch.zeros(24)}),
    Bad("mask of 4 axes", "attn_mask", lambda c: {"attn_mask": torch.zeros(1, 6, 3, 8)}),
    Bad("mask of fewer rows", "attn_mask", lambda c: {"attn_mask": torch.zeros(2, 8)}),
    Bad("mask of more rows", "attn_mask", lambda c: {"attn_mask": torch.zeros(4, 8)}),
    Bad("mask of fewer columns", "attn_mask", lambda c: {"attn_mask": torch.zeros(3, 7)}),
    Bad("mask of kv heads", "attn_mask", lambda c: {"attn_mask": torch.zeros(3, 3, 8)}),
    Bad("mask of one head", "attn_mask", lambda c: {"attn_mask": torch.zeros(1, 3, 8)}),
    Bad("mask per head of fewer columns", "attn_mask", lambda c: {"attn_mask": torch.zeros(6, 3, 7)}),
    Bad("mask bool", "attn_mask", lambda c: {"attn_mask": torch.ones(3, 8, dtype=torch.bool)}),
    Bad("mask int64", "attn_mask", lambda c: {"attn_mask": ints(*[[0] * 8] * 3)}),
    Bad("mask float64", "attn_mask", lambda c: {"attn_mask": torch.zeros(3, 8, dtype=torch.float64)}),
    Bad("mask on meta", "attn_mask", lambda c: {"attn_mask": torch.zeros(3, 8, device="meta")}),
]

INPUTS = ("query", "current_key", "current_value")

OF_FUSED = [
    Bad("query half", "query|current_key", lambda c: cast(c, torch.float16, "query")),
    Bad(
        "inputs int8",
        "query|current_key",
        lambda c: {**cast(c, torch.int8, *INPUTS), "quant_bit": 0, "scale": None, "attn_mask": None},
    ),
    Bad(
        "inputs float64",
        "query|current_key",
        lambda c: {**cast(c, torch.float64, *INPUTS), "attn_mask": None},
    ),
    Bad("current_key of 4 axes", "current_key", lambda c: {"current_key": c["current_key"][None]}),
    Bad("current_value shorter", "current_value", lambda c: {"current_value": c["current_value"][:2]}),
    Bad("current_value half", "current_value", lambda c: cast(c, torch.float16, "current_value")),
    Bad(
        "inputs of fewer tokens",
        "current_key|current_value|seqstarts",
        lambda c: {name: c[name][:2] for name in ("current_key", "current_value")},
    ),
    Bad(
        "inputs of fewer heads",
        "current_key|num_kv_heads",
        lambda c: {name: c[name][:, :2] for name in ("current_key", "current_value")},
    ),
    Bad(
        "inputs narrower",
        "current_key|head_dim",
        lambda c: {name: c[name][..., :8] for name in ("current_key", "current_value")},
    ),
    *(Bad(f"spec {s!r}", "spec", lambda c, s=s: {"spec": s}) for s in ("", "PMX", "onnx", "pmx2")),
    *(Bad(f"cache_layout {n}", "cache_layout", lambda c, n=n: {"cache_layout": n}) for n in (-1, 4)),
    *(Bad(f"cache_mode {n}", "cache_mode", lambda c, n=n: {"cache_mode": n}) for n in (-1, 2)),
    *(Bad(f"page_size {n}", "page_size", lambda c, n=n: {"page_size": n}) for n in (-1, 0)),
    *(Bad(f"quant_bit {n}", "quant_bit", lambda c, n=n: {"quant_bit": n}) for n in (2, 16)),
    *(Bad(f"quant_group {n}", "quant_group", lambda c, n=n: {"quant_group": n}) for n in (0, 7)),
    *(Bad(f"layer_idx {n}", "layer_idx", lambda c, n=n: {"layer_idx": n}) for n in (-1, 2)),
    Bad("num_layer of another cache", "num_layer|cache", lambda c: {"num_layer": 5}),
    Bad("kvlen not start_pos and seqlen", "kvstarts|start_pos", lambda c: {"kvstarts": ints(0, 5, 8)}),
    Bad("start_pos negative", "start_pos|kvstarts", lambda c: {"start_pos": ints(-1, 1)}),
    Bad("page in use is padding", "cachestarts", lambda c: {"cachestarts": ints([8, -1], [0, -1])}),
    Bad("page in use is INT64_MAX", "cachestarts", lambda c: {"cachestarts": ints([FAR, 3], [0, -1])}),
    Bad("page beyond the pool", "cachestarts|cache", lambda c: {"cachestarts": ints([9, 3], [0, -1])}),
    Bad("page table too narrow", "cachestarts", lambda c: {"cachestarts": ints([8], [0])}),
    Bad("token table too short", "cachestarts", lambda c: {"cachestarts": ints(*range(7))}),
    Bad("token table beyond the pool", "cachestarts|cache", lambda c: {"cachestarts": ints(*range(7), 12)}),
    Bad("page table in offset mode", "cachestarts|cache_mode", lambda c: {"cache_mode": 0}),
    Bad(
        "cache of fewer heads", "cache|num_kv_heads|current_key", lambda c: {"cache": c["cache"][:, :, :, :2]}
    ),
    Bad("cache float32 with a quantizer", "cache", lambda c: {"cache": c["cache"].float()}),
    Bad("cache on meta", "cache", lambda c: {"cache": c["cache"].to("meta")}),
    Bad("scale missing", "scale", lambda c: {"scale": None}),
    Bad("scale of other groups", "scale|quant_group", lambda c: {"scale": c["scale"][..., :1]}),
]

OF_UNFUSED = [
    Bad("key of 4 axes", "key", lambda c: {"key": c["key"][None]}),
    Bad("key of fewer tokens", "key|kvstarts", lambda c: {"key": c["key"][:7], "value": c["value"][:7]}),
    Bad(
        "key and value of fewer heads",
        "key|num_kv_heads",
        lambda c: {"key": c["key"][:, :2], "value": c["value"][:, :2]},
    ),
    Bad("key narrower", "key|head_dim", lambda c: {"key": c["key"][..., :8]}),
    Bad("value of fewer tokens", "value|kvstarts", lambda c: {"value": c["value"][:7]}),
    Bad("value of fewer heads", "value|num_kv_heads", lambda c: {"value": c["value"][:, :2]}),
    Bad("value half", "value", lambda c: cast(c, torch.float16, "value")),
    Bad("query half", "query|key", lambda c: cast(c, torch.float16, "query")),
    Bad("value on meta", "value", lambda c: {"value": c["value"].to("meta")}),
    Bad("kvstarts end beyond the keys", "kvstarts|key", lambda c: {"kvstarts": ints(0, 6, 9)}),
    Bad(
        "everything int8",
        "query|key",
        lambda c: {**cast(c, torch.int8, "query", "key", "value"), "attn_mask": None},
    ),
]


@rows([*OF_BOTH, *OF_FUSED])
def test_fused_names_the_bad_argument_and_writes_nothing(bad: Bad) -> None:
    assert_refused(pmx.dynamic_batching.multi_head_cache_attention, good_call(), bad, KVError)


@rows([*OF_BOTH, *OF_UNFUSED])
def test_unfused_names_the_bad_argument(bad: Bad) -> None:
    assert_refused(pmx.dynamic_batching.multi_head_attention, good_unfused_call(), bad, KVError)


@pytest.mark.parametrize("spec", ["pmx", "opmx"])
def test_cache_in_layout_two_of_the_other_document_is_refused(spec: str) -> None:
    other = "opmx" if spec == "pmx" else "pmx"
    bad = Bad("spec", "cache|scale", lambda call: {"spec": other})
    assert_refused(pmx.dynamic_batching.multi_head_cache_attention, good_call(PAGES, 2, spec), bad, KVError)


@pytest.mark.parametrize("batch", [PAGES, as_tokens(PAGES)], ids=lambda batch: batch.form)
def test_the_good_calls_are_good(batch: Batch) -> None:
    assert pmx.dynamic_batching.multi_head_cache_attention(**good_call(batch)).shape == (3, 6, 16)
    assert pmx.dynamic_batching.multi_head_attention(**good_unfused_call()).shape == (3, 6, 16)
