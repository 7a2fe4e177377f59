"""Ways to plant a mistake in an implementation that is right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from conform import faulty, faulty_recurrent

from kvloom.conform import peers
from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.outcomes import Target
from kvloom.conform.targets import open_target, python_target
from kvloom.conform.vectors import Vector

STATIC = "pmx.key_value_cache"
DYNAMIC = "pmx.dynamic_batching.key_value_cache"
FUSED = "pmx.dynamic_batching.multi_head_cache_attention"
LATER = "opmx.dynamic_batching.multi_head_cache_attention"
SCATTER, GATHER = "ascend.scatter_pa_kv_cache", "ascend.gather_pa_kv_cache"
GQA, TENSOR = "microsoft.group_query_attention", "onnx.tensor_scatter"
ATTENTION, FIRST, WINDOWS = "onnx.attention", "onnx.attention_23", "onnx.attention_25"
"""``Attention`` of opset 24, 23 and 25."""
PAGED, APPEND, UPDATE = (
    "microsoft.paged_attention",
    "flashinfer.append_paged_kv_cache",
    "transformers.cache_update",
)
LINEAR, CONV = "onnx.linear_attention", "onnx.causal_conv_with_state"
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
    LINEAR: peers.linear_attention,
    CONV: peers.causal_conv_with_state,
    TENSOR: "onnxruntime",
    FIRST: "onnxruntime",
    ATTENTION: "onnxruntime",
    WINDOWS: "onnxruntime",
    GQA: "onnxruntime",
}
"""Implementations that share no code with the oracles."""
NEW = ("current_key", "current_value")


@dataclass(frozen=True)
class Planted:
    """A wrong target for a dialect; ``cause`` is what a report must call it."""

    dialect: str
    cause: str
    target: Callable[[], Target]


def right(dialect: str) -> Target:
    of = RIGHT[dialect]
    target = open_target(of) if isinstance(of, str) else python_target(of)
    if dialect not in (FIRST, ATTENTION):
        return target
    # ONNX Runtime refuses some masks that are legal in opsets 23 and 24, and takes them in 25.
    return lambda operator, vector, call: target(replace(operator, opset=25), vector, call)


def asked(dialect: str, cause: str, change: Callable[[Call], Call]) -> Planted:
    """The right implementation is asked something else."""

    def target() -> Target:
        inner = right(dialect)

        def run(operator: Operator, vector: Vector, call: Call) -> Results:
            changed = change(operator.complete(call)) if vector.expected is not None else {}
            return inner(operator, vector, {k: x for k, x in {**call, **changed}.items() if x is not None})

        return run

    return Planted(dialect, cause, target)


def answered(dialect: str, cause: str, change: Callable[[Call, Results, Call], Results]) -> Planted:
    """The right implementation's results are changed; ``change`` gets the call before and after."""

    def target() -> Target:
        inner = right(dialect)

        def run(operator: Operator, vector: Vector, call: Call) -> Results:
            given = operator.complete(call)
            before = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in given.items()}
            results = inner(operator, vector, call)
            return change(before, results, call) if vector.expected is not None else results

        return run

    return Planted(dialect, cause, target)


def static(cause: str, bug: str) -> Planted:
    return Planted(STATIC, cause, lambda: python_target(functools.partial(faulty.key_value_cache, bug)))


def recurrent(dialect: str, cause: str, bug: str) -> Planted:
    """A recurrent operator with a bug; what must be refused is refused by the right one."""

    def target() -> Target:
        inner = right(dialect)
        wrong = python_target(functools.partial(getattr(faulty_recurrent, dialect.partition(".")[2]), bug))

        def run(operator: Operator, vector: Vector, call: Call) -> Results:
            return (inner if vector.expected is None else wrong)(operator, vector, call)

        return run

    return Planted(dialect, cause, target)


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


def entry_by_entry(is_history_first: bool) -> Callable[[], Target]:
    """``dynamic_batching.KeyValueCache`` entry by entry, or with the history read before all of them."""

    def entry(call: Call, b: int, **changed: Any) -> Call:
        seq, kv = call["seqstarts"].tolist(), call["kvstarts"].tolist()
        rows = slice(seq[b], seq[b + 1])
        return {
            **call, "current_key": call["current_key"][rows], "current_value": call["current_value"][rows],
            "seqstarts": torch.tensor([0, seq[b + 1] - seq[b]]), "start_pos": call["start_pos"][b : b + 1],
            "kvstarts": torch.tensor([0, kv[b + 1] - kv[b]]), "cachestarts": call["cachestarts"][b : b + 1],
            "max_seqlen": seq[b + 1] - seq[b], "max_kvlen": kv[b + 1] - kv[b], **changed,
        }  # fmt: skip

    def function(**call: Any) -> Any:
        batch = range(len(call["start_pos"]))
        if not is_history_first:
            found = [peers.dynamic_key_value_cache(**entry(call, b)) for b in batch]
            return tuple(torch.cat(side) for side in zip(*found, strict=True))
        past = call["start_pos"].tolist()
        none = {n: call[n][:0] for n in NEW}
        before = [
            peers.dynamic_key_value_cache(**entry(call, b, **none, seqstarts=torch.tensor([0, 0]),
                                                  kvstarts=torch.tensor([0, past[b]]), max_seqlen=0,
                                                  max_kvlen=past[b]))
            for b in batch
        ]  # fmt: skip
        out = peers.dynamic_key_value_cache(**call)
        for b in batch:
            first = int(call["kvstarts"][b])
            for side in (0, 1):
                out[side][first : first + past[b]] = before[b][side]
        return out

    def target() -> Target:
        inner, wrong = right(DYNAMIC), python_target(function)

        def run(operator: Operator, vector: Vector, call: Call) -> Results:
            return (inner if vector.expected is None else wrong)(operator, vector, call)

        return run

    return target


def tokens_over(side: int, key: str, value: str, dialect: str) -> Planted:
    """The tokens of one side are written to the slots of the other, and nowhere else."""
    names = (key, value)

    def change(before: Call, results: Results, call: Call) -> Results:
        if dialect == APPEND:
            pages = results["paged_kv_cache"]
            pages[:, side] = before["paged_kv_cache"][:, side]
            return results
        name = ("key_cache", "value_cache")[side]
        return {**results, name: before[name]}

    inner = answered(dialect, "", change)

    def target() -> Target:
        run = inner.target()

        def both(operator: Operator, vector: Vector, call: Call) -> Results:
            if vector.expected is not None:
                call = {**call, names[1 - side]: call[names[side]]}
            return run(operator, vector, call)

        return both

    return Planted(dialect, ("keys written over values", "values written over keys")[side], target)


def packed(cause: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Planted:
    """GroupQueryAttention whose bytes of int4 are those of ``change``, which is its own inverse."""

    def target() -> Target:
        inner = right(GQA)

        def run(operator: Operator, vector: Vector, call: Call) -> Results:
            if vector.expected is None or call.get("kv_cache_bit_width") != 4:
                return inner(operator, vector, call)
            results = inner(
                operator, vector, {**call, **{n: change(call[n]) for n in ("past_key", "past_value")}}
            )
            for name in ("present_key", "present_value"):
                for row, last in zip(results[name], call["seqlens_k"].tolist(), strict=True):
                    stored = max(last + 1, call["query"].shape[1])
                    row[:, :stored] = change(row[:, :stored])
            return results

        return run

    return Planted(GQA, cause, target)


def other_layout() -> Planted:
    """FlashInfer's pages taken for those of the other layout."""

    def transposed(call: Call) -> Call:
        pages = call["paged_kv_cache"]
        other = pages.view(*pages.shape[:2], pages.shape[3], pages.shape[2], pages.shape[4])
        return {"paged_kv_cache": other, "kv_layout": "HND" if call["kv_layout"] == "NHD" else "NHD"}

    inner = asked(APPEND, "NHD for HND", transposed)

    def target() -> Target:
        run = inner.target()

        def back(operator: Operator, vector: Vector, call: Call) -> Results:
            shape = call["paged_kv_cache"].shape
            results = run(operator, vector, call)
            if vector.expected is None:
                return results
            return {"paged_kv_cache": results["paged_kv_cache"].reshape(shape)}

        return back

    return Planted(APPEND, inner.cause, target)
