"""Attention by torch over contiguous keys and values: FlashAttention on CUDA devices.

Shapes: R sequences with Q new tokens each, which see N tokens each; H key/value heads, Hq query heads, D head
dim of queries and keys, Dv of values.
"""

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

MAX_WIDTH: Final = 256
"""Largest head dim of FlashAttention."""


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of the last Q of N tokens, each of which sees a token.

    Args:
        query: ``[R, Hq, Q, D]``.
        key: ``[R, H, N, D]``.
        value: ``[R, H, N, Dv]``.
        scale: Factor of the products.
        window: Number of last tokens that a query sees; ``None`` for all.

    Returns:
        ``[R, Q, Hq, Dv]`` in the dtype of ``query``.
    """
    if window is not None or query.shape[2] < key.shape[2]:
        return attention_part(query, key, value, scale, window)[0]
    value_dim, has_groups = value.shape[3], query.shape[1] != key.shape[1]
    query, key, value = _of_one_width(query, key, value)
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=has_groups)
    return out[..., :value_dim].transpose(1, 2)


def attention_part(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """``attention``, and the natural logarithm of each row's sum of weights, ``[R, Q, Hq]`` float32."""
    num_new, num_seen, value_dim = query.shape[2], key.shape[2], value.shape[3]
    query, key, value = _of_one_width(query, key, value)
    if query.is_cuda and window is not None:
        out, lse = _windowed(query, key, value, scale, window)
    elif query.is_cuda:
        # What torch calls for ``causal_lower_right``, which no mode of torch may look at.
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        out, lse = flash(query, key, value, is_causal=True, scale=scale)[:2]
    else:
        position = torch.arange(num_seen, device=query.device)
        behind = position[num_seen - num_new :].unsqueeze(1) - position
        hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
        mask = query.new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = flash(query, key, value, attn_mask=mask, scale=scale)
    return out[..., :value_dim].transpose(1, 2), lse.transpose(1, 2)


def _of_one_width(*sides: Tensor) -> Iterator[Tensor]:
    """Queries, keys and values of one head dim, a multiple of 8, as FlashAttention takes them.

    Zeros add nothing to products, and are cut off from the result.
    """
    width = -(-max(x.shape[3] for x in sides) // 8) * 8
    return (x if x.shape[3] == width else pad(x, (0, width - x.shape[3])) for x in sides)


def _windowed(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Attention ``[R, Hq, Q, D]``, and logarithms ``[R, Hq, Q]``, of queries that see a window."""
    (rows, heads, num_new, _), num_seen = query.shape, key.shape[2]
    if rows * num_new == heads:  # in which order the logarithms are could not be told
        query, key, value = (torch.cat((x, x[:1])) for x in (query, key, value))
        out, lse = _windowed(query, key, value, scale, window)
        return out[:-1], lse[:-1]
    varlen, request = _varlen_attention()
    step = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    sizes = step * num_new, step * num_seen, num_new, num_seen
    # Its window counts the tokens before a query's own.
    how = {"scale": scale, "window_size": (window - 1, 0), "enable_gqa": heads != key.shape[1]}
    out, lse = varlen(*packed, *sizes, **how, return_aux=request)
    # The kernel writes a row of logarithms for each head; its documentation has a row for each token.
    lse = lse if lse.shape[0] == heads else lse.mT
    by_sequence = lse.unflatten(1, (rows, num_new)).transpose(0, 1)
    return out.view(rows, num_new, *out.shape[1:]).transpose(1, 2), by_sequence


def why_not_on_cuda(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, is_windowed: bool
) -> str | None:
    """Reason why FlashAttention, without which torch computes all scores, cannot run; ``None`` if it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention has no {dtype}"
    if head_dim > MAX_WIDTH:
        return f"FlashAttention has head dims up to {MAX_WIDTH}"
    if not _has_flash_attention(device):
        return "FlashAttention is not in this torch, or not for this device"
    if is_windowed and not has_windows():
        return "torch before 2.13 has no windows"
    if torch.cuda.is_current_stream_capturing():
        return "a graph is captured, which may be replayed with other sizes"
    return None


def has_windows() -> bool:
    """Whether torch's FlashAttention has windows and grouped queries, as since 2.13."""
    return _varlen_attention() is not None


@lru_cache
def _varlen_attention() -> Any:
    """torch's ``varlen_attn`` and what asks it for logarithms; ``None`` if it lacks what is needed."""
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    has = inspect.signature(varlen_attn).parameters
    needed = {"window_size", "enable_gqa", "scale", "return_aux"}
    return (varlen_attn, AuxRequest(lse=True)) if needed <= set(has) else None


@lru_cache
def _has_flash_attention(device: torch.device) -> bool:
    """Whether torch's FlashAttention runs on a device."""
    is_new = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return is_new and torch.backends.cuda.is_flash_attention_available()
