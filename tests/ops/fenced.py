"""Calls of every operator on tensors that end, or begin, where memory begins that nobody may read.

    python -m ops.fenced "B S H D" "B H S D"

A call that reads or writes there ends the process; the line before says which it was.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import CODE_DTYPE
from kvloom.core.views import KVView
from kvloom.ops import Batch, Scores

HEADS, STORED, NEW = 2, 37, 3
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_LIBC = ctypes.CDLL(None, use_errno=True)
_KEPT: list[mmap.mmap] = []


def fenced(x: Tensor, side: str) -> Tensor:
    """A copy in memory of its own, with a page that nobody may touch ``behind`` it or ``before`` it."""
    nbytes = x.numel() * x.itemsize
    room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    _KEPT.append(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    fence = whole.data_ptr() + (room if side == "behind" else 0)
    if _LIBC.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    first = room - nbytes if side == "behind" else mmap.PAGESIZE
    own = whole[first : first + nbytes]
    own.copy_(x.contiguous().view(-1).view(torch.uint8))
    return own.view(x.dtype).view(x.shape)


def cache(
    bits: int, dtype: torch.dtype, axes: str, head_dim: int, fence: Callable[[Tensor], Tensor]
) -> KVView:
    """As many slots as are used; ``dtype`` is that of numbers, or of scales."""
    layout, sizes = CacheLayout(axes), {"B": 1, "S": STORED, "H": HEADS}
    zeros = torch.zeros(layout.shape(D=head_dim * (bits or 8) // 8, **sizes), dtype=torch.uint8)
    sides = [fence(zeros.view(CODE_DTYPE[bits]) if bits else zeros.to(dtype)) for _ in range(2)]
    if not bits:
        return KVView.split(layout, *sides)
    ones = torch.ones(layout.for_scale().shape(D=head_dim // 8, **sizes), dtype=dtype)
    return KVView.split(layout, *sides, fence(ones), fence(ones))


def call_all(side: str, axes: str) -> None:
    """Every operator, over codes, dtypes and head dims whose last vector is full or is not."""

    def fence(x: Tensor) -> Tensor:
        return fenced(x, side)

    starts, ends = (fence(torch.tensor([0, n])) for n in (NEW, STORED))
    zero, one = (fence(torch.tensor([n])) for n in (0, 1))
    batch = Batch(CacheIndex.offset(zero), starts, ends, first_visible=one)
    slots = fence(torch.arange(STORED))
    mask, heads = fence(torch.zeros(2 * HEADS, NEW, STORED)), fence(torch.ones(2 * HEADS))
    biased = Scores(mask=mask, alibi_slopes=heads, sinks=heads, window=30)
    for dtype, bits, head_dim in product(FLOATS, (0, *CODE_DTYPE), (8, 24, 40, 64)):
        sys.stdout.write(f"{side} {axes}: {dtype} {bits} {head_dim}\n")
        sys.stdout.flush()
        kv = cache(bits, torch.float16 if bits else dtype, axes, head_dim, fence)
        key, value = (fence(torch.randn(STORED, HEADS, head_dim).to(dtype)) for _ in range(2))
        query, out = (fence(torch.randn(NEW, 2 * HEADS, head_dim).to(dtype)) for _ in range(2))
        ops.rotate(query, 8)
        ops.store(key, value, slots, kv)
        ops.load(slots, kv, dtype=dtype)
        ops.copy(kv, slots[:9], kv, slots[-9:])
        for scores in (Scores(), biased):
            part = ops.attend_part(query, kv, batch, scores, skip=4, skip_from=one)
            prior = ops.AttendedPart(fence(part.out), fence(part.lse))
            ops.attend_part(query, kv, batch, scores, prior=prior)
            ops.attend(query, kv, batch, scores, out=out)


if __name__ == "__main__":
    for each in product(("behind", "before"), sys.argv[1:]):
        call_all(*each)
