"""Advice to the operating system: memory in pages of 2 MiB, of which the processor finds more at once."""

import ctypes
import mmap
from typing import Final

from torch import Tensor

_HUGE: Final = 2 << 20


def advise_huge_pages(x: Tensor) -> None:
    """Advise huge pages for the memory of ``x``, best before it is first touched; elsewhere do nothing."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    first, last = -(-x.data_ptr() // _HUGE) * _HUGE, (x.data_ptr() + x.nbytes) // _HUGE * _HUGE
    if x.device.type != "cpu" or advice is None or first >= last:
        return
    # Advice: the system may refuse, and the memory is as good as before.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice))
