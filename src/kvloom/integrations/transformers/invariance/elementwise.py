"""Batch invariance of elementwise functions: no element is computed by the loop that follows whole vectors.

torch computes a tensor in vectors, in pieces of one size for each thread. What is left at the end of a piece
takes another loop, whose exponentials can have other bits. So the flattened tensor is padded until the pieces
are whole vectors.
"""

from collections.abc import Callable
from math import lcm
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

_VECTORS: Final = 64
"""Elements that every loop of torch takes at once: two vectors of 32 elements in the widest."""
_GRAIN: Final = 32768
"""Elements below which torch does not use another thread (``at::internal::GRAIN_SIZE``)."""
_FINE_GRAIN: Final = 16384
"""Elements from which on GELU may make a piece for each thread."""


def elementwise(function: Callable[..., Tensor], x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """``function(x, ...)`` with the bits that each element has in any tensor, at any place.

    Args:
        function: Elementwise, of one tensor.
        x: A tensor of any shape on the CPU.
        args: Further arguments.
        kwargs: Further arguments.
    """
    count = x.numel()
    target = _whole(count, torch.get_num_threads())
    if target == count and x.is_contiguous():
        return function(x, *args, **kwargs)
    flat = x.reshape(-1)
    return function(F.pad(flat, (0, target - count)), *args, **kwargs)[:count].view(x.shape)


def _whole(count: int, threads: int) -> int:
    """The least number of elements from ``count`` on that pieces of whole vectors make up."""
    target = count
    while True:
        pieces = max(1, min(threads, -(-target // _GRAIN)))
        unit = _VECTORS * lcm(pieces, threads if target >= _FINE_GRAIN else 1)
        if target % unit == 0:
            return target
        target = -(-target // unit) * unit
