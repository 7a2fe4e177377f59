"""Codes of four bits in full range, one number at a time: eighths of the largest element, which is -8."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvloom.conform.oracles.pmx import SMALLEST_SCALE, pack_nibbles, rounded, saturated


def quantize_group(x: Tensor) -> tuple[list[int], Tensor]:
    """Codes and scale of one group; scale and quotient are each rounded to the dtype of ``x``."""
    if not bool(torch.isfinite(x).all()):
        return [0] * x.numel(), torch.tensor(math.nan, dtype=x.dtype)
    numbers = [float(number) for number in x]
    largest = max(numbers, key=lambda number: (abs(number), number))
    scale = rounded(torch.tensor(largest / -8, dtype=torch.float64), x.dtype)
    smallest = rounded(torch.tensor(SMALLEST_SCALE, dtype=torch.float64), x.dtype)
    if abs(float(scale)) < float(smallest):
        scale = smallest
    quotients = rounded(torch.tensor([number / float(scale) for number in numbers]).double(), x.dtype)
    return [max(-8, min(7, round(quotient))) for quotient in quotients.tolist()], scale


def store_vector(x: Tensor, cache: Tensor, scale: Tensor, h: int, group: int) -> None:
    """Write the head vector ``x`` to row ``h`` of ``cache``, which is uint8, and of ``scale``."""
    packed: list[int] = []
    for g in range(x.numel() // group):
        codes, group_scale = quantize_group(x[g * group : (g + 1) * group])
        scale[h, g] = saturated(rounded(group_scale, scale.dtype))
        packed += pack_nibbles(codes)
    cache[h] = torch.tensor(packed, dtype=torch.uint8)
