"""Legal calls of the recurrent operators of ONNX."""

import math

import torch

from kvloom.conform.describe import Call
from kvloom.conform.draw import FLOATS, Draw
from kvloom.core.specs import dtype_name


def draw_linear_attention(draw: Draw) -> tuple[str, Call]:
    """``LinearAttention-27``: prompts and single tokens, with or without a past state."""
    rule = draw.one(["linear", "gated", "delta", "gated_delta"])
    dtype = draw.one([torch.float32, *FLOATS])
    batch, heads = draw.integer(1, 2), draw.integer(1, 3)
    group, count = draw.integer(1, 3), draw.integer(1, 7)
    key_dim, value_dim = draw.one([1, 2, 4, 8]), draw.one([1, 3, 4])
    call: Call = {
        "query": draw.calm([batch, count, heads * group * key_dim], dtype),
        "key": draw.calm([batch, count, heads * key_dim], dtype) / 2,  # short vectors, for the delta rules
        "value": draw.calm([batch, count, heads * value_dim], dtype),
        "q_num_heads": heads * group,
        "kv_num_heads": heads,
        "update_rule": rule,
    }
    about = f"{rule}, {dtype_name(dtype)}, {count} tokens, {heads * group} heads of {heads}"
    if draw.integer(0, 3):
        state = draw.one([dtype, torch.float32])
        call["past_state"] = draw.calm([batch, heads, key_dim, value_dim], state)
        about += f", a state of {dtype_name(state)}"
    if "gated" in rule:
        width = heads * draw.one([1, key_dim])
        call["decay"] = -draw.calm([batch, count, width], dtype).abs() * draw.one([1, 1, 4])
        about += ", decay by element" if width > heads else ", decay by head"
        if draw.integer(0, 3) == 0:
            call["decay"][:, draw.integer(0, count - 1)] = -math.inf
            about += ", one token forgets all"
    if "delta" in rule:
        call["beta"] = draw.calm([batch, count, draw.one([heads, heads, 1])], dtype).abs()
    if rule == "gated_delta" and draw.integer(0, 1):
        del call["update_rule"]
    if draw.integer(0, 2) == 0:
        call["scale"] = draw.one([0.25, -2.0])
    if draw.integer(0, 1):
        call["chunk_size"] = draw.one([1, 2, 3, 64])
    return about, {name: _in_memory(draw, x) for name, x in call.items()}


def draw_causal_conv(draw: Draw) -> tuple[str, Call]:
    """``CausalConvWithState-27``: more and fewer inputs than its kernel has weights."""
    dtype = draw.one([torch.float32, *FLOATS])
    batch, channels = draw.integer(1, 2), draw.integer(1, 4)
    size, count = draw.integer(1, 4), draw.integer(1, 6)
    call: Call = {
        "input": draw.calm([batch, channels, count], dtype),
        "weight": draw.calm([channels, 1, size], dtype) * 2,
    }
    about = f"{count} inputs of {channels} channels, {size} weights, {dtype_name(dtype)}"
    if draw.integer(0, 1):
        call["bias"] = draw.calm([channels], dtype)
        about += ", a bias"
    if draw.integer(0, 2):
        call["past_state"] = draw.calm([batch, channels, size - 1], dtype)
        about += ", a state"
    activation = draw.one([None, "none", "silu", "swish"])
    if activation is not None:
        call["activation"] = activation
        about += f", {activation}"
    return about, {name: _in_memory(draw, x) for name, x in call.items()}


def _in_memory(draw: Draw, x: object) -> object:
    """Give every fourth tensor gaps between its elements."""
    return draw.strided(x) if isinstance(x, torch.Tensor) and draw.integer(0, 3) == 0 else x
