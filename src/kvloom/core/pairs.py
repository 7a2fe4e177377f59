"""The two orders of the pairs that RoPE turns, as permutations of the elements of a key.

In halves, elements i and i + n/2 of the n rotary ones are a pair; adjacent, elements 2i and 2i + 1.
"""

import torch
from torch import Tensor

ADJACENT, HALVES = "adjacent", "halves"
"""Orders of pairs."""


def arrange(x: Tensor, rotary: int, to_adjacent: bool, out: Tensor) -> bool:
    """Copy head vectors ``[..., D]`` with pairs in another order; the specification of ``ops.arrangement``.

    Args:
        x: The vectors.
        rotary: Elements in pairs, the first of a vector.
        to_adjacent: Whether pairs become adjacent, and not halves.
        out: The same shape and dtype, written in place.

    Returns:
        Whether all are finite.
    """
    half = rotary // 2
    halves, pairs = (slice(half), slice(half, rotary)), (slice(0, rotary, 2), slice(1, rotary, 2))
    for source, target in zip(*((halves, pairs) if to_adjacent else (pairs, halves)), strict=True):
        out[..., target] = x[..., source]
    out[..., rotary:] = x[..., rotary:]
    return are_finite(x)


def are_finite(x: Tensor) -> bool:
    """Whether a tensor has no infinity and no NaN: all exponents are below theirs, in the bits.

    Reading the bits is faster than comparing numbers.
    """
    if not x.is_floating_point() or not x.numel():
        return True
    integers = torch.int32 if x.itemsize == 4 else torch.int16
    infinite = int(torch.tensor(torch.inf, dtype=x.dtype).view(integers))
    largest = (x.view(integers) & torch.iinfo(integers).max).amax()
    return int(largest) < infinite
