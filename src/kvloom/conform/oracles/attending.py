"""ONNX ``Attention`` with a cache and ``com.microsoft`` ``GroupQueryAttention``, one score at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvloom.conform.oracles.paged import concatenated, words

Sees = Callable[[int, int, int], bool]
"""Whether query i of row b sees key j."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, sees: Sees, bias: Tensor | None
) -> Tensor:
    """Attention of ``[B, Hq, S, D]`` over ``[B, H, M, D]`` in float64; a row that sees nothing is zero."""
    batch, heads, count, _ = q.shape
    q64, k64, v64 = (x.double() for x in (q, k, v))
    out = torch.zeros(batch, heads, count, v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv_head = h * k.shape[1] // heads
            for i in range(count):
                seen = [j for j in range(k.shape[2]) if sees(b, i, j)]
                scores = []
                for j in seen:
                    score = math.fsum((q64[b, h, i] * k64[b, kv_head, j]).tolist()) * scale
                    if softcap:
                        score = softcap * math.tanh(score / softcap)
                    if bias is not None:
                        score += float(bias.expand(batch, heads, count, -1)[b, h, i, j])
                    scores.append(score)
                largest = max(scores, default=-math.inf)
                if largest == -math.inf:
                    continue
                weights = [math.exp(score - largest) for score in scores]
                total = math.fsum(weights)
                for j, weight in zip(seen, weights, strict=True):
                    out[b, h, i] += weight / total * v64[b, kv_head, j]
    return out


def onnx_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> dict[str, Tensor]:
    """``Attention`` with four-dimensional inputs; ``present`` is past and new tokens, concatenated."""
    past = 0 if past_key is None else past_key.shape[2]
    key = K if past_key is None else concatenated([past_key, K], 2)
    value = V if past_value is None else concatenated([past_value, V], 2)
    lengths = [key.shape[2]] * len(Q) if nonpad_kv_seqlen is None else nonpad_kv_seqlen.tolist()

    def sees(b: int, i: int, j: int) -> bool:
        offset = past if nonpad_kv_seqlen is None else lengths[b] - Q.shape[2]
        return j < lengths[b] and (not is_causal or j <= i + offset)

    factor = 1.0 / math.sqrt(Q.shape[3]) if scale is None else scale
    found = {"Y": attend(Q, key, value, factor, softcap, sees, attn_mask)}
    if past_key is not None:
        found |= {"present_key": key, "present_value": value}
    return found


def quantized(x: float, scale: float, bits: int) -> int:
    """Code of ``x``: the quotient in float32, rounded to the nearest, ties to even."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    quotient = float(torch.tensor(x, dtype=torch.float32) / torch.tensor(scale, dtype=torch.float32))
    code: int = max(low, min(high, round(quotient)))
    return code


def group_query_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    local_window_size: int = -1,
    k_quant_type: str = "NONE",
    v_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
) -> dict[str, Tensor]:
    """``GroupQueryAttention``: row b has ``seqlens_k[b] + 1`` tokens; slots after them are unchanged or 0."""
    batch, count = query.shape[:2]
    dim = query.shape[2] // num_heads
    lengths = [n + 1 for n in seqlens_k.tolist()]
    q = query.view(batch, count, num_heads, dim).transpose(1, 2)
    found: dict[str, Tensor] = {}
    read = []
    for name, new, past, scales in (
        ("present_key", key, past_key, k_scale),
        ("present_value", value, past_value, v_scale),
    ):
        present = past.clone()
        padding = torch.zeros(present.shape, dtype=torch.bool)
        rows = new.view(batch, count, kv_num_heads, dim)
        for b, length in enumerate(lengths):
            for i in range(count):
                for h in range(kv_num_heads):
                    at = (b, h, length - count + i)
                    if scales is None:
                        words(present)[at] = words(rows)[b, i, h]
                    else:
                        present[at] = _codes(rows[b, i, h], scales, h, kv_cache_bit_width)
            padding[b, :, length:] = True
        found |= {name: present, f"{name}@padding": padding}
        read.append(present if scales is None else _dequantized(present, scales, kv_cache_bit_width))

    def sees(b: int, i: int, j: int) -> bool:
        position = lengths[b] - count + i
        return j <= position and (local_window_size < 0 or j > position - local_window_size)

    factor = scale or 1.0 / math.sqrt(dim)
    output = attend(q, read[0], read[1], factor, softcap, sees, None)
    return {"output": output.transpose(1, 2).reshape(batch, count, -1), **found}


def _codes(row: Tensor, scales: Tensor, head: int, bits: int) -> Tensor:
    of = [float(scales.reshape(-1)[0])] * len(row) if scales.numel() == 1 else scales[0, head, 0].tolist()
    codes = [quantized(x, s, bits) for x, s in zip(row.float().tolist(), of, strict=True)]
    if bits == 8:
        return torch.tensor(codes, dtype=torch.int8)
    packed = [(codes[d] + 8) | ((codes[d + 1] + 8) << 4) for d in range(0, len(codes), 2)]
    return torch.tensor(packed, dtype=torch.uint8)


def _dequantized(cache: Tensor, scales: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return cache.double() * scales.double()
    nibbles = torch.stack((cache & 15, cache >> 4), dim=-1).flatten(-2)
    return (nibbles.double() - 8) * scales.double()
