"""Memory that caches take: how tensors are made, and what to say when there is too little."""

import ctypes
import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor

from kvloom.core.views import raw
from kvloom.errors import OutOfPages

_HUGE: Final = 2 << 20


def outside_inference_mode() -> AbstractContextManager[object]:
    """Tensors made here can be written inside and outside ``torch.inference_mode()``."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU in pages of 2 MiB, if the system has them: the processor finds them sooner."""
    x = torch.empty(shape, dtype=dtype, device=device)
    _ask_for_huge_pages(x)
    raw(x).zero_()
    return x


def _ask_for_huge_pages(x: Tensor) -> None:
    """Memory gets its pages when it is first touched, so those that were used before are given back."""
    advice = [getattr(mmap, name) for name in ("MADV_DONTNEED", "MADV_HUGEPAGE") if hasattr(mmap, name)]
    first, last = -(-x.data_ptr() // _HUGE) * _HUGE, (x.data_ptr() + x.nbytes) // _HUGE * _HUGE
    if x.device.type != "cpu" or len(advice) < 2 or first >= last:
        return
    for asked in advice:  # The system may refuse, and the memory is as good as before.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(asked))


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated there, ``None`` where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
    if device.type != "cpu" or not set(names) <= set(getattr(os, "sysconf_names", ())):
        return None
    pages, size = map(os.sysconf, names)
    return pages * size


def too_long(name: str, value: int, asked: int, fixed: int, free: int | None, what: str) -> OutOfPages:
    """The error of fixed storage that finds too little memory.

    Args:
        name: The argument that says how long it is.
        value: Its value.
        asked: Bytes that it takes.
        fixed: Those of them that do not depend on the argument.
        free: Bytes that there are.
        what: What takes them.
    """
    fits = value if free is None else max(free - fixed, 0) * value // max(asked - fixed, 1)
    bound = "smaller" if fits >= value else f"at most {fits} for {free} free bytes"
    return OutOfPages(f"{name} must be {bound}, got {value}, which takes {asked} bytes for {what}")


def counted(count: int, noun: str) -> str:
    """``count`` of something: "1 token", "2 tokens"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
