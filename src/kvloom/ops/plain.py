"""Calls of a decoding step on the CPU that the compiled kernel checks by itself, without Python's checks."""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.checks import DEBUG
from kvloom.core.views import KVView
from kvloom.ops import schemas
from kvloom.ops.impl import cpu

COMPILED: Final = ("auto", "cpu") if cpu.WHY_NOT is None else ()
"""Backends that are the compiled kernels where tensors are on the CPU."""


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether these are tensors on the CPU, or ``None``, which neither autograd nor a compiler traces."""
    if torch.compiler.is_compiling():
        return False
    records = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and not (isinstance(x, Tensor) and x.is_cpu and not (records and x.requires_grad)):
            return False
    return True


def store_plain(
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    kv: KVView,
    full_range: bool,
    transform: tuple[Any, ...] = (),
) -> bool:
    """Store where the compiled kernel alone can check everything that ``ops.store`` promises.

    Args:
        key: As of ``ops.store``.
        value: The same.
        slots: The same.
        kv: The same.
        full_range: The same.
        transform: What ``kvloom::store.transformed`` takes behind the others: blocks of keys and of values,
            positions, factor, mean, channels and frequencies; empty where nothing is done before.

    Returns:
        Whether it did; if not, nothing was written, and ``ops.store`` does it or says why not.
    """
    side = kv.value
    if key is None or slots is None or (value is None) != (side is None) or not kv.is_writable:
        return False
    if not is_plain((key, value, slots, kv.key.cache, *transform[2:4])) or DEBUG.get():
        return False
    if key.dtype not in kv.key.dtypes or key.ndim != slots.ndim + 2:
        return False
    if value is not None and side is not None:
        if value.dtype not in side.dtypes or key.dtype != value.dtype:
            return False
        if key.ndim != value.ndim or key.shape[:-1] != value.shape[:-1]:
            return False
    try:
        if transform:
            schemas.store_transformed(key, value, slots, *kv.tensors, full_range, *transform)
        else:
            schemas.store(key, value, slots, *kv.tensors, full_range)
    except (ValueError, IndexError, RuntimeError, ArithmeticError):
        return False  # nothing was written; the checks in Python have the better message
    kv.mark_changed()
    return True
