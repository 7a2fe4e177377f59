"""Fast path of decoding steps on the CPU: the compiled kernel checks arguments instead of Python."""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.checks import DEBUG
from kvloom.core.memory import refused_memory
from kvloom.core.views import KVView
from kvloom.ops import schemas
from kvloom.ops.attend_arguments import attend_arguments
from kvloom.ops.impl import cpu
from kvloom.ops.scores import Batch, PositionalBias, Scores

COMPILED: Final = ("auto", "cpu") if cpu.WHY_NOT is None else ()
"""Backend names that mean the compiled kernels for tensors on the CPU."""


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether all are ``None`` or tensors on the CPU that neither autograd nor a compiler traces."""
    if torch.compiler.is_compiling():
        return False
    records = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and not (isinstance(x, Tensor) and x.is_cpu and not (records and x.requires_grad)):
            return False
    return True


def plain_arguments(
    query: Tensor, kv: KVView, batch: Batch, scores: Scores, *more: Tensor | None
) -> tuple[Any, ...] | None:
    """``attend_arguments`` if the compiled kernel alone can check these and ``more`` tensors, or ``None``."""
    index, window = batch.index, scores.window
    tensors = (query, *kv.tensors, index.table, index.row_starts, batch.seqstarts, batch.kvstarts,
               batch.first_visible, scores.mask, scores.alibi_slopes, scores.sinks, *more)  # fmt: skip
    if (bias := scores.positional_bias) is not None:
        if not isinstance(bias, PositionalBias) or bias.coefficients is None or bias.frequencies is None:
            return None
        tensors = (*tensors, bias.coefficients, bias.frequencies, bias.first_position)
    if query is None or kv.value is None or not is_plain(tensors):
        return None
    if type(batch.decoding_batches) is not int or type(index.page_size) is not int:
        return None
    if (window is not None and type(window) is not int) or query.ndim != 3 or not query.shape[2]:
        return None
    return attend_arguments(query, kv, batch, scores, query.shape[2])


def store_plain(
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    kv: KVView,
    full_range: bool,
    transform: tuple[Any, ...] = (),
) -> bool:
    """Store, if the compiled kernel alone can make all checks of ``ops.store``.

    Args:
        key: As of ``ops.store``.
        value: The same.
        slots: The same.
        kv: The same.
        full_range: The same.
        transform: Last arguments of ``kvloom::store.transformed``: blocks of keys and of values, positions,
            factor, mean, channels and frequencies; empty for no transform.

    Returns:
        Whether tokens were stored; if not, nothing was written: call ``ops.store``, which stores them or
        raises.
    """
    side = kv.value
    if not COMPILED:  # the reference checks less, and takes rows alone
        return False
    if key is None or slots is None or (value is None) != (side is None) or not kv.is_writable:
        return False
    if not is_plain((key, value, slots, kv.key.cache, *transform[2:4])) or DEBUG.get():
        return False
    if key.dtype not in kv.key.dtypes or key.ndim != slots.ndim + 2:
        return False
    if value is not None and side is not None:
        if value.dtype not in side.dtypes or key.dtype != value.dtype:
            return False
        if key.shape != value.shape and (key.ndim != value.ndim or key.shape[:-1] != value.shape[:-1]):
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


def load_plain(
    slots: Tensor, kv: KVView, dtype: torch.dtype | None, transform: tuple[Any, ...] = ()
) -> tuple[Tensor, Tensor] | None:
    """Load, if the compiled kernel alone can make all checks of ``ops.load``.

    Args:
        slots: As of ``ops.load``.
        kv: The same.
        dtype: The same.
        transform: Last arguments of ``kvloom::load.transformed``; empty for no transform.

    Returns:
        Keys and values; ``None`` if ``ops.load`` must be called, which loads them or raises.

    Raises:
        OutOfMemory: there is no memory for them.
    """
    if dtype is None or slots is None or not kv.is_writable or any(dtype not in x.dtypes for x in kv.sides):
        return None
    if not is_plain((slots, kv.key.cache, *transform[2:4])) or not slots.is_contiguous():
        return None
    try:
        if transform:
            key, value = schemas.load_transformed(slots, *kv.tensors, dtype, *transform)
        else:
            key, value = schemas.load(slots, *kv.tensors, dtype, 1)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, IndexError, RuntimeError, ArithmeticError, MemoryError) as error:
        if (refused := refused_memory("what load allocates", error)) is not None:
            raise refused from None
        return None  # the checks in Python have the better message
    return key, value
