"""Fast path of decoding steps on a GPU, where each layer's calls take the host longer than the device.

What was checked and worked out for one layer of a step is not for the next, whose tensors have the same
shapes, strides and dtypes.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.checks import DEBUG
from kvloom.core.memo import form_of
from kvloom.core.views import KVView
from kvloom.ops.attend_arguments import attend_arguments, bias_arguments
from kvloom.ops.impl import reference, triton
from kvloom.ops.scores import Batch, Scores

DEVICES: Final = ["cuda"]
"""Types of devices where Triton launches kernels. Tests add others."""


def is_step(query: Tensor, scores: Scores) -> bool:
    """Whether ``attend_step`` may compute this for a fixed batch: one of a model in ``generate``."""
    return scores.mask is None and scores.alibi_slopes is None and is_eager(query)


def is_eager(x: Tensor) -> bool:
    """Whether a call with ``x`` is neither traced nor captured, and needs no gradient."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(x) is not Tensor or DEBUG.get():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def vectors_kernel(name: str, x: Tensor) -> Callable[..., Any] | None:
    """Kernel that smooths or rotates ``x``, whose arguments are checked; ``None`` to call the operator."""
    if x.device.type not in DEVICES or not is_eager(x) or triton.why_not(name, x.device, x) is not None:
        return None
    return triton.operator(name)


def attend_step(
    query: Tensor,
    kv: KVView,
    batch: Batch,
    scores: Scores,
    is_latent: bool,
    expect: Callable[[], object],
    *part: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """Attention, and the logarithms of its sums if it is a part; ``None`` if other kernels must compute it.

    Args:
        query: As of ``ops.attend``.
        kv: The same.
        batch: The same.
        scores: The same.
        is_latent: The same.
        expect: Checks of all arguments.
        part: For a part ``skip`` and ``prior``, as of ``kvloom::attend_part``.

    Raises: as ``expect``.
    """

    def expect_served() -> str | None:
        expect()
        arguments = (*attend_arguments(query, kv, batch, scores, query.shape[2]), *bias_arguments(scores))
        return triton.why_not("attend_latent" if is_latent else "attend", query.device, *arguments)

    if triton.why_not_installed() is not None:
        return None
    step = triton.module("attending.step")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scores.scale is None else scores.scale
    own = step.OfPart(*part) if part else None
    found: tuple[Tensor, Tensor | None] | None = step.attend_step(
        query, kv, batch, scores, scale, is_latent, own, expect_served
    )
    return found


def store_step(
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    kv: KVView,
    full_range: bool,
    transform: tuple[Any, ...] = (),
) -> bool:
    """Store, if vectors with these shapes, strides and dtypes were checked for this cache.

    Args:
        key: As of ``ops.store``.
        value: The same.
        slots: The same.
        kv: The same.
        full_range: The same.
        transform: Last arguments of ``kvloom::store.transformed``; empty for no transform.

    Returns:
        Whether they were stored; if not, nothing was written.
    """
    if kv.key.device.type not in DEVICES or not (is_eager(key) and isinstance(slots, Tensor)):
        return False
    if triton.why_not_installed() is not None:
        return False
    launch = kv.recall(_form_of_store(key, value, slots, full_range, transform))
    read = (key, slots) if value is None else (key, slots, value)
    if launch is None or not kv.lies_apart_from(*read):
        return False
    if transform:
        vectors = triton.module("vectors.transform")
        own = vectors.smooth, vectors.rotate
        key, value = reference.transformed(key, value, *transform, operators=own)
    launch(key, value, slots)
    kv.mark_changed()
    return True


def keep_store(
    key: Tensor, value: Tensor | None, slots: Tensor, kv: KVView, full_range: bool, transform: tuple[Any, ...]
) -> None:
    """Keep that these arguments of ``store_step`` were checked, and their launch, if there is one."""
    if kv.key.device.type not in DEVICES or not is_eager(key) or not slots.numel() or not kv.num_heads:
        return
    if key.ndim == 4 and 1 not in (key.shape[0], key.shape[2]):
        return
    if triton.why_not_installed() is not None:
        return
    operators: list[tuple[Any, ...]] = [("store", key, value, slots, *kv.tensors, full_range)]
    if transform:
        read = [x for x in (key, value) if x is not None]
        if any(x.stride(-1) != 1 for x in read):
            return
        operators += [("smooth", x) for x in read]
    if any(triton.why_not(name, kv.device, *own) is not None for name, *own in operators):
        return
    launch = triton.module("store").StoreLaunch(*kv.tensors, key.dtype, full_range)
    kv.keep(_form_of_store(key, value, slots, full_range, transform), launch)


def _form_of_store(
    key: Tensor, value: Tensor | None, slots: Tensor, full_range: bool, transform: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What is checked of the arguments of a store, and how its launches were chosen."""
    tensors = (key, value, slots, *transform[2:])
    return triton.module("configs").tuning(), full_range, transform[:2], *map(form_of, tensors)
