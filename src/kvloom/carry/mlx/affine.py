"""How MLX rounds to codes with a scale and an offset.

In float32, over a group: lo and hi are the least and the largest element, the edge that of larger magnitude.
Scale is ``max((hi - lo) / (2 ** bits - 1), 1e-7)``, negated unless the edge is lo. With n steps from 0 to the
edge, rounded, scale becomes ``edge / n`` and bias the edge, so that 0 is a code; if n is 0, bias is 0. A code
is ``(x - bias) / scale``, rounded to even and clipped.
"""

from typing import Final

import torch
from torch import Tensor

from kvloom.carry.carried import AffineCodes

BITS: Final = (8, 4, 2)
"""Bits of codes that do not lie across words."""
GROUPS: Final = (32, 64, 128)
"""Elements that share a scale in MLX."""
_LEAST: Final = 1e-7


def quantize(x: Tensor, bits: int, group: int, dtype: torch.dtype) -> AffineCodes:
    """Codes of vectors ``[T, H, D]``, with scales and offsets rounded to ``dtype`` when they are stored."""
    groups, top = x.float().unflatten(-1, (-1, group)), (1 << bits) - 1
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / top).clamp(min=_LEAST)
    is_low = low.abs() > high.abs()
    scale, edge = torch.where(is_low, scale, -scale), torch.where(is_low, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, 0.0)
    codes = ((groups - bias[..., None]) / scale[..., None]).round().clamp(0, top)
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits)
    words = (codes.flatten(-2).unflatten(-1, (-1, per_word)).long() << shifts).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return AffineCodes(words, scale.to(dtype), bias.to(dtype), bits)
