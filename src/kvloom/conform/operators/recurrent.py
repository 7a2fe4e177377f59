"""Operators whose cache is a state of fixed size: ONNX, opset 27."""

from typing import Final

from kvloom.conform import judging
from kvloom.conform.describe import Argument, Call, Operator, Rule, Spoil
from kvloom.conform.draw import Draw
from kvloom.conform.drawing import recurrent as drawing
from kvloom.conform.operators.words import WIDE, set_to


def _other_gate(name: str) -> Spoil:
    """Remove the tensor if the rule needs it, or add one if the rule does not."""

    def spoil(call: Call, draw: Draw) -> Call:
        one = call["query"][:, :, :1].expand(-1, -1, call["kv_num_heads"])
        return {name: None if name in call else one.clone()}

    return spoil


_LINEAR_ATTENTION: Final = Operator(
    "onnx.linear_attention",
    "ONNX: LinearAttention-27",
    (
        Argument("query", "B T Q", WIDE),
        Argument("key", "B T K", "=query"),
        Argument("value", "B T V", "=query"),
        Argument("past_state", "B H E F", WIDE, is_optional=True),
        Argument("decay", "B T G", "=query", is_optional=True),
        Argument("beta", "B T R", "=query", is_optional=True),
        Argument("q_num_heads", low=1),
        Argument("kv_num_heads", low=1),
        Argument("scale", default=0.0),
        Argument("update_rule", default="gated_delta", only=("linear", "gated", "delta", "gated_delta")),
        Argument("chunk_size", default=64),
    ),
    {
        "output": "rounded B T V//kv_num_heads*q_num_heads",
        "present_state": "rounded B kv_num_heads K//kv_num_heads V//kv_num_heads",
    },
    judging.attended_linearly,
    drawing.draw_linear_attention,
    (
        Rule("q_num_heads", "q_num_heads % kv_num_heads == 0"),
        Rule("query", "Q > 0 and Q % q_num_heads == 0"),
        Rule("key", "K * q_num_heads == Q * kv_num_heads"),
        Rule("value", "V > 0 and V % kv_num_heads == 0"),
        Rule("past_state", "past_state is None or (H, E * H, F * H) == (kv_num_heads, K, V)"),
        Rule("decay", "(decay is not None) == (update_rule in ('gated', 'gated_delta'))"),
        Rule("decay", "decay is None or G in (kv_num_heads, K)"),
        Rule("beta", "(beta is not None) == (update_rule in ('delta', 'gated_delta'))"),
        Rule("beta", "beta is None or R in (kv_num_heads, 1)"),
    ),
    (
        ("decay", _other_gate("decay")),
        ("beta", _other_gate("beta")),
        set_to("q_num_heads", 5),
        set_to("kv_num_heads", 7),
    ),
    count=120,
    domain="",
    opset=27,
)
_CAUSAL_CONV: Final = Operator(
    "onnx.causal_conv_with_state",
    "ONNX: CausalConvWithState-27",
    (
        Argument("input", "B C T", WIDE),
        Argument("weight", "C 1 k", "=input"),
        Argument("bias", "C", "=input", is_optional=True),
        Argument("past_state", "B C S", "=input", is_optional=True),
        Argument("activation", default="none", only=("silu", "swish", "none")),
    ),
    {"output": "rounded B C T", "present_state": "bits B C k-1"},
    judging.convolved,
    drawing.draw_causal_conv,
    (
        Rule("weight", "k > 0"),
        Rule("past_state", "past_state is None or S == k - 1"),
    ),
    (("weight", lambda call, draw: {"weight": call["weight"][:, :, :0]}),),
    count=100,
    domain="",
    opset=27,
)

OPERATORS: Final = (_LINEAR_ATTENTION, _CAUSAL_CONV)
