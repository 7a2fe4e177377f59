"""The two orders of the pairs that RoPE turns, as permutations of the elements of a key.

In halves, elements i and i + n/2 of the n rotary ones are a pair; adjacent, elements 2i and 2i + 1.
"""

from typing import Final

import torch
from torch import Tensor

from kvloom.errors import ArgumentError

PAIRS: Final = ("halves", "adjacent", "none")
"""Orders of pairs; ``"none"`` of a model without RoPE."""


def expect_pairs_named(name: str, pairs: object) -> None:
    """Raise ArgumentError unless ``pairs`` is one of ``PAIRS``."""
    if pairs not in PAIRS:
        raise ArgumentError(f"{name} must be one of {', '.join(PAIRS)}, got {pairs!r}")


def to_adjacent(x: Tensor, rotary: int) -> Tensor:
    """Keys ``[..., D]`` in halves, with the pairs of the first ``rotary`` elements adjacent."""
    half, made = rotary // 2, torch.empty_like(x, memory_format=torch.contiguous_format)
    made[..., 0:rotary:2], made[..., 1:rotary:2] = x[..., :half], x[..., half:rotary]
    made[..., rotary:] = x[..., rotary:]
    return made


def to_halves(x: Tensor, rotary: int) -> Tensor:
    """The reverse of ``to_adjacent``."""
    half, made = rotary // 2, torch.empty_like(x, memory_format=torch.contiguous_format)
    made[..., :half], made[..., half:rotary] = x[..., 0:rotary:2], x[..., 1:rotary:2]
    made[..., rotary:] = x[..., rotary:]
    return made
