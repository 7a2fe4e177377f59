"""Oracles of ONNX ``LinearAttention`` and ``CausalConvWithState``, one number at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvloom.conform.oracles.paged import words

State = list[list[float]]
"""Recurrent state of one head, ``[d_k][d_v]``."""


def decayed(state: State, decay: list[float]) -> State:
    """``state`` with row i multiplied by ``exp(decay[i])``."""
    return [[math.exp(g) * x for x in row] for g, row in zip(decay, state, strict=True)]


def retrieved(state: State, key: list[float]) -> list[float]:
    """Value that ``state`` has for ``key``: its transpose times ``key``."""
    return [sum(key[i] * state[i][j] for i in range(len(key))) for j in range(len(state[0]))]


def corrected(state: State, key: list[float], value: list[float], rate: float) -> list[float]:
    """Value that the delta rules write, from the state after its decay."""
    return [rate * (v - r) for v, r in zip(value, retrieved(state, key), strict=True)]


def written(state: State, key: list[float], value: list[float]) -> State:
    """``state`` plus the outer product of ``key`` and ``value``."""
    return [[x + k * v for x, v in zip(row, value, strict=True)] for k, row in zip(key, state, strict=True)]


def advanced(
    state: State, key: list[float], value: list[float], decay: list[float] | None, rate: float | None
) -> State:
    """State after one token."""
    if decay is not None:
        state = decayed(state, decay)
    if rate is not None:
        value = corrected(state, key, value, rate)
    return written(state, key, value)


def read(before: State, after: State, query: list[float], scale: float) -> list[float]:
    """Output of one query head, which sees its own token."""
    return [scale * x for x in retrieved(after, query)]


def query_head_reads(head: int, q_num_heads: int, kv_num_heads: int) -> int:
    """Number of the state that a query head reads."""
    return head // (q_num_heads // kv_num_heads)


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
) -> dict[str, Tensor]:
    """``LinearAttention`` with float64 sums, rounded once at the end; ``chunk_size`` has no effect."""
    assert update_rule in ("linear", "gated", "delta", "gated_delta")
    batch, count, width = query.shape
    d_k, d_v = width // q_num_heads, value.shape[2] // kv_num_heads
    factor = 1.0 / math.sqrt(d_k) if scale == 0.0 else scale
    dtype = query.dtype if past_state is None else past_state.dtype
    output = torch.zeros(batch, count, q_num_heads * d_v, dtype=torch.float64)
    present = torch.zeros(batch, kv_num_heads, d_k, d_v, dtype=torch.float64)

    def of_head(x: Tensor, b: int, t: int, head: int, size: int) -> list[float]:
        found: list[float] = x[b, t, head * size : (head + 1) * size].double().tolist()
        return found

    for b in range(batch):
        for h in range(kv_num_heads):
            state = [[0.0] * d_v for _ in range(d_k)]
            if past_state is not None:
                state = past_state[b, h].double().tolist()
            for t in range(count):
                rate = None
                if update_rule in ("delta", "gated_delta"):
                    assert beta is not None
                    rate = float(beta[b, t, h if beta.shape[2] == kv_num_heads else 0])
                log = None
                if update_rule in ("gated", "gated_delta"):
                    assert decay is not None
                    is_of_head = decay.shape[2] == kv_num_heads
                    log = [float(decay[b, t, h])] * d_k if is_of_head else of_head(decay, b, t, h, d_k)
                before = state
                state = advanced(state, of_head(key, b, t, h, d_k), of_head(value, b, t, h, d_v), log, rate)
                for head in range(q_num_heads):
                    if query_head_reads(head, q_num_heads, kv_num_heads) == h:
                        out = read(before, state, of_head(query, b, t, head, d_k), factor)
                        output[b, t, head * d_v : (head + 1) * d_v] = torch.tensor(out, dtype=torch.float64)
            present[b, h] = torch.tensor(state, dtype=torch.float64)
    return {"output": output.to(query.dtype), "present_state": present.to(dtype)}


def activated(x: float, activation: str) -> float:
    """``x``, or ``x`` times its sigmoid."""
    return x / (1.0 + math.exp(-x)) if activation in ("silu", "swish") else x


def convolved(window: list[float], kernel: list[float], bias: float, activation: str) -> float:
    """Output for the last ``len(kernel)`` inputs; the last weight multiplies the last input."""
    return activated(sum(x * w for x, w in zip(window, kernel, strict=True)) + bias, activation)


def causal_conv_with_state(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
    *,
    activation: str = "none",
) -> dict[str, Tensor]:
    """Cross-correlation, as ``Conv`` with a group for each channel; the state is the last inputs."""
    batch, channels, count = input.shape
    size = weight.shape[2]
    padded = torch.zeros(batch, channels, size - 1 + count, dtype=input.dtype)
    if past_state is not None:
        words(padded)[:, :, : size - 1] = words(past_state)
    words(padded)[:, :, size - 1 :] = words(input)
    output = torch.zeros(batch, channels, count, dtype=torch.float64)
    for b in range(batch):
        for c in range(channels):
            row, kernel = padded[b, c].double().tolist(), weight[c, 0].double().tolist()
            for t in range(count):
                offset = 0.0 if bias is None else float(bias[c])
                output[b, c, t] = convolved(row[t : t + size], kernel, offset, activation)
    present = padded[:, :, padded.shape[2] - (size - 1) :].clone()
    return {"output": output.to(input.dtype), "present_state": present}
