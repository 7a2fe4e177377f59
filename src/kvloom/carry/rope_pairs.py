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
    if rotary < x.shape[-1]:
        return torch.cat((to_adjacent(x[..., :rotary], rotary), x[..., rotary:]), -1)
    adjacent: Tensor = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return adjacent


def to_halves(x: Tensor, rotary: int) -> Tensor:
    """The reverse of ``to_adjacent``."""
    if rotary < x.shape[-1]:
        return torch.cat((to_halves(x[..., :rotary], rotary), x[..., rotary:]), -1)
    halves: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves
