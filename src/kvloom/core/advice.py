"""Advice to the system about memory: huge pages, and memory that is given back before its tensor goes."""

import ctypes
import mmap
import sys

from torch import Tensor

from kvloom.core.memory import span_of


def advise(name: str, first: int, last: int) -> bool:
    """Advise Linux of the use of addresses; returns whether it took the advice.

    After ``MADV_DONTNEED`` private memory is zero there, and on no other system.
    """
    if sys.platform != "linux" or not hasattr(mmap, name):
        return False
    size = ctypes.c_size_t(last - first)
    return not ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, ctypes.c_int(getattr(mmap, name)))


def give_back(*tensors: Tensor) -> None:
    """Give the memory of tensors on the CPU back to the system, where no others lie between their elements.

    Nobody reads them afterwards: they may be zero.
    """
    mixed = list[Tensor]()
    for x in tensors:
        if not _give_back(x):
            mixed.append(x)
    if mixed:  # as keys and values of one tensor
        _give_back(*mixed)


def _give_back(*tensors: Tensor) -> bool:
    """Give back the memory of tensors if together they are all of it; returns whether they are."""
    spans = [span_of(x) for x in tensors]
    start, end = min(first for first, _ in spans), max(last for _, last in spans)
    if end - start != sum(x.nbytes for x in tensors):
        return False
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        advise("MADV_DONTNEED", first, last)
    return True
