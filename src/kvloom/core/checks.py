"""Checks of tensors and numbers at the public edge, and of whether values may be read."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch
from torch import Tensor

from kvloom.errors import ArgumentError, ShapeError

INDEX_DTYPES = (torch.int64, torch.int32)
INT64_END = 1 << 63
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def expect(
    name: str,
    x: Tensor,
    axes: str,
    /,
    *,
    dtype: torch.dtype | Collection[torch.dtype] | None = None,
    device: torch.device | None = None,
    **sizes: int,
) -> dict[str, int]:
    """Check ``x`` against ``axes`` ("T H D") and return all sizes seen so far.

    Pass the result to the next check, so that a letter means one number across arguments:
    ``s = expect("key", key, "T H D", H=8); expect("value", value, "T H D", **s)``.

    Raises:
        ShapeError: ``x`` is no tensor, or has another rank, size, dtype or device.
    """
    expect_tensor(name, x)
    letters = axes.split()
    shape = x.shape
    wrong = len(shape) != len(letters)
    for letter, have in zip(letters, shape, strict=False):
        if (letter in sizes and sizes[letter] != have) or (letter.isdigit() and int(letter) != have):
            wrong = True
    if wrong:
        known = ", ".join(f"{a}={sizes[a]}" for a in letters if a in sizes)
        wanted = f"[{', '.join(letters)}]{known and f' with {known}'}"
        raise ShapeError(f"{name} must be {wanted}, got {list(x.shape)}")
    if dtype is not None:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if x.dtype not in allowed:
            raise ShapeError(f"{name} must be {' or '.join(map(str, allowed))}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ShapeError(f"{name} must be on {device}, got {x.device}")
    return sizes | dict(zip(letters, shape, strict=True))


def expect_tensor(name: str, x: object) -> None:
    """Check that ``x`` is a tensor.

    Raises:
        ShapeError: it is not.
    """
    if not isinstance(x, Tensor):
        raise ShapeError(f"{name} must be a tensor, got {type(x).__name__}")


def expect_range(name: str, value: int, low: int, high: int | None = None, /) -> int:
    """Check that ``low <= value < high`` (no upper bound if ``None``) and return it as an int.

    Raises:
        ArgumentError: out of range, or no integer.
    """
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise ArgumentError(f"{name} must be an int, got {value!r}")
    if value < low or (high is not None and value >= high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high})"
        raise ArgumentError(f"{name} must be {bound}, got {value}")
    return int(value)


DEBUG: Final[ContextVar[bool]] = ContextVar("kvloom_debug", default=False)
"""Whether costly checks are switched on; read it by ``debugging`` where a compiler may trace."""


@contextmanager
def debug() -> Iterator[None]:
    """Context with the checks that cost a sort or a device synchronization.

    These are duplicate slots in one ``store``, and the values of index tensors on accelerators.
    """
    token = DEBUG.set(True)
    try:
        yield
    finally:
        DEBUG.reset(token)


def debugging() -> bool:
    """Whether costly checks are switched on, by ``debug``."""
    return not torch.compiler.is_compiling() and DEBUG.get()


def can_read(x: Tensor) -> bool:
    """Whether ``x`` may be read on the host: never while tracing, on other devices only in ``debug``."""
    return not torch.compiler.is_compiling() and (x.device.type == "cpu" or DEBUG.get())
