"""Keys with RoPE's pairs in another order, and the names of orders."""

from typing import Final

import torch
from torch import Tensor

from kvloom.core.pairs import ADJACENT, HALVES
from kvloom.errors import ArgumentError
from kvloom.ops.arrangement import arrange

PAIRS: Final = (HALVES, ADJACENT, "none")
"""Orders of pairs; ``"none"`` of a model without RoPE."""


def expect_pairs_named(name: str, pairs: object) -> None:
    """Raise ArgumentError unless ``pairs`` is one of ``PAIRS``."""
    if pairs not in PAIRS:
        raise ArgumentError(f"{name} must be one of {', '.join(PAIRS)}, got {pairs!r}")


def to_adjacent(x: Tensor, rotary: int) -> Tensor:
    """Keys ``[T, H, D]`` in halves, with the pairs of the first ``rotary`` elements adjacent."""
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    arrange(x, made, rotary, ADJACENT)
    return made


def to_halves(x: Tensor, rotary: int) -> Tensor:
    """The reverse of ``to_adjacent``."""
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    arrange(x, made, rotary, HALVES)
    return made
