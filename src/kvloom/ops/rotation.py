"""Rotation of head vectors by a Hadamard matrix: check, choose a backend, call."""

import torch
from torch import Tensor

from kvloom.core.checks import FLOAT_DTYPES, expect_range
from kvloom.core.memory import refused_memory
from kvloom.core.views import detached
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops import schemas
from kvloom.ops.choice import run
from kvloom.ops.fast import steps
from kvloom.ops.fast.plain import COMPILED, is_plain
from kvloom.quant.rotation import LARGEST


def rotate(x: Tensor, block: int, *, backend: str = "auto") -> Tensor:
    """Multiply head vectors by a Hadamard matrix over the square root of its size; this is its own inverse.

    Dot products of rotated vectors are those of the vectors, up to rounding. The bits of a result depend only
    on its vector. A finite input gives a finite result, a block with NaN or infinity gives NaN.

    Args:
        x: ``[T, H, D]`` or ``[B, H, N, D]`` float32, float16 or bfloat16, any strides; its gradient is lost.
        block: Elements that are rotated together, a power of two up to 1,024 that divides D; see
            ``kvloom.quant.rotation.block_of``.
        backend: ``"auto"`` (by device), ``"reference"``, ``"cpu"`` or ``"triton"``.

    Returns:
        A new tensor with the shape, the dtype and the memory order of heads and tokens of ``x``.

    Raises:
        ShapeError: ``x`` is no such tensor.
        ArgumentError: ``block`` is no such number.
        UnsupportedError: the backend cannot run it.
        OutOfMemory: there is no memory for the result.
    """
    if not isinstance(x, Tensor) or x.dim() not in (3, 4) or x.dtype not in FLOAT_DTYPES:
        got = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"x must be [T, H, D] or [B, H, N, D] of one of {FLOAT_DTYPES}, got {got}")
    if type(block) is not int or not 1 <= block <= LARGEST:
        block = expect_range("block", block, 1, LARGEST + 1)
    if block & (block - 1) or x.shape[-1] % block:
        raise ArgumentError(
            f"block must be a power of two that divides the head dim {x.shape[-1]}, got {block}"
        )
    if x.stride(-1) != 1:
        x = _in_rows(x)
    if x.dim() == 4 and x.shape[2] > 1 and x.stride(1) < x.stride(2):  # by token, as from a model
        return rotate(x.transpose(1, 2), block, backend=backend).transpose(1, 2)
    if backend in COMPILED and is_plain((x,)):
        try:
            found: Tensor = schemas.rotate(x, block)
            return found
        except (IndexError, RuntimeError):
            pass  # out of memory; raised with our message below
    if backend == "auto" and (kernel := steps.vectors_kernel("rotate", x)) is not None:
        turned: Tensor = kernel(x, block)
        return turned
    with torch.no_grad():
        result: Tensor = run(backend, "rotate", x.device, detached(x), block)
    return result


def _in_rows(x: Tensor) -> Tensor:
    """Copy with contiguous vectors, also without elements."""
    try:
        return x.clone(memory_format=torch.contiguous_format)
    except RuntimeError as error:
        raise refused_memory("a copy of x", error) or error from None
