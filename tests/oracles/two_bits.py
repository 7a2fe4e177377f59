"""Codes of two bits, one number at a time: the middles of four equal parts around zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvloom.conform.oracles.pmx import SMALLEST_SCALE, dequantize_group, rounded, saturated

NUMBERS = (1, 3, -3, -1)
"""What each pattern of two bits stands for, in scales: its two's complement twice, and one."""


def quantize_group(x: Tensor, full_range: bool = False) -> tuple[list[int], Tensor]:
    """Numbers and scale of one group; the scale is of the dtype of ``x``, in full range float32."""
    if not bool(torch.isfinite(x).all()):
        return [1] * x.numel(), torch.tensor(math.nan, dtype=x.dtype)
    exact = x.to(torch.float64)
    by_range = rounded(exact.abs().max() / 4, x.dtype)
    scale = torch.maximum(by_range, rounded(torch.tensor(SMALLEST_SCALE, dtype=torch.float64), x.dtype))
    numbers = []
    for number in exact.tolist():
        size = 3 if abs(number) >= 2 * float(scale) else 1
        numbers.append(round(math.copysign(size, number)))
    smallest = rounded(torch.tensor(SMALLEST_SCALE, dtype=torch.float64), x.dtype)
    if not full_range or float(scale) == float(smallest):
        return numbers, scale
    largest = exact.abs().max().float()
    parts = [round(float(number.float().abs() * (255 / largest))) for number in exact]
    squares = torch.tensor(float(sum(part * part for part in parts)), dtype=torch.float32)
    products = torch.tensor(
        float(sum(part * abs(n) for part, n in zip(parts, numbers, strict=True))), dtype=torch.float32
    )
    kept = (largest / 255) * (squares / products)
    return numbers, torch.maximum(kept, torch.tensor(SMALLEST_SCALE, dtype=torch.float32))


def store_vector(
    x: Tensor, cache: Tensor, scale: Tensor, h: int, group: int, full_range: bool = False
) -> None:
    """Write the head vector ``x`` to row ``h`` of ``cache``, which is bits2x4, and of ``scale``."""
    packed: list[int] = []
    for g in range(x.numel() // group):
        numbers, group_scale = quantize_group(x[g * group : (g + 1) * group], full_range)
        scale[h, g] = saturated(rounded(group_scale, scale.dtype))
        for i in range(0, group, 4):
            packed.append(sum(NUMBERS.index(number) << 2 * j for j, number in enumerate(numbers[i : i + 4])))
    cache.view(torch.uint8)[h] = torch.tensor(packed, dtype=torch.uint8)


def load_vector(cache: Tensor, scale: Tensor, h: int, group: int, dtype: torch.dtype) -> Tensor:
    """Read row ``h`` back as ``dtype``."""
    numbers = [NUMBERS[byte >> shift & 3] for byte in cache.view(torch.uint8)[h].tolist()
               for shift in (0, 2, 4, 6)]  # fmt: skip
    parts = [numbers[i : i + group] for i in range(0, len(numbers), group)]
    return torch.cat([dequantize_group(part, scale[h, g], dtype) for g, part in enumerate(parts)])
