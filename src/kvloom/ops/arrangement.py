"""Head vectors in other axes and another order of RoPE's pairs, looked through for what is not finite."""

import torch
from torch import Tensor

from kvloom.core.checks import expect_range
from kvloom.core.pairs import ADJACENT, HALVES
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops.choice import run


def arrange(
    x: Tensor,
    out: Tensor,
    rotary: int = 0,
    order: str = ADJACENT,
    *,
    backend: str = "auto",
) -> bool:
    """Copy head vectors into a tensor of any strides, in one pass, with RoPE's pairs in another order.

    Args:
        x: ``[T, H, D]`` of elements of 1, 2 or 4 bytes, any strides.
        out: The same shape and dtype, any strides, before or after ``x`` in memory; written in place.
        rotary: Elements that RoPE turns, the first of a vector; 0 to permute none.
        order: Order of their pairs in ``out``, as of ``core.pairs``; in ``x`` they have the other one.
        backend: ``"auto"`` (by device), ``"reference"`` or ``"cpu"``.

    Returns:
        Whether there is no NaN and no infinity; integers are finite.

    Raises:
        ShapeError: ``x`` or ``out`` is no such tensor.
        ArgumentError: ``rotary`` or ``order`` is no such value, or ``out`` overlaps ``x``.
        UnsupportedError: the backend cannot run it.
    """
    if x.dim() != 3 or x.itemsize not in (1, 2, 4):
        raise ShapeError(f"x must be [T, H, D] of 1, 2 or 4 bytes, got {list(x.shape)} {x.dtype}")
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ShapeError(f"out must be {list(x.shape)} {x.dtype}, got {list(out.shape)} {out.dtype}")
    expect_range("rotary", rotary, 0, x.shape[-1] + 1)
    if rotary % 2:
        raise ArgumentError(f"rotary must be even, got {rotary}")
    if order not in (ADJACENT, HALVES):
        raise ArgumentError(f"order must be adjacent or halves, got {order!r}")
    with torch.no_grad():
        return bool(run(backend, "arrange", x.device, x, rotary, order == ADJACENT, out))
