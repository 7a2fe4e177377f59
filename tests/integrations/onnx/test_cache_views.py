"""Caches that ONNX Runtime's own operators write and read, read and written by kvloom: an oracle not ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime", reason="runs models")

import onnxruntime as ort
from onnx import TensorProto, helper
from oracles import bits
from torch import Tensor

from kvloom import ops
from kvloom.errors import ArgumentError, ShapeError
from kvloom.integrations import onnx as kvonnx

B, HEADS, KV_HEADS, M, D = 3, 4, 2, 12, 8
TYPES = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.int8: TensorProto.INT8}


def session(nodes: list[Any], inputs: dict[str, tuple[int, int]], outputs: dict[str, tuple[int, int]]) -> Any:
    """A session over values of the given types and ranks."""
    infos = [
        [helper.make_tensor_value_info(n, t, [f"{n}{i}" for i in range(rank)]) for n, (t, rank) in x.items()]
        for x in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "other", *infos)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(of: Any, feeds: dict[str, Tensor]) -> list[Tensor]:
    return [torch.from_numpy(x) for x in of.run(None, {name: x.numpy() for name, x in feeds.items()})]


def tensor_scatter(dtype: torch.dtype, rank: int, mode: str) -> Any:
    t = TYPES[dtype]
    node = helper.make_node(
        "TensorScatter", ["past", "new", "at"], ["present"], axis=2 if rank == 4 else 1, mode=mode
    )
    return session(
        [node], {"past": (t, rank), "new": (t, rank), "at": (TensorProto.INT64, 1)}, {"present": (t, rank)}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("rank", [4, 3])
@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_store_writes_what_tensor_scatter_writes(dtype: torch.dtype, rank: int, mode: str) -> None:
    count = 4
    at = torch.tensor([0, 5, 10] if mode == "circular" else [0, 5, 8])
    past, new = bits.poison((B, KV_HEADS, M, D), dtype, bits.generator(0)), torch.randn(B, count, KV_HEADS, D)
    new = (new * 20).to(dtype)
    if rank == 4:
        theirs = new.transpose(1, 2).contiguous()
    else:
        past, theirs = past.view(B, M, KV_HEADS * D), new.flatten(2)
    (present,) = run(tensor_scatter(dtype, rank, mode), {"past": past, "new": theirs, "at": at})
    mine = past.clone()
    kv = kvonnx.standard_cache(mine, mine.clone(), heads=KV_HEADS)
    flat = new.flatten(0, 1)
    ops.store(flat, flat, kvonnx.write_slots(kv, at, count, mode=mode), kv)
    bits.assert_same_bits(mine, present, "present")


@pytest.mark.parametrize(("count", "lengths"), [(1, (3, 12, 1)), (5, (5, 5, 5))])
def test_attend_gives_what_attention_gives(count: int, lengths: tuple[int, ...]) -> None:
    inputs = dict.fromkeys(("q", "k", "v"), (TensorProto.FLOAT, 4)) | {"n": (TensorProto.INT64, 1)}
    causal = int(count > 1)
    node = helper.make_node("Attention", ["q", "k", "v", "", "", "", "n"], ["y"], is_causal=causal)
    of = session([node], inputs, {"y": (TensorProto.FLOAT, 4)})
    q, (k, v) = torch.randn(B, HEADS, count, D), torch.randn(2, B, KV_HEADS, M, D)
    if causal:  # the operator aligns to the first key; rows of one length have their queries last
        k, v = k[:, :, :count].contiguous(), v[:, :, :count].contiguous()
    stored = torch.tensor(lengths)
    (expected,) = run(of, {"q": q, "k": k, "v": v, "n": stored})
    kv = kvonnx.standard_cache(k, v)
    out = ops.attend(q.transpose(1, 2).flatten(0, 1), kv, kvonnx.row_batch(kv, count, stored))
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(0, 1), atol=1e-5, rtol=1e-5)


def group_query(cache: int, **attributes: Any) -> Any:
    names = ["q", "k", "v", "past_k", "past_v", "seqlens", "total"]
    inputs = dict.fromkeys(names[:3], (TensorProto.FLOAT, 3)) | dict.fromkeys(names[3:5], (cache, 4))
    inputs |= {"seqlens": (TensorProto.INT32, 1), "total": (TensorProto.INT32, 0)}
    if attributes:
        names += ["", "", "", "", "", "k_scale", "v_scale"]
        inputs |= {name: (TensorProto.FLOAT, attributes.pop("rank")) for name in ("k_scale",)}
        inputs["v_scale"] = inputs["k_scale"]
    outputs = ["y", "present_k", "present_v"]
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        outputs,
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        **attributes,
    )
    return session(
        [node], inputs, {"y": (TensorProto.FLOAT, 3), "present_k": (cache, 4), "present_v": (cache, 4)}
    )


def step(count: int) -> dict[str, Tensor]:
    return {
        "q": torch.randn(B, count, HEADS * D),
        "k": torch.randn(B, count, KV_HEADS * D),
        "v": torch.randn(B, count, KV_HEADS * D),
    }


def test_group_query_attention_writes_and_reads_what_kvloom_does() -> None:
    of = group_query(TensorProto.FLOAT)
    past = [torch.zeros(B, KV_HEADS, M, D) for _ in range(2)]
    mine = [x.clone() for x in past]
    kv = kvonnx.group_query_cache(*mine)
    done = torch.zeros(B, dtype=torch.int64)
    for count in (5, 1, 1):
        new, total = step(count), done + count
        sizes = {"seqlens": (total - 1).int(), "total": total.max().int()}
        out, *past = run(of, {**new, "past_k": past[0], "past_v": past[1], **sizes})
        rows = [new[name].view(B * count, -1, D) for name in ("q", "k", "v")]
        ops.store(rows[1], rows[2], kvonnx.write_slots(kv, done, count), kv)
        result = ops.attend(rows[0], kv, kvonnx.row_batch(kv, count, total))
        torch.testing.assert_close(result, out.view(B * count, HEADS, D), atol=1e-5, rtol=1e-5)
        for cache, expected in zip(mine, past, strict=True):
            bits.assert_same_bits(cache, expected, "present")
        done = total


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("kind", ["PER_TENSOR", "PER_CHANNEL"])
def test_quantized_group_query_caches_are_read(width: int, kind: str) -> None:
    per_channel = kind == "PER_CHANNEL"
    options = {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": width}
    dtype, stored = (TensorProto.INT8, D) if width == 8 else (TensorProto.UINT8, D // 2)
    of = group_query(dtype, rank=4 if per_channel else 1, **options)
    qmax = 127 if width == 8 else 7
    shape = (1, KV_HEADS, 1, D) if per_channel else (1,)
    scales = [(torch.rand(shape, generator=bits.generator(i)) + 3.0) / qmax for i in range(2)]
    past = [
        torch.zeros(B, KV_HEADS, M, stored, dtype=torch.int8 if width == 8 else torch.uint8) for _ in "kv"
    ]
    done = torch.zeros(B, dtype=torch.int64)
    everything = []
    for count in (4, 1):
        new, total = step(count), done + count
        feeds = {
            **new,
            "past_k": past[0],
            "past_v": past[1],
            "seqlens": (total - 1).int(),
            "total": total.max().int(),
        }
        out, *past = run(of, {**feeds, "k_scale": scales[0], "v_scale": scales[1]})
        everything.append([new[name].view(B, count, KV_HEADS, D) for name in ("k", "v")])
        kv = kvonnx.group_query_cache(*past, *scales)
        result = ops.attend(new["q"].view(B * count, HEADS, D), kv, kvonnx.row_batch(kv, count, total))
        torch.testing.assert_close(result, out.view(B * count, HEADS, D), atol=2e-2, rtol=2e-2)
        done = total
    rows = kvonnx.write_slots(kv, torch.zeros(B, dtype=torch.int64), int(done[0]))
    loaded = ops.load(rows, kv, dtype=torch.float32)
    for side, (have, scale) in enumerate(zip(loaded, scales, strict=True)):
        original = torch.cat([x[side] for x in everything], dim=1).flatten(0, 1)
        step_size = scale.view(KV_HEADS, D) if per_channel else scale
        error = (have - original.clamp(-qmax * step_size, qmax * step_size)).abs()
        assert bool((error <= 0.5001 * step_size).all())


def test_a_quantized_cache_of_constants_is_read_only() -> None:
    cache = torch.zeros(B, KV_HEADS, M, D, dtype=torch.int8)
    kv = kvonnx.group_query_cache(cache, cache.clone(), torch.ones(1), torch.ones(1))
    new = torch.zeros(1, KV_HEADS, D)
    with pytest.raises(ShapeError):
        ops.store(new, new, torch.tensor([0]), kv)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(B, KV_HEADS, M, D, dtype=torch.int8),) * 2, "k_scale must be given for .*, got None"),
        (
            (torch.zeros(B, KV_HEADS, M, D),) * 2 + (torch.ones(1),) * 2,
            "k_scale must be None for .*, got a tensor",
        ),
        (
            (torch.zeros(B, KV_HEADS, M, D, dtype=torch.int8),) * 2 + (torch.ones(3),) * 2,
            "k_scale must have one",
        ),
        ((torch.zeros(B, M, D),) * 2, "key_cache must be"),
        *(
            (
                (torch.zeros(B, KV_HEADS, M, D, dtype=dtype),) * 2 + scales,
                rf"key_cache must be .*torch.int8 or torch.uint8, got {dtype}",
            )
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float64)
            for scales in ((), (torch.ones(1),) * 2)
        ),
    ],
)
def test_bad_caches_are_named(arguments: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        kvonnx.group_query_cache(*arguments)


@pytest.mark.parametrize(
    ("at", "options", "message"),
    [
        ([0, 0, 9], {}, "write_indices must leave room"),
        ([0, 0], {}, "write_indices must be"),
        ([0, 0, 0], {"mode": "spiral"}, "mode must be"),
        ([0, -1, 0], {}, "write_indices must leave room"),
        ([0, -1, 0], {"mode": "circular"}, r"write_indices must not be negative, got \[0, -1, 0\]"),
    ],
)
def test_bad_places_are_named(at: list[int], options: dict[str, Any], message: str) -> None:
    cache = torch.zeros(B, KV_HEADS, M, D)
    kv = kvonnx.standard_cache(cache, cache.clone())
    with pytest.raises(ArgumentError, match=message):
        kvonnx.write_slots(kv, torch.tensor(at), 4, **options)


FAR = [-(2**63), -(2**63) + 1, 2**62, 2**63 - 2, 2**63 - 1]


@pytest.mark.parametrize("far", FAR)
def test_positions_far_away_do_not_come_back(far: int) -> None:
    cache = torch.zeros(B, KV_HEADS, M, D)
    kv = kvonnx.standard_cache(cache, cache.clone())
    at = torch.tensor([0, far, 1])
    with pytest.raises(ArgumentError, match="write_indices must leave room for 3"):
        kvonnx.write_slots(kv, at, 3)
    if far < 0:
        with pytest.raises(ArgumentError, match="write_indices must not be negative"):
            kvonnx.write_slots(kv, at, 3, mode="circular")
    else:
        wanted = [b * M + (i + j) % M for b, i in enumerate(at.tolist()) for j in range(3)]
        assert kvonnx.write_slots(kv, at, 3, mode="circular").tolist() == wanted
    with pytest.raises(ArgumentError, match=r"lengths must be in \[0, "):
        kvonnx.row_batch(kv, 1, torch.tensor([1, far, 1]))


@pytest.mark.parametrize("num_new", [-1, 2**62, 2**63, True, 1.0])
def test_a_count_that_is_none(num_new: Any) -> None:
    cache = torch.zeros(B, KV_HEADS, M, D)
    kv = kvonnx.standard_cache(cache, cache.clone())
    with pytest.raises(ArgumentError, match="num_new must be"):
        kvonnx.write_slots(kv, torch.zeros(B, dtype=torch.int64), num_new)
