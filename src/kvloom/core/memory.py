"""Checks of shared and of free memory, made before anything is written."""

import re
from typing import Final

import torch
from torch import Tensor

from kvloom.errors import ArgumentError, OutOfMemory, ShapeError

_MAX_STEPS: Final = 10_000


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of ``x`` may share memory, as in an expanded tensor. False while tracing."""
    if torch.compiler.is_compiling() or x.numel() == 0:  # strides may be symbols while compiling
        return False
    reach = 0  # extent of the axes seen so far, in elements
    for stride, extent in sorted((abs(s), n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def reach_of(x: Tensor) -> int:
    """Number of bytes from the first of ``x`` to the one after its last."""
    if x.numel() == 0:
        return 0
    last = sum(stride * (extent - 1) for stride, extent in zip(x.stride(), x.shape, strict=True))
    return (last + 1) * x.itemsize


def span_of(x: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of ``x`` and of the one after its last."""
    start = x.data_ptr()
    return start, start + (x.nbytes if x.is_contiguous() else reach_of(x))


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Whether ``x`` and ``y`` have a byte in common, by address. False while tracing.

    Exact for tensors whose axes nest, as in every view of a contiguous tensor. If a search among the strides
    takes too long, the answer is yes.
    """
    if torch.compiler.is_compiling():
        return False
    (start, end), (other_start, other_end) = span_of(x), span_of(y)
    if (
        x.device != y.device
        or not (start < other_end and other_start < end)
        or not x.numel()
        or not y.numel()
    ):
        return False
    # They overlap if a sum of strides of x minus one of strides of y is the distance of their first bytes.
    steps: dict[int, tuple[int, int]] = {}
    for tensor, sign in ((x, 1), (y, -1)):
        size = tensor.itemsize
        for stride, extent in (
            (1, size),
            *((s * size, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True)),
        ):
            low, high = steps.get(stride, (0, 0))
            steps[stride] = (low - (extent - 1), high) if sign < 0 else (low, high + extent - 1)
    return _is_sum(other_start - start, sorted(steps.items(), reverse=True))


def expect_writable(name: str, x: Tensor) -> None:
    """Check that a write to ``x`` loses no values and no gradient.

    Raises:
        ShapeError: two elements of ``x`` may share memory.
        ArgumentError: ``x`` requires a gradient.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{name} must not require a gradient: what is written has none")
    if overlaps_itself(x):
        raise ShapeError(f"{name} must not overlap itself, got shape {list(x.shape)} strides {x.stride()}")


def expect_disjoint(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Check that ``x`` shares no memory with ``other``, which is written.

    Raises:
        ShapeError: the two have bytes in common, even if their storages differ.
    """
    if shares_memory(x, other):
        raise ShapeError(f"{name} must not overlap {other_name} in memory; pass a clone")


def expect_memory(what: str, nbytes: int, device: torch.device) -> None:
    """Check that ``nbytes`` can be allocated, before something is written that needs them afterwards.

    Raises:
        OutOfMemory: they cannot.
    """
    if torch.compiler.is_compiling():
        return
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, TypeError):  # TypeError where the number does not fit 64 bits
        raise OutOfMemory(f"{what} must fit memory, got {nbytes} bytes on {device}") from None


def refused_memory(what: str, error: Exception) -> OutOfMemory | None:
    """OutOfMemory for an error of torch's CPU allocator; ``None`` for every other error."""
    said = re.search(r"DefaultCPUAllocator: .* you tried to allocate (\d+) bytes", str(error))
    return said and OutOfMemory(f"{what} must fit memory, got {said[1]} bytes")


def _is_sum(target: int, steps: list[tuple[int, tuple[int, int]]]) -> bool:
    """Whether ``target`` is a sum of steps times integers in their ranges; largest steps first."""
    lows, highs = [0], [0]  # range of the sums of the steps from i on
    for step, (low, high) in reversed(steps):
        lows.insert(0, lows[0] + step * low)
        highs.insert(0, highs[0] + step * high)
    left = [(target, 0)]
    for _ in range(_MAX_STEPS):
        if not left:
            return False
        rest, i = left.pop()
        if i == len(steps):
            return True
        step, (low, high) = steps[i]
        if step == 0:
            left.append((rest, i + 1))
            continue
        first, last = -((highs[i + 1] - rest) // step), (rest - lows[i + 1]) // step
        times = range(max(first, low), min(last, high) + 1)
        if len(times) > _MAX_STEPS:
            return True
        left += [(rest - n * step, i + 1) for n in times]
    return True
