"""``LinearAttention`` of ONNX: attention whose cache is one matrix for each head, for any length of text."""

import math
from typing import Final

import torch
from torch import Tensor

from kvloom.core.checks import FLOAT_DTYPES, INT64_END, expect, expect_range
from kvloom.core.memory import expect_memory
from kvloom.dialects.onnx.recurrence import attend_chunk
from kvloom.errors import ArgumentError, ShapeError

_RULES: Final = ("linear", "gated", "delta", "gated_delta")
_GATED: Final = ("gated", "gated_delta")
_DELTA: Final = ("delta", "gated_delta")


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Write each token to the state of its head, and read the state by the token's queries.

    ``linear``: S += k v^T. ``gated``: S decays by exp(decay) before. ``delta``: S += beta k (v - S^T k)^T.
    ``gated_delta``: both, the delta from the decayed state. A query then reads scale * S^T q.

    ``chunk_size`` tokens at a time are computed by matrix products in float32; with ``chunk_size=1`` one
    after the other. Both are equal within rounding. With a float32 state, a text that is cut at multiples of
    ``chunk_size`` has the bits of the whole. A number that is not finite may spread to its chunk, and to all
    later tokens.

    Args:
        query: ``[B, T, q_num_heads * K]`` float32, float16 or bfloat16.
        key: ``[B, T, kv_num_heads * K]``, dtype of ``query``. The delta rules need vectors of length 1.
        value: ``[B, T, kv_num_heads * V]``, dtype of ``query``.
        past_state: ``[B, kv_num_heads, K, V]`` float32, float16 or bfloat16; ``None``: zeros. In half
            precision it is rounded at every call.
        decay: Logarithms of the ``gated`` rules, dtype of ``query``: ``[B, T, kv_num_heads * K]`` for each
            element of a key, or ``[B, T, kv_num_heads]`` for each head. ``None`` for the other rules.
        beta: Update rates of the ``delta`` rules, dtype of ``query``: ``[B, T, kv_num_heads]``, or
            ``[B, T, 1]`` for all heads. ``None`` for the other rules.
        q_num_heads: A multiple of ``kv_num_heads``; adjacent query heads read the same state.
        kv_num_heads: Number of states of each sequence.
        scale: Factor of the output; 0: 1 / sqrt(K).
        update_rule: ``"linear"``, ``"gated"``, ``"delta"`` or ``"gated_delta"``.
        chunk_size: Number of tokens computed at once. ``decay`` for each element needs memory of its square.

    Returns:
        ``output`` ``[B, T, q_num_heads * V]`` in the dtype of ``query``, and ``present_state``, shaped as
        ``past_state``, in its dtype or else that of ``query``.

    Raises:
        KVError: an argument does not fit the document.

    Source: ONNX operator ``LinearAttention``, opset 27.
    """
    heads = expect_range("kv_num_heads", kv_num_heads, 1)
    if expect_range("q_num_heads", q_num_heads, 1) % heads:
        raise ArgumentError(f"q_num_heads must be a multiple of kv_num_heads ({heads}), got {q_num_heads}")
    expect_range("chunk_size", chunk_size, 1)
    if isinstance(scale, bool) or not isinstance(scale, float | int):
        raise ArgumentError(f"scale must be a number, got {scale!r}")
    if update_rule not in _RULES:
        raise ArgumentError(f"update_rule must be one of {', '.join(_RULES)}, got {update_rule!r}")
    sizes = expect("query", query, "B T Q", dtype=FLOAT_DTYPES)
    key_dim = _dim("query", query, q_num_heads)
    batch, count, device = sizes["B"], sizes["T"], query.device
    new = {"B": batch, "T": count}
    expect("key", key, "B T F", dtype=query.dtype, device=device, **new, F=heads * key_dim)
    expect("value", value, "B T F", dtype=query.dtype, device=device, **new)
    value_dim = _dim("value", value, heads)
    if past_state is not None:
        shape = {"B": batch, "H": heads, "K": key_dim, "V": value_dim}
        expect("past_state", past_state, "B H K V", dtype=FLOAT_DTYPES, device=device, **shape)
    for name, x, rules, widths in (
        ("decay", decay, _GATED, (heads, heads * key_dim)),
        ("beta", beta, _DELTA, (heads, 1)),
    ):
        if (x is not None) != (update_rule in rules):
            wanted = "a tensor" if x is None else "None"
            raise ArgumentError(f"{name} must be {wanted} for update_rule {update_rule!r}")
        if x is not None:
            expect(name, x, "B T F", dtype=query.dtype, device=device, **new)
            if x.shape[2] not in widths:
                raise ShapeError(f"{name} must be {widths[0]} or {widths[1]} wide, got {list(x.shape)}")

    size = min(chunk_size, count)
    spans = heads * size * (size + 1) * (1 if decay is None else decay.shape[2] // heads)
    elements = q_num_heads * count * (key_dim + value_dim) + heads * key_dim * value_dim + 3 * spans
    expect_memory("output", min(4 * batch * elements, INT64_END - 1), device)
    dtype = query.dtype if past_state is None else past_state.dtype
    if past_state is None:
        past_state = query.new_zeros(batch, heads, key_dim, value_dim)
    state = past_state.unsqueeze(2).to(torch.float32, copy=True)
    factor = 1.0 / math.sqrt(key_dim) if scale == 0.0 else float(scale)
    output = query.new_empty(batch, count, q_num_heads * value_dim)
    for first in range(0, count, chunk_size):
        tokens = slice(first, first + chunk_size)
        rows, state = attend_chunk(
            _of_chunk(query, tokens, heads, q_num_heads // heads) * factor,
            _of_chunk(key, tokens, heads),
            _of_chunk(value, tokens, heads),
            state,
            None if decay is None else _of_chunk(decay, tokens, heads),
            None if beta is None else _of_chunk(beta, tokens, beta.shape[2]),
        )
        output[:, tokens] = rows.permute(0, 3, 1, 2, 4).flatten(2)
    return output, state.squeeze(2).to(dtype)


def _dim(name: str, x: Tensor, heads: int) -> int:
    """Number of elements of each head; heads are concatenated on the last axis."""
    if x.shape[2] == 0 or x.shape[2] % heads:
        raise ShapeError(f"{name} must be a positive multiple of {heads} wide, got {list(x.shape)}")
    return x.shape[2] // heads


def _of_chunk(x: Tensor, tokens: slice, heads: int, group: int = 1) -> Tensor:
    """Copy a chunk to ``[B, heads, group, C, D]`` in float32: bits do not depend on its place in memory."""
    found = x[:, tokens].unflatten(2, (heads, group, -1)).permute(0, 2, 3, 1, 4)
    return torch.empty(found.shape, dtype=torch.float32, device=x.device).copy_(found)
