"""Memory of caches: allocation of tensors, and errors when there is too little."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvloom.core.views import raw
from kvloom.errors import OutOfPages

if TYPE_CHECKING:
    from kvloom.caches.fixed import FixedLayer

_HUGE: Final = 2 << 20


def outside_inference_mode() -> AbstractContextManager[object]:
    """Context for tensors that can be written inside and outside ``torch.inference_mode()``."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros; on the CPU in huge pages (2 MiB) where possible, for fewer TLB misses."""
    x = torch.empty(shape, dtype=dtype, device=device)
    _ask_for_huge_pages(x)
    raw(x).zero_()
    return x


def _ask_for_huge_pages(x: Tensor) -> None:
    """Ask for huge pages. Pages that were touched before are dropped: the size is fixed at first touch."""
    advice = [getattr(mmap, name) for name in ("MADV_DONTNEED", "MADV_HUGEPAGE") if hasattr(mmap, name)]
    first, last = -(-x.data_ptr() // _HUGE) * _HUGE, (x.data_ptr() + x.nbytes) // _HUGE * _HUGE
    if x.device.type != "cpu" or len(advice) < 2 or first >= last:
        return
    for asked in advice:  # If the system refuses, normal pages do.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(asked))


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; ``None`` if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
    if device.type != "cpu" or not set(names) <= set(getattr(os, "sysconf_names", ())):
        return None
    pages, size = map(os.sysconf, names)
    return pages * size


def too_long_for(layers: "Sequence[FixedLayer]", key: Tensor, value: Tensor) -> OutOfPages:
    """Error for fixed layers of one cache that have too little memory for ``[B, H, any, D]`` in each."""
    nbytes = [layer.nbytes_for(key, value) for layer in layers]
    asked = sum(nbytes)
    # The bytes of short windows do not depend on the length.
    fixed = sum(n for n, x in zip(nbytes, layers, strict=True) if x.num_slots < (x.max_tokens or 0))
    length = layers[0].max_tokens or layers[0].window or 0
    free, bound = free_bytes(key.device), "smaller"
    if free is not None:
        free += sum(layer.nbytes for layer in layers)
        fits = max(free - fixed, 0) * length // max(asked - fixed, 1)
        bound = "smaller" if fits >= length else f"at most {fits} for {free} free bytes"
    return OutOfPages(
        f"{layers[0].length_name} must be {bound}, got {length}, which takes {asked} bytes for "
        f"{counted(key.shape[0], 'sequence')} in {counted(len(layers), 'layer')}"
    )


def counted(count: int, noun: str) -> str:
    """Number and noun: "1 token", "2 tokens"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
