"""PMX calls as ONNX models of one node, made with ``onnx.helper`` alone, and the grid of calls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from oracles import bits
from oracles.pairs import pairwise
from oracles.pmx_cases import (
    Call,
    Numerics,
    attention_call,
    dynamic_call,
    plain_numerics,
    quantized_numerics,
    random_batch,
    static_call,
)

ONNX_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.int64: TensorProto.INT64,
}
_BATCH = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
_KEYS = ("current_key", "current_value")
_DYNAMIC = (*_KEYS, *_BATCH, "max_seqlen", "max_kvlen", "cache", "scale")
_FUSED = (
    "query",
    *_KEYS,
    *_BATCH,
    "decoding_batches",
    "max_seqlen",
    "max_kvlen",
    "cache",
    "scale",
    "attn_mask",
)
SIGNATURES = {
    "static": ("", "KeyValueCache", (*_KEYS, "start_pos", "cache", "scale"), ("key", "value")),
    "dynamic": (".dynamic_batching", "KeyValueCache", _DYNAMIC, ("key", "value")),
    "attention": (".dynamic_batching", "MultiHeadCacheAttention", _FUSED, ("attn_output",)),
}
FORMS = [("offset", 128), ("token", 128), ("page", 1), ("page", 3), ("page", 4), ("page", 128)]


class Case(NamedTuple):
    """One call of an operator."""

    kind: str
    call: Call
    domain: str = "opmx"

    def feeds(self) -> dict[str, Tensor]:
        """The inputs that are given, copied."""
        names = SIGNATURES[self.kind][2]
        given = {name: self.call[name] for name in names if self.call.get(name) is not None}
        if self.call["quant_bit"] == 0:
            given.pop("scale", None)
        return {name: torch.as_tensor(x).clone() for name, x in given.items()}

    def attributes(self) -> dict[str, int]:
        """What is neither a tensor nor an argument of PyTorch alone."""
        names = (*SIGNATURES[self.kind][2], "spec")
        return {name: int(x) for name, x in self.call.items() if name not in names}


def model_of(case: Case, *, dynamic_axes: bool = True, opset: int = 24) -> ModelProto:
    """A model whose inputs and outputs are those of the node."""
    group, name, names, outputs = SIGNATURES[case.kind]
    feeds = case.feeds()
    inputs = [n if n in feeds else "" for n in names]
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(name, inputs, outputs, domain=case.domain + group, **case.attributes())
    infos = []
    for value, x in feeds.items():
        dims = [f"{value}_{i}" if dynamic_axes else n for i, n in enumerate(x.shape)]
        infos.append(helper.make_tensor_value_info(value, ONNX_TYPES[x.dtype], dims))
    dtype = next(iter(feeds.values())).dtype
    rank = 4 if case.kind == "static" else 3
    made = [
        helper.make_tensor_value_info(o, ONNX_TYPES[dtype], [f"{o}_{i}" for i in range(rank)])
        for o in outputs
    ]
    graph = helper.make_graph([node], "one", infos, made)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(case.domain + group, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def in_torch(case: Case, operator: Callable[..., Any]) -> dict[str, Tensor]:
    """What ``operator`` makes of copies of the call, named as the outputs and in-out inputs of the model."""
    own = {name: x.clone() if isinstance(x, Tensor) else x for name, x in case.call.items()}
    results = operator(**own)
    outputs = SIGNATURES[case.kind][3]
    made = dict(zip(outputs, results if isinstance(results, tuple) else (results,), strict=True))
    in_place = ("cache", "scale") if case.call["quant_bit"] else ("cache",)
    return made | {name: own[name] for name in in_place}


# --- the grid -----------------------------------------------------------------------------------------------

PLAIN = [how for inputs in (*bits.FLOATS, torch.int8) for how in plain_numerics(inputs)]
CODES = ((8, torch.int8), (4, torch.uint8))


def static_cases() -> Iterator[Case]:
    """Every layout, repetition, dtype and quantizer."""
    for seed, (layout, num_repeat, how) in enumerate(pairwise((0, 1), (1, 3), PLAIN)):
        yield Case("static", static_call(how, layout, num_repeat, bits.generator(seed)))
    every = pairwise((0, 1), (1, 3), bits.FLOATS, bits.FLOATS, CODES, (2, 8, 16, 32))
    for seed, (layout, num_repeat, inputs, scale, (bit, cache), group) in enumerate(every):
        how = Numerics(inputs, cache, scale, bit, group)
        yield Case("static", static_call(how, layout, num_repeat, bits.generator(seed), num_new=2))
    for how in (
        Numerics(torch.float32, torch.float32),
        Numerics(torch.float32, torch.int8, torch.float16, 8),
    ):
        for sizes in ({"start_pos": 4, "num_new": 0}, {"start_pos": 0, "num_new": 0}, {"batch": 0}):
            yield Case("static", static_call(how, 1, 1, bits.generator(0), **sizes))


def dynamic_cases() -> Iterator[Case]:
    """Every spelling of the index, layout, dtype and quantizer, then ragged shapes at their edges."""
    every = pairwise(FORMS, range(4), (1, 3), PLAIN)
    quantized = pairwise(FORMS, range(4), (1, 3), bits.FLOATS, bits.FLOATS, CODES, (2, 8, 16))
    for form, layout, num_repeat, inputs, scale, (bit, cache), group in quantized:
        every.append((form, layout, num_repeat, Numerics(inputs, cache, scale, bit, group)))
    for seed, ((form, page_size), layout, num_repeat, how) in enumerate(every):
        batch = random_batch(form, page_size, (2, 0, 1), (3, 2, 0), random.Random(seed))
        call = dynamic_call(batch, how, pmx_golden.DYNAMIC_AXES[layout], bits.generator(seed))
        yield Case("dynamic", {**call, "cache_layout": layout, "num_repeat": num_repeat})
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((), ()),
        ((0,), (0,)),
        ((0, 0, 0), (4, 0, 3)),
        ((1, 1, 1, 1), (3, 4, 7, 0)),
        ((3, 1, 6), (1, 8, 5)),
    ]
    for (seqlens, start_pos), form, bit in itertools.product(shapes, ("offset", "token", "page"), (0, 8, 4)):
        how = (
            quantized_numerics(torch.float16, bit, (8,))[0] if bit else Numerics(torch.float32, torch.float16)
        )
        batch = random_batch(form, 4, seqlens, start_pos, random.Random(7))
        yield Case("dynamic", {**dynamic_call(batch, how, "TLKHD", bits.generator(7)), "cache_layout": 0})


def attention_cases() -> Iterator[Case]:
    """Dtypes, head groups, causality, both documents' layouts, quantizers, masks, ALiBi, empty batches."""
    seqlens, start_pos = (1, 4, 3, 0, 2), (6, 0, 2, 3, 0)
    forms, specs = ("offset", "token", "page"), ("pmx", "opmx")
    for dtype, ratio, form, is_causal, more in pairwise(
        bits.FLOATS, (1, 2, 4), forms, (False, True), ({}, {"is_alibi": True})
    ):
        batch = random_batch(form, 3, seqlens, start_pos, random.Random(ratio))
        options = {"is_causal": is_causal, "decoding_batches": 1, **more}
        how = Numerics(dtype, dtype)
        yield _attention(attention_call(batch, how, bits.generator(ratio), ratio=ratio, **options))
    every = [
        (form, spec, layout, Numerics(inputs, cache))
        for form, spec, layout, inputs, cache in pairwise(forms, specs, range(4), bits.FLOATS, bits.FLOATS)
    ]
    every += [
        (form, spec, layout, Numerics(inputs, cache, scale, bit, group))
        for form, spec, layout, inputs, scale, (bit, cache), group in pairwise(
            forms, specs, range(4), bits.FLOATS, bits.FLOATS, CODES, (8, 16)
        )
    ]
    for seed, (form, spec, layout, how) in enumerate(every):
        batch = random_batch(form, 4, (1, 3, 0), (4, 1, 2), random.Random(seed))
        options = {"layout": layout, "spec": spec, "kv_heads": 3}
        yield _attention(attention_call(batch, how, bits.generator(seed), **options))
    for shape, wide in itertools.product(((10, 21), (4, 10, 21), (0,), (10, 0)), (0, 3)):
        batch = random_batch("page", 3, seqlens, start_pos, random.Random(0))
        call = attention_call(batch, Numerics(torch.float32, torch.float32), bits.generator(0), ratio=2)
        mask = torch.randn(*shape[:-1], shape[-1] + (wide if shape[-1] else 0), generator=bits.generator(1))
        mask[mask > 1.0] = float("-inf")
        yield _attention({**call, "attn_mask": mask})
    for seqlens, start_pos in (((), ()), ((0, 0), (3, 0)), ((1,), (0,))):
        batch = random_batch("offset", 3, seqlens, start_pos, random.Random(0))
        yield _attention(attention_call(batch, Numerics(torch.float32, torch.float32), bits.generator(0)))


def _attention(call: Call) -> Case:
    return Case("attention", call, call["spec"])
