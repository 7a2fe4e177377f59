"""The recurrent ONNX operators refuse bad arguments by name, and have the signature of their document."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from oracles import bits
from oracles.recurrent_cases import RULES, Call, Sizes, linear_call
from oracles.rejection import Bad, assert_refused, rows
from torch import Tensor

from kvloom.dialects import onnx
from kvloom.errors import KVError, OutOfMemory

NEW = ("query", "key", "value", "decay", "beta")


def good_attention() -> Call:
    """B 2, T 4, 4 query heads of 2 states, K 8, V 5."""
    return linear_call("gated_delta", bits.generator(0), Sizes(T=4, R=2))


def good_conv() -> Call:
    """B 2, C 3, T 5, k 4."""
    shapes = {"input": (2, 3, 5), "weight": (3, 1, 4), "bias": (3,), "past_state": (2, 3, 3)}
    return {name: torch.randn(shape, generator=bits.generator(1)) for name, shape in shapes.items()}


def longer(name: str, axis: int) -> Callable[[Call], Call]:
    return lambda c: {name: torch.cat((c[name], c[name].narrow(axis, 0, 1)), dim=axis)}


def to(name: str, dtype: torch.dtype) -> Callable[[Call], Call]:
    return lambda c: {name: c[name].to(dtype)}


def tensors(names: tuple[str, ...]) -> list[Bad]:
    """What is wrong with any tensor."""
    found = []
    for name in names:
        found += [
            Bad(f"{name} is no tensor", name, lambda c, name=name: {name: [1, 2]}),
            Bad(f"{name} float64", name, to(name, torch.float64)),
            Bad(f"{name} int32", name, to(name, torch.int32)),
            Bad(f"{name} of one axis more", name, lambda c, name=name: {name: c[name][None]}),
            Bad(f"{name} of one axis less", name, lambda c, name=name: {name: c[name][0]}),
            Bad(f"{name} on meta", f"{name}|key|weight", lambda c, name=name: {name: c[name].to("meta")}),
        ]
    return found


ATTENTION = [
    *tensors((*NEW, "past_state")),
    *(Bad(f"{name} missing", name, lambda c, name=name: {name: None}) for name in NEW),
    *(Bad(f"{name} of another dtype", f"{name}|key", to(name, torch.float16)) for name in NEW),
    *(Bad(f"{name} of one token more", f"{name}|key", longer(name, 1)) for name in NEW),
    *(Bad(f"{name} of one sequence more", f"{name}|key", longer(name, 0)) for name in (*NEW, "past_state")),
    *(Bad(f"{name} wider by one", name, longer(name, 2)) for name in NEW),
    Bad("query of other heads", "key", lambda c: {"query": c["query"][..., :16]}),
    Bad("query without elements", "query", lambda c: {"query": c["query"][..., :0]}),
    Bad("value without elements", "value", lambda c: {"value": c["value"][..., :0]}),
    Bad("value of other heads", "past_state", lambda c: {"value": c["value"][..., :4]}),
    Bad("past_state of one head more", "past_state", longer("past_state", 1)),
    Bad("past_state of longer keys", "past_state", longer("past_state", 2)),
    Bad("past_state of longer values", "past_state", longer("past_state", 3)),
    Bad("past_state transposed", "past_state", lambda c: {"past_state": c["past_state"].mT}),
    Bad("decay for all heads at once", "decay", lambda c: {"decay": c["decay"][..., :1]}),
    Bad("beta for each element", "beta", lambda c: {"beta": c["decay"]}),
    *(Bad(f"q_num_heads {n}", "q_num_heads", lambda c, n=n: {"q_num_heads": n})
      for n in (-2, 0, 3, 2.0, True)),
    Bad("q_num_heads None", "q_num_heads", lambda c: {"q_num_heads": None}),
    Bad("q_num_heads beyond the query", "query", lambda c: {"q_num_heads": 2**62}),
    *(Bad(f"kv_num_heads {n}", "kv_num_heads", lambda c, n=n: {"kv_num_heads": n}) for n in (-1, 0, 3, None)),
    *(Bad(f"chunk_size {n}", "chunk_size", lambda c, n=n: {"chunk_size": n}) for n in (-1, 0, 1.5, None)),
    *(Bad(f"scale {x!r}", "scale", lambda c, x=x: {"scale": x}) for x in (None, "1", True)),
    *(Bad(f"update_rule {x!r}", "update_rule", lambda c, x=x: {"update_rule": x})
      for x in ("", "DELTA", "gated delta", None, 3)),
    *(Bad(f"decay for {rule}", "decay", lambda c, rule=rule: {"update_rule": rule})
      for rule in ("linear", "delta")),
    Bad("beta for gated", "beta", lambda c: {"update_rule": "gated"}),
    Bad("beta for linear", "beta", lambda c: {"update_rule": "linear", "decay": None}),
]  # fmt: skip
CONV = [
    *tensors(("input", "weight", "past_state")),
    *(Bad(f"{name} missing", name, lambda c, name=name: {name: None}) for name in ("input", "weight")),
    *(Bad(f"{name} of another dtype", f"{name}|weight", to(name, torch.float16))
      for name in ("input", "weight", "bias", "past_state")),
    Bad("input of one channel more", "weight", longer("input", 1)),
    Bad("input of one sequence more", "past_state", longer("input", 0)),
    Bad("weight of one channel more", "weight", longer("weight", 0)),
    Bad("weight over two channels", "weight", longer("weight", 1)),
    Bad("weight of a longer kernel", "past_state", longer("weight", 2)),
    Bad("weight without a kernel", "weight", lambda c: {"weight": c["weight"][..., :0]}),
    Bad("bias of one channel more", "bias", longer("bias", 0)),
    Bad("bias of two axes", "bias", lambda c: {"bias": c["bias"][None]}),
    Bad("bias is no tensor", "bias", lambda c: {"bias": 1.0}),
    Bad("past_state of one sequence more", "past_state", longer("past_state", 0)),
    Bad("past_state of one channel more", "past_state", longer("past_state", 1)),
    Bad("past_state of the whole kernel", "past_state", longer("past_state", 2)),
    *(Bad(f"activation {x!r}", "activation", lambda c, x=x: {"activation": x})
      for x in ("", "SiLU", "relu", None, 3)),
]  # fmt: skip


@rows(ATTENTION)
def test_linear_attention_names_what_is_wrong(bad: Bad) -> None:
    assert_refused(onnx.linear_attention, good_attention(), bad, KVError)


@rows(CONV)
def test_causal_conv_names_what_is_wrong(bad: Bad) -> None:
    assert_refused(onnx.causal_conv_with_state, good_conv(), bad, KVError)


def test_good_calls_are_good() -> None:
    assert onnx.linear_attention(**good_attention())[0].shape == (2, 4, 20)
    assert onnx.causal_conv_with_state(**good_conv())[0].shape == (2, 3, 5)


def test_messages_say_what_was_expected_and_what_came() -> None:
    call = good_attention()
    with pytest.raises(KVError, match=r"^key must be \[B, T, F\] with B=2, T=4, F=16, got \[2, 4, 8\]$"):
        onnx.linear_attention(**{**call, "key": call["key"][..., :8]})
    with pytest.raises(KVError, match=r"^beta must be 2 or 1 wide, got \[2, 4, 16\]$"):
        onnx.linear_attention(**{**call, "beta": call["decay"]})
    with pytest.raises(KVError, match=r"^q_num_heads must be a multiple of kv_num_heads \(2\), got 5$"):
        onnx.linear_attention(**{**call, "q_num_heads": 5})
    with pytest.raises(KVError, match=r"^decay must be None for update_rule 'linear'$"):
        onnx.linear_attention(**{**call, "update_rule": "linear"})


def test_results_that_no_memory_holds_are_refused_before_anything_is_computed() -> None:
    call = good_conv()
    with pytest.raises(OutOfMemory, match=r"^output must fit memory"):
        onnx.causal_conv_with_state(call["input"][..., :1].expand(2, 3, 1 << 48), call["weight"])
    attention = good_attention()
    endless: Tensor = attention["value"][..., :1].expand(2, 4, 1 << 48)
    with pytest.raises(OutOfMemory, match=r"^output must fit memory"):
        onnx.linear_attention(**{**attention, "value": endless, "past_state": None})


@pytest.mark.parametrize(
    ("function", "kind"),
    [(onnx.linear_attention, "LinearAttention"), (onnx.causal_conv_with_state, "CausalConvWithState")],
)
def test_arguments_follow_the_document(function: Callable[..., object], kind: str) -> None:
    standard = pytest.importorskip("onnx")
    defs = standard.defs
    schema = defs.get_schema(kind, 27, "")
    parameters = inspect.signature(function).parameters.values()
    inputs = [(p.name, p.default is None) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    optional = defs.OpSchema.FormalParameterOption.Optional
    assert inputs == [(x.name, x.option == optional) for x in schema.inputs]
    attributes = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert attributes.keys() == schema.attributes.keys()
    for name, x in schema.attributes.items():
        if x.required:
            assert attributes[name] is inspect.Parameter.empty
        else:
            default = standard.helper.get_attribute_value(x.default_value)
            assert attributes[name] == (default.decode() if isinstance(default, bytes) else default)


def test_every_rule_of_the_document_is_computed() -> None:
    for rule in RULES:
        assert onnx.linear_attention(**linear_call(rule, bits.generator(2)))[0].isfinite().all()
