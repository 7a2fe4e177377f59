"""Oracles of the PMX and OPMX operators: slow, obvious, and written from their documents alone.

Explicit loops over entries, tokens, heads and groups; every function is pure and returns a new cache. Imports
nothing from the library, so that the two do not share mistakes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

SMALLEST_SCALE = 1e-5

STATIC_AXES = {0: "BLKSHD", 1: "LBKHSD"}
DYNAMIC_AXES = {0: "TLKHD", 1: "LTKHD", 2: "LKTHD", 3: "LKHTD"}
FUSED_AXES = {"pmx": {0: "TLKHD", 1: "LTKHD", 2: "LHTKD", 3: "KLHTD"}, "opmx": DYNAMIC_AXES}


class PmxStored(NamedTuple):
    """Result of ``key_value_cache``, and the updated cache and scale."""

    key: Tensor
    value: Tensor
    cache: Tensor
    scale: Tensor | None


class PmxAttended(NamedTuple):
    """Result of attention: ``output`` in float64; loaded ``key`` and ``value`` in the input's dtype."""

    output: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor
    scale: Tensor | None


# --- one vector ---------------------------------------------------------------------------------------------


def saturated(x: Tensor) -> Tensor:
    """``x`` with infinities replaced by the largest finite value; NaN stays."""
    limit = torch.finfo(x.dtype).max
    return x.clamp(-limit, limit)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest value of ``dtype``; every NaN becomes the canonical quiet one."""
    return torch.where(x.isnan(), torch.tensor(float("nan"), dtype=dtype), x.to(dtype))


def quantize_group(x: Tensor, bit: int) -> tuple[list[int], Tensor]:
    """Codes and scale of one group; scale and quotient are each rounded to the dtype of ``x``."""
    if not bool(torch.isfinite(x).all()):
        return [0] * x.numel(), torch.tensor(float("nan"), dtype=x.dtype)
    qmax = 2 ** (bit - 1) - 1
    exact = x.to(torch.float64)
    by_range = rounded(exact.abs().max() / qmax, x.dtype)
    smallest = rounded(torch.tensor(SMALLEST_SCALE, dtype=torch.float64), x.dtype)
    scale = torch.maximum(by_range, smallest)
    quotient = rounded(exact / scale.to(torch.float64), x.dtype)
    codes = [max(-qmax, min(qmax, round(q))) for q in quotient.tolist()]  # round(): ties to even
    return codes, scale


def dequantize_group(codes: list[int], scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``codes * scale`` in the dtype of the scale, then in ``dtype``, finite if the scale is."""
    as_stored = torch.tensor(codes).to(scale.dtype)
    product = saturated(rounded(as_stored.to(torch.float64) * scale.to(torch.float64), scale.dtype))
    return saturated(rounded(product, dtype))


def pack_nibbles(codes: list[int]) -> list[int]:
    """Pack two signed 4-bit codes into a byte, the even element in the low nibble."""
    return [(codes[2 * j] & 0xF) | ((codes[2 * j + 1] & 0xF) << 4) for j in range(len(codes) // 2)]


def unpack_nibbles(packed: list[int]) -> list[int]:
    """Inverse of ``pack_nibbles``."""
    codes = []
    for byte in packed:
        for nibble in (byte & 0xF, byte >> 4):
            codes.append((nibble ^ 8) - 8)
    return codes


def store_vector(
    x: Tensor, cache: Tensor, scale: Tensor | None, at: tuple[int, ...], bit: int, group: int
) -> None:
    """Write the head vector ``x`` at index ``at`` of the working copies ``cache`` and ``scale``."""
    if bit == 0:
        cache[at] = x.to(cache.dtype)
        return
    assert scale is not None
    codes: list[int] = []
    for g in range(x.numel() // group):
        part, part_scale = quantize_group(x[g * group : (g + 1) * group], bit)
        codes += part
        place = (*at, g)
        scale[place] = saturated(rounded(part_scale, scale.dtype))
    if bit == 4:
        cache[at] = torch.tensor(pack_nibbles(codes), dtype=torch.uint8)
    else:
        cache[at] = torch.tensor(codes, dtype=torch.int8)


def load_vector(
    cache: Tensor, scale: Tensor | None, at: tuple[int, ...], bit: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Read the head vector at index ``at`` as ``dtype``."""
    if bit == 0:
        return cache[at].to(dtype)
    assert scale is not None
    stored = cache[at].tolist()
    codes = unpack_nibbles(stored) if bit == 4 else stored
    parts = []
    for g in range(len(codes) // group):
        place = (*at, g)
        parts.append(dequantize_group(codes[g * group : (g + 1) * group], scale[place], dtype))
    return torch.cat(parts)


def index_of(axes: str, **coordinates: int) -> tuple[int, ...]:
    """Index of one head vector in a tensor with named axes, D last."""
    assert axes[-1] == "D"
    return tuple(coordinates[axis] for axis in axes[:-1])


# --- KeyValueCache, static ----------------------------------------------------------------------------------


def key_value_cache(
    current_key: Tensor,
    current_value: Tensor,
    start_pos: int | Tensor,
    cache: Tensor,
    scale: Tensor | None = None,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    num_repeat: int = 1,
    cache_layout: int = 0,
) -> PmxStored:
    """Document 000."""
    axes = STATIC_AXES[cache_layout]
    cache, scale = _copies(cache, scale)
    start = int(start_pos)
    batch, num_new, heads, head_dim = current_key.shape
    total = start + num_new
    for n in range(batch):
        for i in range(num_new):
            for h in range(heads):
                for side, current in enumerate((current_key, current_value)):
                    at = index_of(axes, B=n, L=layer_idx, K=side, S=start + i, H=h)
                    store_vector(current[n, i, h], cache, scale, at, quant_bit, quant_group)
    out = [torch.zeros(batch, total, heads * num_repeat, head_dim, dtype=current_key.dtype) for _ in range(2)]
    for n in range(batch):
        for j in range(total):
            for h in range(heads):
                for side in range(2):
                    at = index_of(axes, B=n, L=layer_idx, K=side, S=j, H=h)
                    x = load_vector(cache, scale, at, quant_bit, quant_group, current_key.dtype)
                    for r in range(num_repeat):
                        out[side][n, j, h * num_repeat + r] = x
    return PmxStored(out[0], out[1], cache, scale)


# --- dynamic_batching.KeyValueCache -------------------------------------------------------------------------


def slot_of(
    b: int, t: int, cachestarts: list[Any], kvstarts: list[int], cache_mode: int, page_size: int
) -> int:
    """Slot of token ``t`` of entry ``b``; reads exactly one element of ``cachestarts``."""
    if cache_mode == 0:
        return int(cachestarts[b] + t)
    is_token_table = not (cachestarts and isinstance(cachestarts[0], list))
    if is_token_table:
        return int(cachestarts[kvstarts[b] + t])
    return int(cachestarts[b][t // page_size] + t % page_size)


def dynamic_key_value_cache(
    current_key: Tensor,
    current_value: Tensor,
    seqstarts: Tensor,
    kvstarts: Tensor,
    cachestarts: Tensor,
    start_pos: Tensor,
    max_seqlen: int | Tensor,
    max_kvlen: int | Tensor,
    cache: Tensor,
    scale: Tensor | None = None,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    num_repeat: int = 1,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
    axes: str | None = None,
) -> PmxStored:
    """Document 001; ``axes`` overrides ``cache_layout`` for the fused operator. The hints are not used."""
    axes = axes or DYNAMIC_AXES[cache_layout]
    cache, scale = _copies(cache, scale)
    seq, kv, starts, positions = (x.tolist() for x in (seqstarts, kvstarts, cachestarts, start_pos))
    _, heads, head_dim = current_key.shape
    batch = len(positions)
    for b in range(batch):
        for i in range(seq[b + 1] - seq[b]):
            slot = slot_of(b, positions[b] + i, starts, kv, cache_mode, page_size)
            for h in range(heads):
                for side, current in enumerate((current_key, current_value)):
                    at = index_of(axes, T=slot, L=layer_idx, K=side, H=h)
                    store_vector(current[seq[b] + i, h], cache, scale, at, quant_bit, quant_group)
    out = [torch.zeros(kv[-1], heads * num_repeat, head_dim, dtype=current_key.dtype) for _ in range(2)]
    for b in range(batch):
        for j in range(kv[b + 1] - kv[b]):
            slot = slot_of(b, j, starts, kv, cache_mode, page_size)
            for h in range(heads):
                for side in range(2):
                    at = index_of(axes, T=slot, L=layer_idx, K=side, H=h)
                    x = load_vector(cache, scale, at, quant_bit, quant_group, current_key.dtype)
                    for r in range(num_repeat):
                        out[side][kv[b] + j, h * num_repeat + r] = x
    return PmxStored(out[0], out[1], cache, scale)


# --- attention ----------------------------------------------------------------------------------------------


def alibi_slopes(num_heads: int) -> list[float]:
    """Slope of each head; heads beyond the largest power of two have the odd steps of the next one."""
    power = 1
    while power * 2 <= num_heads:
        power *= 2
    slopes = [2.0 ** (-8.0 * n / power) for n in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * n / power) for n in range(1, 2 * (num_heads - power), 2)]
    return slopes


def softmax_row(scores: list[float], values: Tensor) -> Tensor | None:
    """Weighted sum of the rows of ``values``; ``None`` for a row that sees nothing."""
    largest = max(scores, default=-math.inf)
    if largest == -math.inf:
        return None
    weights = [math.exp(s - largest) for s in scores]
    total = math.fsum(weights)
    return torch.tensor([w / total for w in weights], dtype=torch.float64) @ values


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seqstarts: Tensor,
    kvstarts: Tensor,
    decoding_batches: int | Tensor,
    max_seqlen: int | Tensor,
    max_kvlen: int | Tensor,
    attn_mask: Tensor | None = None,
    *,
    num_heads: int,
    head_dim: int,
    is_causal: bool,
    is_alibi: bool = False,
    num_kv_heads: int = 0,
) -> Tensor:
    """Softmax attention in float64 of packed queries over packed keys and values."""
    seq, kv = seqstarts.tolist(), kvstarts.tolist()
    per_kv_head = num_heads // (num_kv_heads or num_heads)
    slopes = alibi_slopes(num_heads)
    q64, k64, v64 = (x.to(torch.float64) for x in (query, key, value))
    mask = None
    if attn_mask is not None and attn_mask.numel() > 0:
        mask = attn_mask.to(torch.float64)
    out = torch.zeros(query.shape, dtype=torch.float64)
    for b in range(len(seq) - 1):
        seqlen, kvlen = seq[b + 1] - seq[b], kv[b + 1] - kv[b]
        causal = is_causal and seqlen > 1 and b >= int(decoding_batches)
        for i in range(seqlen):
            position = kvlen - seqlen + i
            for g in range(num_heads):
                keys = k64[kv[b] : kv[b + 1], g // per_kv_head]
                scores = [product / math.sqrt(head_dim) for product in (keys @ q64[seq[b] + i, g]).tolist()]
                for j in range(kvlen):
                    if mask is not None:
                        row_mask = mask[seq[b] + i] if mask.dim() == 2 else mask[g, seq[b] + i]
                        scores[j] += float(row_mask[kv[b] + j])
                    if is_alibi:
                        scores[j] += slopes[g] * (j - position)
                    if j > position and (causal or is_alibi):
                        scores[j] = -math.inf
                row = softmax_row(scores, v64[kv[b] : kv[b + 1], g // per_kv_head])
                if row is not None:
                    out[seq[b] + i, g] = row
    return out


def multi_head_cache_attention(
    query: Tensor,
    current_key: Tensor,
    current_value: Tensor,
    seqstarts: Tensor,
    kvstarts: Tensor,
    cachestarts: Tensor,
    start_pos: Tensor,
    decoding_batches: int | Tensor,
    max_seqlen: int | Tensor,
    max_kvlen: int | Tensor,
    cache: Tensor,
    scale: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    num_heads: int,
    head_dim: int,
    is_causal: bool,
    num_kv_heads: int = 0,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
    is_alibi: bool = False,
    spec: str = "pmx",
) -> PmxAttended:
    """Document 002: store, load without repetition, attend to the loaded tokens."""
    stored = dynamic_key_value_cache(
        current_key=current_key,
        current_value=current_value,
        seqstarts=seqstarts,
        kvstarts=kvstarts,
        cachestarts=cachestarts,
        start_pos=start_pos,
        max_seqlen=max_seqlen,
        max_kvlen=max_kvlen,
        cache=cache,
        scale=scale,
        num_layer=num_layer,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_mode=cache_mode,
        page_size=page_size,
        axes=FUSED_AXES[spec][cache_layout],
    )
    output = multi_head_attention(
        query,
        stored.key,
        stored.value,
        seqstarts,
        kvstarts,
        decoding_batches,
        max_seqlen,
        max_kvlen,
        attn_mask,
        num_heads=num_heads,
        head_dim=head_dim,
        is_causal=is_causal,
        is_alibi=is_alibi,
        num_kv_heads=num_kv_heads,
    )
    return PmxAttended(output, *stored)


def _copies(cache: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return cache.clone(), None if scale is None else scale.clone()
