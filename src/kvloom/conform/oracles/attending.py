"""ONNX ``Attention`` with a cache and ``com.microsoft`` ``GroupQueryAttention``, one score at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvloom.conform.oracles.paged import concatenated, words

Sees = Callable[[int, int, int], bool]
"""Whether query i of row b sees key j."""


class Attended(NamedTuple):
    """Output of attention, and its scores ``[B, Hq, S, M]`` after each stage, in float64.

    Attributes:
        output: ``[B, Hq, S, Dv]``; a row that sees nothing is zero.
        raw: Products of queries and keys, scaled.
        capped: The same after the softcap.
        masked: With the bias; -inf where a query does not see a key.
        weights: After the softmax; a row that sees nothing is zero.
    """

    output: Tensor
    raw: Tensor
    capped: Tensor
    masked: Tensor
    weights: Tensor


def attend_in_float64(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, sees: Sees, bias: Tensor | None
) -> Attended:
    """Attention of ``[B, Hq, S, D]`` over ``[B, H, M, D]`` in float64."""
    (batch, heads, count, _), width = q.shape, k.shape[2]
    q64, k64, v64 = (x.double() for x in (q, k, v))
    out = torch.zeros(batch, heads, count, v.shape[3], dtype=torch.float64)
    raw, capped, masked, weights = torch.zeros(4, batch, heads, count, width, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv_head = h * k.shape[1] // heads
            for i in range(count):
                for j in range(width):
                    score = math.fsum((q64[b, h, i] * k64[b, kv_head, j]).tolist()) * scale
                    raw[b, h, i, j] = score
                    if softcap:
                        score = softcap * math.tanh(score / softcap)
                    capped[b, h, i, j] = score
                    if bias is not None:
                        score += float(bias[b, h, i, j])
                    masked[b, h, i, j] = score if sees(b, i, j) else -math.inf
                scores = masked[b, h, i].tolist()
                largest = max(scores, default=-math.inf)
                if largest == -math.inf:
                    continue
                exponentials = [math.exp(score - largest) for score in scores]
                total = math.fsum(exponentials)
                for j, each in enumerate(exponentials):
                    if each:
                        weights[b, h, i, j] = each / total
                        out[b, h, i] += each / total * v64[b, kv_head, j]
    return Attended(out, raw, capped, masked, weights)


def added(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """What ``attn_mask`` adds to each score; False, and keys beyond its last one, are -inf."""
    bias = torch.zeros(mask.shape).masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask
    missing = torch.full((*mask.shape[:-1], shape[3] - mask.shape[-1]), -math.inf, dtype=torch.float64)
    return torch.cat((bias.double(), missing), dim=-1).expand(shape)


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
    qk_matmul_output_mode: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> dict[str, Tensor]:
    """``Attention`` with four-dimensional inputs; ``present`` is past and new tokens, concatenated."""
    past = 0 if past_key is None else past_key.shape[2]
    key = K if past_key is None else concatenated([past_key, K], 2)
    value = V if past_value is None else concatenated([past_value, V], 2)
    lengths = [key.shape[2]] * len(Q) if nonpad_kv_seqlen is None else nonpad_kv_seqlen.tolist()

    def sees(b: int, i: int, j: int) -> bool:
        position = i + (past if nonpad_kv_seqlen is None else lengths[b] - Q.shape[2])
        return (
            j < lengths[b]
            and (not is_causal or j <= position)
            and (left_window_size < 0 or j >= position - left_window_size)
            and (right_window_size < 0 or j <= position + right_window_size)
        )

    factor = 1.0 / math.sqrt(Q.shape[3]) if scale is None else scale
    shape = (*Q.shape[:3], key.shape[2])
    bias = None if attn_mask is None else added(attn_mask, shape)
    attended = attend_in_float64(Q, key, value, factor, softcap, sees, bias)
    found = {"Y": attended.output}
    if past_key is not None:
        found |= {"present_key": key, "present_value": value}
    if qk_matmul_output_mode is not None:
        found["qk_matmul_output"] = attended[1 + qk_matmul_output_mode]
    return found


def quantized(x: float, scale: float, bits: int) -> int:
    """Code of ``x``: ``x * (1 / scale)``, both rounded to float32, to the nearest, ties to even.

    Beyond the codes it is the last one, for NaN the highest.
    """
    high: int = 2 ** (bits - 1) - 1
    inverse = 1 / torch.tensor(scale, dtype=torch.float32)
    product = float(torch.tensor(x, dtype=torch.float32) * inverse)
    return high if math.isnan(product) else round(max(-high - 1, min(high, product)))


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
    """``GroupQueryAttention``: row b has ``seqlens_k[b] + 1`` tokens.

    A call whose total length is that of the new tokens is a first prompt, padded on the right: padding is
    stored, too, and its queries attend to tokens alone. Slots after what is stored are unchanged or 0.
    """
    batch, count = query.shape[:2]
    dim = query.shape[2] // num_heads
    lengths = [n + 1 for n in seqlens_k.tolist()]
    is_first = int(total_sequence_length) == count
    firsts = [0 if is_first else length - count for length in lengths]
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
        for b, first in enumerate(firsts):
            for i in range(count):
                for h in range(kv_num_heads):
                    at = (b, h, first + i)
                    if scales is None:
                        words(present)[at] = words(rows)[b, i, h]
                    else:
                        present[at] = _codes(rows[b, i, h], scales, h, kv_cache_bit_width)
            padding[b, :, first + count :] = True
        found |= {name: present, f"{name}@padding": padding}
        read.append(present if scales is None else _dequantized(present, scales, kv_cache_bit_width))

    def sees(b: int, i: int, j: int) -> bool:
        position = firsts[b] + i
        is_near = local_window_size < 0 or j > position - local_window_size
        return j < lengths[b] and j <= position and is_near

    factor = scale or 1.0 / math.sqrt(dim)
    output = attend_in_float64(q, read[0], read[1], factor, softcap, sees, None).output
    return {"output": output.transpose(1, 2).reshape(batch, count, -1), **found}


def _codes(row: Tensor, scales: Tensor, head: int, bits: int) -> Tensor:
    one = scales.numel() == 1
    of = [float(scales.reshape(-1)[0])] * len(row) if one else scales.reshape(-1, len(row))[head].tolist()
    codes = [quantized(x, s, bits) for x, s in zip(row.float().tolist(), of, strict=True)]
    if bits == 8:
        return torch.tensor(codes, dtype=torch.int8)
    pairs = zip(codes[::2], codes[1::2], strict=True)
    return torch.tensor([packed(even, odd) for even, odd in pairs], dtype=torch.uint8)


def packed(even: int, odd: int) -> int:
    """Byte of the codes of an even element and of the next one."""
    return (even + 8) | ((odd + 8) << 4)


def unpacked(cache: Tensor) -> Tensor:
    """Codes in bytes, in float64."""
    return torch.stack((cache & 15, cache >> 4), dim=-1).flatten(-2).double() - 8


def _dequantized(cache: Tensor, scales: Tensor, bits: int) -> Tensor:
    return (cache.double() if bits == 8 else unpacked(cache)) * scales.double()
