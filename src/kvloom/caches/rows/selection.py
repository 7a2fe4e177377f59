"""Rows that a batch keeps, repeats or reorders, as lists of numbers of its B rows."""

import torch
from torch import Tensor

from kvloom.core.checks import INDEX_DTYPES, expect, expect_range
from kvloom.errors import ArgumentError


def reordered(rows: Tensor, size: int) -> list[int]:
    """List of ``rows``, ``[B]`` int64 or int32 on any device, for B = ``size``; repeats are allowed.

    Raises:
        ArgumentError: ``rows`` does not fit.
    """
    expect("rows", rows, "B", dtype=INDEX_DTYPES, B=size)
    return _checked(rows.tolist(), size)


def selected(rows: Tensor, size: int) -> list[int]:
    """List of any of ``size`` rows: ``[R]`` int64 or int32, or a bool mask ``[B]``, on any device.

    Raises:
        ArgumentError: ``rows`` does not fit.
    """
    if isinstance(rows, Tensor) and rows.dtype == torch.bool:
        expect("rows", rows, "B", B=size)
        rows = rows.nonzero().flatten()
    expect("rows", rows, "R", dtype=INDEX_DTYPES)
    return _checked(rows.tolist(), size)


def repeated(n: int, size: int) -> list[int]:
    """Each of ``size`` rows ``n`` times in a row.

    Raises:
        ArgumentError: ``n`` is not at least 1.
    """
    expect_range("n", n, 1)
    return [row for row in range(size) for _ in range(n)]


def _checked(rows: list[int], size: int) -> list[int]:
    if not rows:
        raise ArgumentError("rows must be at least one, got none")
    if not 0 <= min(rows) <= max(rows) < size:
        raise ArgumentError(f"rows must be in [0, {size}), got {rows}")
    return rows
