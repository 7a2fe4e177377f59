"""Mistakes planted in implementations that are right, and the cause that each must be called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from conform import faulty

from kvloom.conform import peers
from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.targets import Target, open_target, python_target
from kvloom.conform.vectors import Vector

STATIC = "pmx.key_value_cache"
DYNAMIC = "pmx.dynamic_batching.key_value_cache"
FUSED = "pmx.dynamic_batching.multi_head_cache_attention"
LATER = "opmx.dynamic_batching.multi_head_cache_attention"
SCATTER, GATHER = "ascend.scatter_pa_kv_cache", "ascend.gather_pa_kv_cache"
GQA, ATTENTION, TENSOR = "microsoft.group_query_attention", "onnx.attention", "onnx.tensor_scatter"
PAGED, APPEND, UPDATE = (
    "microsoft.paged_attention",
    "flashinfer.append_paged_kv_cache",
    "transformers.cache_update",
)
RESHAPE, FLASH, COPY = "vllm.reshape_and_cache", "vllm.reshape_and_cache_flash", "vllm.copy_blocks"

RIGHT: dict[str, Callable[..., Any] | str] = {
    STATIC: peers.key_value_cache,
    DYNAMIC: peers.dynamic_key_value_cache,
    FUSED: peers.multi_head_cache_attention,
    LATER: peers.opmx_multi_head_cache_attention,
    SCATTER: peers.scatter_pa_kv_cache,
    GATHER: peers.gather_pa_kv_cache,
    RESHAPE: peers.reshape_and_cache,
    FLASH: peers.reshape_and_cache_flash,
    COPY: peers.copy_blocks,
    APPEND: peers.append_paged_kv_cache,
    PAGED: peers.paged_attention,
    UPDATE: peers.kvloom_cache_update,
    TENSOR: "onnxruntime",
    ATTENTION: "onnxruntime",
    GQA: "onnxruntime",
}
"""Implementations that share no code with the oracles."""


@dataclass(frozen=True)
class Planted:
    """A wrong target for a dialect; ``cause`` is what a report must call it."""

    dialect: str
    cause: str
    target: Callable[[], Target]


def right(dialect: str) -> Target:
    of = RIGHT[dialect]
    return open_target(of) if isinstance(of, str) else python_target(of)


def asked(dialect: str, cause: str, change: Callable[[Call], Call]) -> Planted:
    """The right implementation is asked something else."""

    def target() -> Target:
        inner = right(dialect)

        def run(operator: Operator, vector: Vector, call: Call) -> Results:
            changed = change(call) if vector.expected is not None else {}
            return inner(operator, vector, {k: x for k, x in {**call, **changed}.items() if x is not None})

        return run

    return Planted(dialect, cause, target)


def answered(dialect: str, cause: str, change: Callable[[Call, Results, Call], Results]) -> Planted:
    """The right implementation's results are changed; ``change`` gets the call before and after."""

    def target() -> Target:
        inner = right(dialect)

        def run(operator: Operator, vector: Vector, call: Call) -> Results:
            before = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in call.items()}
            results = inner(operator, vector, call)
            return change(before, results, call) if vector.expected is not None else results

        return run

    return Planted(dialect, cause, target)


def static(cause: str, bug: str) -> Planted:
    return Planted(STATIC, cause, lambda: python_target(functools.partial(faulty.key_value_cache, bug)))


def swap(a: str, b: str) -> Callable[[Call], Call]:
    return lambda call: {a: call.get(b), b: call.get(a)}


def at(name: str, change: Callable[[Any], Any]) -> Callable[[Call], Call]:
    return lambda call: {name: change(call[name])} if call.get(name) is not None else {}


def drop(name: str) -> Callable[[Call], Call]:
    return lambda call: {name: None}


def put_back(*names: str) -> Callable[[Call, Results, Call], Results]:
    return lambda before, results, call: {**results, **{n: before[n] for n in names if n in before}}


def modulo(name: str, axis: int, result: str, of: Callable[[Call], tuple[int, int]]) -> Planted:
    """Query heads in another order, and the output back in theirs."""

    def target() -> Target:
        inner = right({"query": FUSED, "Q": ATTENTION}[name])

        def run(operator: Operator, vector: Vector, call: Call) -> Results:
            if vector.expected is None:
                return inner(operator, vector, call)
            total, kv = of(call)
            order = (
                torch.arange(total).view(-1, kv).t().reshape(-1)
            )  # the heads that share h % kv side by side
            out = inner(operator, vector, {**call, name: call[name].index_select(axis, order)})
            return {**out, result: out[result].index_select(axis, order.argsort())}

        return run

    return Planted({"query": FUSED, "Q": ATTENTION}[name], "wrong head for a query group", target)


def wrapped(call: Call) -> Call:
    cache = call["key_cache"]
    size = cache.shape[2] if call.get("cache_mode") == "PA_NZ" else cache.shape[1]
    slots = call["slot_mapping"]
    return {"slot_mapping": torch.where(slots < 0, slots + cache.shape[0] * size, slots)}


def pages_rolled(x: torch.Tensor) -> torch.Tensor:
    known = (x >= 0) & (x < 1 << 40)
    return torch.where(known, x.roll(-1, dims=1), x) if x.ndim == 2 else x


def short_steps(call: Call, results: Results, after: Call) -> Results:
    found = {}
    for side, name in (("key_states", "keys"), ("value_states", "values")):
        found |= {f"{name}.{i}": x for i, x in enumerate(call[side])}
    return found


def newest_first(before: Call, results: Results, call: Call) -> Results:
    if "past_key" not in before:
        return results
    past, new = before["past_key"].shape[2], before["K"].shape[2]
    order = [*range(past, past + new), *range(past)]
    return {**results, **{n: results[n][:, :, order] for n in ("present_key", "present_value")}}


def as_int8(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Codes of the new tokens computed again, in torch."""

    def changed(before: Call, results: Results, call: Call) -> Results:
        if before.get("kv_cache_bit_width") != 8:
            return results
        batch, count = before["key"].shape[:2]
        for side in ("key", "value"):
            cache, scale = results[f"present_{side}"], before[f"{side[0]}_scale"]
            new = before[side].view(batch, count, cache.shape[1], -1).transpose(1, 2)
            codes = change(new, scale if scale.ndim > 1 else scale.view(1, 1, 1, 1), cache)
            for b, last in enumerate(before["seqlens_k"].tolist()):
                cache[b, :, last + 1 - count : last + 1] = codes[b]
        return results

    return changed


def nibbles(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Bytes of the new tokens of an int4 cache changed."""

    def changed(before: Call, results: Results, call: Call) -> Results:
        if before.get("kv_cache_bit_width") != 4:
            return results
        count = before["key"].shape[1]
        for side in ("key", "value"):
            cache = results[f"present_{side}"]
            for b, last in enumerate(before["seqlens_k"].tolist()):
                rows = slice(last + 1 - count, last + 1)
                cache[b, :, rows] = change(cache[b, :, rows])
        return results

    return changed


def transposed(before: Call, results: Results, call: Call) -> Results:
    """Pieces of keys with the lane outside."""
    cache, slots = before["key_cache"], before["slot_mapping"]
    pieces, size, width = cache.shape[2:]
    key = before["key"].unflatten(2, (width, pieces)).transpose(2, 3)  # [T, H, pieces, width]
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // size, :, :, slot % size] = key[t]
    return {**results, "key_cache": cache}


def as_rows(before: Call, results: Results, call: Call) -> Results:
    cache, slots = before["value_cache"], before["slot_mapping"]
    size, rows = cache.shape[3], cache.view(cache.shape[0], cache.shape[1], cache.shape[3], cache.shape[2])
    kept = slots >= 0
    rows[slots[kept] // size, :, slots[kept] % size] = before["value"][kept]
    return {**results, "value_cache": cache}


def other_pages(call: Call) -> Call:
    pages = call["paged_kv_cache"]
    flat = pages.view(*pages.shape[:2], pages.shape[3], pages.shape[2], pages.shape[4])
    return {"paged_kv_cache": flat, "kv_layout": "HND" if call["kv_layout"] == "NHD" else "NHD"}


def first_tokens(call: Call) -> Call:
    """Alibi as if each sequence were only as long as what is kept of it."""
    if "compress_lens" not in call or "compress_seq_offset" in call:
        return {}
    key, lens, count = call["key"], call["compress_lens"].reshape(-1), call["key"].shape[-2]
    if key.ndim == 4:
        starts = [b * key.shape[1] for b in range(key.shape[0])]
    else:
        starts = [0, *call["seq_lens"].cumsum(0).tolist()]
    found = {}
    for name in ("key", "value"):
        x = call[name].clone()
        flat, old = x.flatten(0, -3), call[name].flatten(0, -3)
        for b, length in enumerate(call["seq_lens"].tolist()):
            for h in range(count):
                win = int(lens[b * count + h])
                begin = starts[b]
                flat[begin + length - win : begin + length, h] = old[begin : begin + win, h]
        found[name] = x
    return found


def omni(call: Call) -> Call:
    return {"scatter_mode": "Omni"} if call.get("scatter_mode") == "Rope" else {}


def top_left(call: Call) -> Call:
    if not call.get("is_causal"):
        return {}
    width = call["K"].shape[2] + (call["past_key"].shape[2] if "past_key" in call else 0)
    mask = torch.full((call["Q"].shape[2], width), float("-inf")).triu(1).to(call["Q"].dtype)
    return {"is_causal": 0, "attn_mask": mask + call["attn_mask"] if "attn_mask" in call else mask}


def clamped(call: Call) -> Call:
    if call.get("mode") != "circular" or "write_indices" not in call:
        return {}
    axis = call["axis"]
    room = call["past_cache"].shape[axis] - call["update"].shape[axis]
    return {"mode": "linear", "write_indices": call["write_indices"].clamp(max=room)}


def contiguous_again(*names: str) -> Callable[[Call], Call]:
    """Memory read in order from the first element, whatever the strides."""

    def change(call: Call) -> Call:
        found = {}
        for name in names:
            x = call[name]
            memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize - x.storage_offset(),), (1,))
            found[name] = memory[: x.numel()].view(x.shape)
        return found

    return change


NEW = ("current_key", "current_value")
PLANTED = (
    asked(STATIC, "value for key", swap(*NEW)),
    asked(STATIC, "key stored twice", lambda c: {"current_value": c["current_key"]}),
    asked(STATIC, "strides ignored", contiguous_again(*NEW)),
    answered(STATIC, "state not updated", put_back("cache", "scale")),
    static("round half away from zero", "away"),
    static("round half up", "up"),
    static("truncated codes", "truncate"),
    static("range of 128", "128"),
    static("-128 code", "-128"),
    static("largest, not largest absolute", "max"),
    static("no smallest scale", "no eps"),
    static("another smallest scale", "eps"),
    static("multiplied by a reciprocal", "reciprocal"),
    static("quotient not rounded", "wide"),
    static("one scale for all groups", "one scale"),
    static("scale of the neighboring group", "neighbor"),
    static("nibbles swapped", "high first"),
    static("offset binary nibbles", "offset binary"),
    static("nibbles of two halves", "halves"),
    static("new tokens not dequantized", "raw"),
    static("heads tiled", "tiled"),
    static("scales not updated", "scales"),
    asked(STATIC, "layer_idx ignored", lambda c: {"layer_idx": 0}),
    asked(STATIC, "heads in reverse", lambda c: {n: c[n].flip(2) for n in NEW}),
    asked(DYNAMIC, "value for key", swap(*NEW)),
    asked(DYNAMIC, "off by one page", at("cachestarts", pages_rolled)),
    asked(DYNAMIC, "layers in reverse", lambda c: {"layer_idx": c["num_layer"] - 1 - c["layer_idx"]}),
    asked(DYNAMIC, "value stored twice", lambda c: {"current_key": c["current_value"]}),
    answered(DYNAMIC, "state not updated", put_back("cache", "scale")),
    asked(DYNAMIC, "heads in reverse", lambda c: {n: c[n].flip(1) for n in NEW}),
    modulo("query", 1, "attn_output", lambda c: (c["num_heads"], c["num_kv_heads"])),
    asked(FUSED, "causal mask flipped", lambda c: {"is_causal": 1 - c["is_causal"]}),
    asked(FUSED, "mask ignored", drop("attn_mask")),
    asked(FUSED, "scores not scaled", at("query", lambda x: x * 8**0.5)),
    asked(LATER, "ALiBi ignored", lambda c: {"is_alibi": 0}),
    asked(LATER, "off by one page", at("cachestarts", pages_rolled)),
    answered(LATER, "state not updated", put_back("cache", "scale")),
    asked(SCATTER, "negative slot wraps", wrapped),
    asked(SCATTER, "negative slot is slot 0", at("slot_mapping", lambda x: x.clamp(min=0))),
    asked(SCATTER, "first tokens kept", first_tokens),
    asked(SCATTER, "mean left out", omni),
    asked(SCATTER, "stride of keys for values",
          lambda c: {"strides": [c["strides"][0]] * 2} if c.get("strides") else {}),
    asked(SCATTER, "offsets ignored", lambda c: {"offsets": [0, 0]} if c.get("offsets") else {}),
    answered(SCATTER, "values not updated", put_back("value_cache")),
    asked(GATHER, "seq_offset ignored", drop("seq_offset")),
    asked(GATHER, "off by one page", at("block_tables", lambda x: x.roll(-1, dims=1))),
    asked(TENSOR, "circular write stops at the end", clamped),
    asked(TENSOR, "write_indices ignored", drop("write_indices")),
    answered(TENSOR, "state not updated", lambda before, r, c: {"present_cache": before["past_cache"]}),
    asked(ATTENTION, "causal from the top left", top_left),
    asked(ATTENTION, "padding read", drop("nonpad_kv_seqlen")),
    asked(ATTENTION, "softcap ignored", lambda c: {"softcap": 0.0}),
    asked(ATTENTION, "mask ignored", drop("attn_mask")),
    answered(ATTENTION, "new tokens first", newest_first),
    modulo("Q", 1, "Y", lambda c: (c["Q"].shape[1], c["K"].shape[1])),
    asked(GQA, "scale of keys for values", swap("k_scale", "v_scale")),
    asked(GQA, "window ignored", drop("local_window_size")),
    asked(GQA, "value for key", swap("key", "value")),
    answered(GQA, "ties away from zero", as_int8(
        lambda x, s, c: ((x / s).sign() * ((x / s).abs() + 0.5).floor()).clamp(-128, 127).to(torch.int8))),
    answered(GQA, "-128 is missing", as_int8(
        lambda x, s, c: (x / s).round().clamp(-127, 127).to(torch.int8))),
    answered(GQA, "two's complement nibbles", nibbles(lambda x: x ^ 0x88)),
    answered(GQA, "nibbles swapped", nibbles(lambda x: (x << 4) | (x >> 4))),
    asked(PAGED, "past length ignored", at("past_seqlens", torch.zeros_like)),
    asked(PAGED, "value for key", swap("key", "value")),
    answered(RESHAPE, "pieces transposed", transposed),
    answered(RESHAPE, "values as rows", as_rows),
    asked(RESHAPE, "negative slot is slot 0", at("slot_mapping", lambda x: x.clamp(min=0))),
    asked(FLASH, "strides ignored", contiguous_again("key", "value")),
    answered(FLASH, "keys not updated", put_back("key_cache")),
    asked(COPY, "copied backwards", at("block_mapping", lambda x: x.flip(1))),
    asked(APPEND, "NHD for HND", other_pages),
    asked(APPEND, "off by one page", at("kv_indices", lambda x: x.roll(-1))),
    asked(APPEND, "position off by one", at("positions", lambda x: x + 1)),
    asked(UPDATE, "window off by one",
          lambda c: {"max_length": c["max_length"] + 1} if c["kind"] == "sliding" else {}),
    asked(UPDATE, "static as dynamic", lambda c: {"kind": "dynamic"} if c["kind"] == "static" else {}),
    answered(UPDATE, "history not returned", short_steps),
)  # fmt: skip
