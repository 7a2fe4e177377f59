"""Attention by torch over contiguous keys and values: FlashAttention on CUDA devices.

Shapes: R sequences with Q new tokens each, which see N tokens each; H key/value heads, Hq query heads, D head
dim of queries and keys, Dv of values.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

MAX_WIDTH: Final = 256
"""Largest head dim of FlashAttention."""

_FLASH: Final = torch.ops.aten._flash_attention_forward.default
"""The operator under all of torch's ways to it: ``causal_lower_right``, which no mode of torch may look at,
and ``varlen_attn``, which has windows."""


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
    if query.is_cuda:
        out, lse = _flash(query, key, value, scale, window)
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


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention ``[R, Hq, Q, D]`` by FlashAttention, and logarithms ``[R, Hq, Q]``."""
    rows = (x.transpose(1, 2) for x in (query, key, value))
    tokens = None, None, query.shape[2], key.shape[2]
    # A window counts the tokens before a query's own and those after it; -1 is for all.
    sides = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
    out, lse = _FLASH(*rows, *tokens, 0.0, window is None, False, scale=scale, **sides)[:2]
    return out.transpose(1, 2), lse


def why_not_on_cuda(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Reason why FlashAttention, without which torch computes all scores, cannot run; ``None`` if it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention has no {dtype}"
    if head_dim > MAX_WIDTH:
        return f"FlashAttention has head dims up to {MAX_WIDTH}"
    if not _has_flash_attention(device):
        return "FlashAttention is not in this torch, or not for this device"
    if torch.cuda.is_current_stream_capturing():
        return "a graph is captured, which may be replayed with other sizes"
    return None


@lru_cache
def _has_flash_attention(device: torch.device) -> bool:
    """Whether torch's FlashAttention runs on a device."""
    is_new = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return is_new and torch.backends.cuda.is_flash_attention_available()
