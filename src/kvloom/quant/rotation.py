"""Rotation of head vectors before quantization, which spreads outliers over all elements.

The matrix is a Hadamard matrix divided by the square root of its size. It is orthonormal, so the dot product
of two rotated vectors is that of the vectors, and symmetric, so it is its own inverse. If the head dim is no
power of two it is block diagonal.

Sums are float32, in an order that depends only on the head dim: a vector has the same bits in any batch and
on every backend.
"""

from math import gcd, sqrt
from typing import Final

import torch
from torch import Tensor

from kvloom.quant.affine import saturate

LARGEST: Final = 1024
"""Maximum number of elements that are rotated together."""


def block_of(head_dim: int) -> int:
    """Number of elements rotated together: the largest power of two up to 1,024 that divides ``head_dim``."""
    return gcd(head_dim, LARGEST)


def rotate(x: Tensor, block: int) -> Tensor:
    """Rotate along the last axis; its own inverse, up to rounding.

    A finite input gives a finite result, saturated to the dtype. A block with NaN or infinity becomes NaN.

    Args:
        x: ``[..., D]`` float32, float16 or bfloat16.
        block: A power of two that divides D.

    Returns:
        ``[..., D]`` in the dtype of ``x``.
    """
    sums = x.float().unflatten(-1, (-1, block)) / block  # no sum of finite numbers overflows
    width = 1
    while width < block:
        first, second = sums.unflatten(-1, (-1, 2, width)).unbind(-2)
        sums = torch.stack((first + second, first - second), -2).flatten(-3)
        width *= 2
    rotated = saturate(_within(sums * sqrt(block)), x.dtype)
    return rotated.where(sums.isfinite(), float("nan")).flatten(-2)


def _within(x: Tensor) -> Tensor:
    """Clamp ``x`` to the finite range of its dtype."""
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)
