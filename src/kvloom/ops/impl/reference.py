"""Reference backend: plain torch on any device, and the specification of the other backends.

Shapes: T tokens, H key/value heads, R query heads for each of them, D head dim; q query and k key positions;
G query heads and F coefficients of a positional bias, K cosines and K sines. Caches are canonical views
``[B, S/s, s, H, D/d, d]``. Values of slots are checked on the CPU, where reading them needs no
synchronization.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.checks import can_read
from kvloom.core.indexing import CacheIndex, check_index, check_new, check_slots, check_starts
from kvloom.core.pairs import arrange as arrange
from kvloom.core.views import Side, raw, sides_of, slot_stride
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops.impl import by_sequence
from kvloom.quant import rotation, smoothing
from kvloom.quant.affine import dequantize, quantize

NUM_SHARED: Final = 18
"""Number of arguments after the query that all attention operators have."""
_FLOAT32 = torch.finfo(torch.float32)


def store(
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    full_range: bool = False,
) -> None:
    """Write row t of ``key`` and ``value`` to slot ``slots[t]``; a negative slot skips the row."""
    keys, values = sides_of(key_cache, value_cache, key_scale, value_scale)
    slots = _checked(slots, key_cache, "slots", skip_negative=True)
    if not (can_read(slots) and bool((slots >= 0).all())):
        keep = (slots >= 0).nonzero().squeeze(1)
        slots, key = slots[keep], raw(key)[keep].view(key.dtype)
        value = None if value is None else raw(value)[keep].view(value.dtype)
    _store_side(key, slots, keys, full_range)
    if value is not None and values is not None:
        _store_side(value, slots, values, full_range)


def store_transformed(key: Tensor, value: Tensor | None, slots: Tensor, *args: Any) -> None:
    """``store`` of ``transformed`` keys and values; arguments of ``store``, then of ``transformed``."""
    key, value = transformed(key, value, *args[5:])
    store(key, value, slots, *args[:5])


def transformed(
    key: Tensor,
    value: Tensor | None,
    key_block: int,
    value_block: int,
    positions: Tensor | None,
    factor: Tensor | None,
    mean: Tensor | None,
    channels: Tensor | None,
    frequencies: Tensor | None,
    *,
    is_restored: bool = False,
    operators: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Smooth keys, if there is a factor; rotate keys and values, if their blocks are not 0.

    ``is_restored`` inverts this, with the inverse of the factor. ``operators`` smooth and rotate instead of
    those of the reference.
    """
    own_smooth, own_rotate = operators or (smooth, rotate)
    if factor is not None:
        key = own_smooth(key, positions, factor, mean, channels, frequencies, key_block, is_restored)
    elif key_block:
        key = own_rotate(key, key_block)
    if value is not None and value_block and value.shape[-1]:
        value = own_rotate(value, value_block)
    return key, value


@by_sequence
def load(
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    dtype: torch.dtype,
    num_repeat: int,
) -> tuple[Tensor, Tensor]:
    """Read slot ``slots[t]`` to row t, dequantized, each head repeated ``num_repeat`` times in a row.

    Slots ``[B, N]`` are read to ``[B, H, N, D]``.
    """
    keys, values = sides_of(key_cache, value_cache, key_scale, value_scale)
    slots = _checked(slots, key_cache, "slots")
    key = _load_side(slots, keys, dtype)
    value = key.new_empty((*key.shape[:2], 0)) if values is None else _load_side(slots, values, dtype)
    if num_repeat == 1:
        return key, value
    return key.repeat_interleave(num_repeat, dim=1), value.repeat_interleave(num_repeat, dim=1)


def load_transformed(slots: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
    """``load``, then the inverse of ``transformed``; arguments of ``load`` but the last, then of that."""
    return transformed(*load(slots, *args[:5], 1), *args[5:], is_restored=True)


def copy(sources: list[Tensor], source_slots: Tensor, targets: list[Tensor], target_slots: Tensor) -> None:
    """Copy slot ``source_slots[t]`` of each source to ``target_slots[t]`` of its target; reads come first."""
    source_slots = _checked(source_slots, sources[0], "source_slots")
    target_slots = _checked(target_slots, targets[0], "target_slots")
    rows = [_gather(source, source_slots) for source in sources]
    for target, row in zip(targets, rows, strict=True):
        _scatter(target, target_slots, row.flatten(2))


def is_by_token(x: Tensor) -> bool:
    """Whether the heads of a token are adjacent in memory in ``[B, H, N, D]``, as in a model's output."""
    return x.dim() == 4 and x.shape[2] > 1 and x.stride(1) < x.stride(2)


def rotate(x: Tensor, block: int) -> Tensor:
    """Multiply blocks of head vectors by a Hadamard matrix."""
    return rotation.rotate(x, block)


def smooth(key: Tensor, *arguments: Any) -> Tensor:
    """Smooth keys, or invert it; the memory order of heads and tokens is that of ``key``."""
    result: Tensor = smoothing.smooth(key, *arguments)
    if is_by_token(key):
        return result.transpose(1, 2).contiguous().transpose(1, 2)
    return result.contiguous()


def smooth_query(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Queries for smoothed keys, and the coefficients of their positional bias."""
    found: tuple[Tensor, Tensor] = smoothing.smooth_query(query, *arguments)
    return found


def attend(query: Tensor, *arguments: Any) -> Tensor:
    """Softmax attention of each sequence's new tokens over its stored ones, float32 inside."""
    own, bias = arguments[:NUM_SHARED], arguments[NUM_SHARED:]
    return _attend(query, *own, bias=bias)[0].to(query.dtype)


def attend_part(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """``attend`` over some of the stored tokens, in float32, merged with an earlier part."""
    own, (skip, skip_from, prior, prior_lse, *bias) = arguments[:NUM_SHARED], arguments[NUM_SHARED:]
    out, lse = _attend(query, *own, skip=skip, skip_from=skip_from, bias=bias)
    return _merged(out, lse, prior, prior_lse)


def attend_latent(query: Tensor, *arguments: Any) -> Tensor:
    """``attend`` to latents and rope keys: a key is a latent followed by a rope key, its value the latent."""
    return _attend(query, *arguments, bias=(), is_latent=True)[0].to(query.dtype)


def attend_latent_part(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """``attend_part`` to latents and rope keys."""
    own, (skip, skip_from, prior, prior_lse) = arguments[:NUM_SHARED], arguments[NUM_SHARED:]
    out, lse = _attend(query, *own, skip=skip, skip_from=skip_from, bias=(), is_latent=True)
    return _merged(out, lse, prior, prior_lse)


def _merged(
    out: Tensor, lse: Tensor, prior: Tensor | None, prior_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    if prior is None or prior_lse is None:
        return out, lse
    top = torch.maximum(lse, prior_lse)
    weights = [(x - top.masked_fill(top == float("-inf"), 0.0)).exp() for x in (lse, prior_lse)]
    total = weights[0] + weights[1]
    merged = torch.zeros_like(out)
    for weight, x in zip(weights, (out, prior), strict=True):
        share = weight / total.masked_fill(total == 0, 1.0)
        merged += torch.where(share.unsqueeze(-1) == 0, 0.0, x * share.unsqueeze(-1))
    return merged, top + total.log()


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    table: Tensor,
    row_starts: Tensor | None,
    page_size: int,
    seqstarts: Tensor,
    kvstarts: Tensor,
    decoding_batches: int,
    first_visible: Tensor | None,
    scale: float,
    is_causal: bool,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    skip: int | None = None,
    skip_from: Tensor | None = None,
    bias: Sequence[Any],
    is_latent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Result of ``attend`` in float32, ``[Tq, Hq, Dv]``, and the logarithm of each sum, ``[Tq, Hq]``."""
    index = CacheIndex(table, row_starts, page_size)
    seq, kv = seqstarts.tolist(), kvstarts.tolist()
    check_starts("seqstarts", seq)
    check_starts("kvstarts", kv)
    if seq[-1] != query.shape[0]:
        raise ArgumentError(f"seqstarts must end with the {query.shape[0]} rows of query, got {seq[-1]}")
    if mask is not None and mask.shape[-1] < kv[-1]:
        raise ShapeError(f"mask must have at least {kv[-1]} columns, got {mask.shape[-1]}")
    new, stored = ([stop - start for start, stop in pairwise(starts)] for starts in (seq, kv))
    causal = [alibi_slopes is not None or (is_causal and b >= decoding_batches) for b in range(len(new))]
    positioned = window is not None or skip is not None
    check_new("kvstarts", new, stored, [positioned or x for x in causal])
    if softcap is not None:  # must be neither 0 nor infinite in float32
        softcap = min(max(softcap, _FLOAT32.tiny), _FLOAT32.max)
    if can_read(kvstarts):
        check_index("index", index, kvstarts.diff(), key_cache.shape[:3].numel())
    keys, values = Side(key_cache, key_scale), Side(value_cache, value_scale)
    value_dim = (keys if is_latent else values).head_dim
    out = query.new_empty((*query.shape[:2], value_dim), dtype=torch.float32)
    lse = out.new_empty(query.shape[:2])
    for b, (num_new, num_stored) in enumerate(zip(new, stored, strict=True)):
        rows, columns = slice(seq[b], seq[b + 1]), slice(kv[b], kv[b + 1])
        if num_new == 0:
            continue
        k_pos = torch.arange(num_stored, device=query.device)
        slots = _checked(index.slots(torch.full_like(k_pos, b), k_pos), key_cache, "index")
        key, value = (_load_side(slots, side, query.dtype) for side in (keys, values))
        if is_latent:
            key, value = torch.cat((key, value), dim=-1), key
        num_kv_heads = key.shape[1]
        q_HRqD = query[rows].float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        k_HkD, v_HkD = key.float().transpose(0, 1), value.float().transpose(0, 1)
        scores_HRqk = torch.matmul(q_HRqD.flatten(1, 2), k_HkD.mT).unflatten(1, (-1, num_new))
        if bias:
            coefficients, frequencies, first_position = bias
            position_k = k_pos if first_position is None else k_pos + first_position[b]
            scores_HRqk = scores_HRqk + _positional_bias(coefficients[rows], frequencies, position_k)
        scores_HRqk = scores_HRqk * scale
        if softcap is not None:
            scores_HRqk = softcap * torch.tanh(scores_HRqk / softcap)
        q_pos = torch.arange(num_stored - num_new, num_stored, device=query.device)
        distance_qk = k_pos - q_pos.unsqueeze(1)
        if mask is not None:
            block = mask[..., rows, columns].float()
            scores_HRqk = scores_HRqk + (block.unflatten(0, (num_kv_heads, -1)) if block.ndim == 3 else block)
        if alibi_slopes is not None:
            scores_HRqk = scores_HRqk + alibi_slopes.float().view(num_kv_heads, -1, 1, 1) * distance_qk
        hidden = torch.zeros_like(distance_qk, dtype=torch.bool)
        if causal[b]:
            hidden |= distance_qk > 0
        if window is not None:
            hidden |= distance_qk <= -window
        if first_visible is not None:
            hidden |= k_pos < first_visible[b]
        if skip is not None:
            hidden |= (distance_qk > -skip) & (k_pos >= (0 if skip_from is None else skip_from[b]))
        probs_HRqk, lse_HRq = _softmax(scores_HRqk.masked_fill(hidden, float("-inf")), sinks)
        out_HRqD = _weigh(probs_HRqk.flatten(1, 2), v_HkD).unflatten(1, (-1, num_new))
        out[rows] = out_HRqD.permute(2, 0, 1, 3).flatten(1, 2)
        lse[rows] = lse_HRq.flatten(0, 1).mT
    return out, lse


def _positional_bias(coefficients_qGF: Tensor, frequencies_HK: Tensor, position_k: Tensor) -> Tensor:
    """Bias ``[H, R, q, k]``: coefficients times the cosines and sines of the angles at each position."""
    angle_HkK = frequencies_HK.double().unsqueeze(1) * position_k.double().unsqueeze(1)
    waves_HkF = torch.cat((angle_HkK.cos(), angle_HkK.sin()), dim=-1).float()
    by_head_HRqF = coefficients_qGF.float().unflatten(1, (frequencies_HK.shape[0], -1)).permute(1, 2, 0, 3)
    return torch.matmul(by_head_HRqF, waves_HkF.mT.unsqueeze(1))


def _softmax(scores_HRqk: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over k with each head's sink, and log-sum-exp; a row without visible tokens is 0, not NaN.

    The logarithm of the sum, ``[H, R, q]``, is -inf for such a row, NaN if a score is NaN or infinite.
    """
    num_kv_heads, _, num_new, _ = scores_HRqk.shape
    if sinks is not None:
        column = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_new, 1)
        scores_HRqk = torch.cat((scores_HRqk, column), dim=-1)
    if scores_HRqk.shape[-1] == 0:
        return scores_HRqk, scores_HRqk.new_full(scores_HRqk.shape[:-1], float("-inf"))
    top = scores_HRqk.amax(-1, keepdim=True)
    weights = (scores_HRqk - top.masked_fill(top == float("-inf"), 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    probs = weights / total.masked_fill(total == 0, 1.0)
    lse = (top + total.log()).squeeze(-1)
    return probs if sinks is None else probs[..., :-1], lse


def _weigh(probs_HqK: Tensor, v_HKD: Tensor) -> Tensor:
    """Weighted sum of values. A weight of 0 hides even NaN; a row that sees NaN or infinity is NaN."""
    nonfinite = ~v_HKD.isfinite()
    if not bool(nonfinite.any()):
        return torch.matmul(probs_HqK, v_HKD)
    out = torch.matmul(probs_HqK, v_HKD.masked_fill(nonfinite, 0.0))
    seen = torch.matmul((probs_HqK != 0).float(), nonfinite.float()) > 0
    return out.masked_fill(seen, float("nan"))


def _store_side(x: Tensor, slots: Tensor, side: Side, full_range: bool) -> None:
    if side.scale is None:
        _scatter(side.cache, slots, x.to(side.cache.dtype))
        return
    codes, scales = quantize(x, side.bits, side.group, side.scale.dtype, full_range)
    _scatter(side.cache, slots, codes)
    _scatter(side.scale, slots, scales)


def _load_side(slots: Tensor, side: Side, dtype: torch.dtype) -> Tensor:
    stored = _gather(side.cache, slots).flatten(2)
    if side.scale is None:
        return stored.to(dtype)
    return dequantize(stored, _gather(side.scale, slots).flatten(2), side.bits, dtype)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Copy rows ``[T, H, D/d, d]`` of a canonical view."""
    bits = raw(cache)
    rows = _as_rows(bits)
    found = bits[_place(bits, slots)] if rows is None else rows.index_select(0, slots)
    # The same order in memory for every layout, so that later arithmetic has the same bits.
    return found.contiguous().view(cache.dtype)


def _scatter(cache: Tensor, slots: Tensor, x_THD: Tensor) -> None:
    bits, values = raw(cache), raw(x_THD).unflatten(-1, cache.shape[-2:])
    rows = _as_rows(bits)
    if rows is None:
        bits[_place(bits, slots)] = values
    else:
        rows[slots.long()] = values


def _as_rows(cache: Tensor) -> Tensor | None:
    """View as ``[B * S, H, D/d, d]`` if blocks and slots have one stride, or ``None``."""
    return None if slot_stride(cache) is None else cache.view(cache.shape[:3].numel(), *cache.shape[3:])


def _place(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Block, outer and inner slot of each slot number."""
    _, outer, inner = cache.shape[:3]
    within = slots.long() % (outer * inner)
    return slots.long() // (outer * inner), within // inner, within % inner


def _checked(slots: Tensor, cache: Tensor, name: str, *, skip_negative: bool = False) -> Tensor:
    """Check slots and return a copy, which another thread cannot change after the check."""
    slots = slots.clone()
    if can_read(slots):
        check_slots(name, slots, cache.shape[:3].numel(), skip_negative=skip_negative)
    return slots
