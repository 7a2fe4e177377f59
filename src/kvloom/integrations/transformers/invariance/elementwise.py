"""Batch invariance of elementwise functions: the tensor is padded to whole vectors.

torch cuts a tensor into one piece per thread, and computes each piece in vectors. The rest at the end of a
piece is computed by another loop, whose exponentials can have other bits. So the flattened tensor is padded
until every piece consists of whole vectors.
"""

from collections.abc import Callable
from math import lcm
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

_VECTORS: Final = 64
"""Multiple of the elements that any loop of torch takes at once: two vectors of 32 in the widest."""
_GRAIN: Final = 32768
"""Elements below which torch does not use another thread (``at::internal::GRAIN_SIZE``)."""
_FINE_GRAIN: Final = 16384
"""Least number of elements for which GELU may make a piece per thread."""


def elementwise(function: Callable[..., Tensor], x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """``function(x, ...)``, in which an element's bits do not depend on the tensor's size or its place.

    Args:
        function: Elementwise function of one tensor.
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
    """The least number of elements, at least ``count``, whose pieces are whole vectors."""
    target = count
    while True:
        pieces = max(1, min(threads, -(-target // _GRAIN)))
        unit = _VECTORS * lcm(pieces, threads if target >= _FINE_GRAIN else 1)
        if target % unit == 0:
            return target
        target = -(-target // unit) * unit
