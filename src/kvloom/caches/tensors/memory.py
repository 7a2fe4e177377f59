"""Memory of caches: allocation of tensors, and errors when there is too little."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor

from kvloom.core.advice import advise, give_back
from kvloom.core.views import raw

_HUGE: Final = 2 << 20
_PIECE: Final = 16 << 20
"""Bytes that are copied before their memory is given back."""


def outside_inference_mode() -> AbstractContextManager[object]:
    """Context for tensors that can be written inside and outside ``torch.inference_mode()``."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_touched: bool = True
) -> Tensor:
    """Allocate zeros; on the CPU in huge pages (2 MiB) where possible, for fewer TLB misses.

    Args:
        shape: Shape of the tensor.
        dtype: Its dtype.
        device: Its device.
        is_touched: Whether the system gives all of the memory now; where it can, else when it is written.
    """
    if torch.compiler.is_compiling():
        return torch.zeros(shape, dtype=dtype, device=device)
    x = torch.empty(shape, dtype=dtype, device=device)
    first, last = -(-x.data_ptr() // _HUGE) * _HUGE, (x.data_ptr() + x.nbytes) // _HUGE * _HUGE
    if x.device.type == "cpu" and first < last and advise("MADV_DONTNEED", first, last):
        advise("MADV_HUGEPAGE", first, last)  # pages have their size from the first touch on
        if not is_touched:
            data = x.view(-1).view(torch.uint8)
            data[: first - x.data_ptr()].zero_()
            data[last - x.data_ptr() :].zero_()
            return x
    raw(x).zero_()
    return x


def move(source: Tensor, target: Tensor, *, gives_back: bool) -> None:
    """Copy a tensor to another of its shape, in pieces.

    Args:
        source: Tensor of any strides.
        target: The same.
        gives_back: Whether the memory of each piece is given back to the system once it is copied, which may
            clear it: nobody else may use ``source``.
    """
    longest = max(
        (dim for dim in range(source.ndim) if source.shape[dim] > 1), key=source.stride, default=None
    )
    if not gives_back or source.nbytes <= _PIECE or longest is None:
        target.copy_(source)
        if gives_back:
            give_back(source)
        return
    half = source.shape[longest] // 2
    for start, count in ((0, half), (half, source.shape[longest] - half)):
        parts = (x.narrow(longest, start, count) for x in (source, target))
        move(*parts, gives_back=gives_back)


def is_held_by_others(tensor: Tensor) -> bool:
    """Whether another tensor, view or graph of autograd has the memory of a tensor, or may have it."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is None or count(tensor.untyped_storage()._cdata) > 2  # the tensor, and what was asked here


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; ``None`` if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
    if device.type != "cpu" or not set(names) <= set(getattr(os, "sysconf_names", ())):
        return None
    pages, size = map(os.sysconf, names)
    return pages * size


def counted(count: int, noun: str) -> str:
    """Number and noun: "1 token", "2 tokens"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
