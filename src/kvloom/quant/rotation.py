"""Rotation of head vectors before they are quantized: spreads what sticks out over all elements.

The matrix is a Hadamard matrix by the square root of its size. It is orthonormal, so dot products of two
vectors that are both rotated are those of the vectors, and symmetric, so rotating again turns back. Where the
head dim is no power of two it is block diagonal.

Sums are taken in float32, in one order that depends on nothing but the head dim: a vector has the same bits
in any batch and on every backend.
"""

from math import gcd, sqrt
from typing import Final

import torch
from torch import Tensor

from kvloom.quant.affine import saturate

LARGEST: Final = 1024
"""Most elements that are rotated together."""


def block_of(head_dim: int) -> int:
    """Elements that are rotated together: the largest power of two that divides ``head_dim``, up to 1,024."""
    return gcd(head_dim, LARGEST)


def rotate(x: Tensor, block: int) -> Tensor:
    """Rotate along the last axis; its own inverse, up to rounding.

    A finite input gives a finite result: what is beyond the dtype becomes its largest number. A block with
    NaN or infinity becomes NaN.

    Args:
        x: ``[..., D]`` float32, float16 or bfloat16.
        block: A power of two that divides D.

    Returns:
        ``[..., D]`` in the dtype of ``x``.
    """
    sums = x.float().unflatten(-1, (-1, block)) / block  # so that no sum of finite numbers overflows
    width = 1
    while width < block:
        first, second = sums.unflatten(-1, (-1, 2, width)).unbind(-2)
        sums = torch.stack((first + second, first - second), -2).flatten(-3)
        width *= 2
    rotated = saturate(_within(sums * sqrt(block)), x.dtype)
    return rotated.where(sums.isfinite(), float("nan")).flatten(-2)


def _within(x: Tensor) -> Tensor:
    """``x`` between the largest numbers of its dtype."""
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)
