"""The heads of runs that lie in a store."""

from typing import Final

from kvloom.store.backends import Backend, Stored
from kvloom.store.format import DamagedRun, Run, head_bytes, read_head

_FIRST_READ: Final = 64 << 10
"""Bytes in which the heads of most runs lie."""


def head_of(backend: Backend, x: Stored) -> tuple[Run, int]:
    """The run that an object holds, and where its pages begin, of as few bytes as that takes.

    Raises:
        DamagedRun: it holds none.
        FileNotFoundError: it was removed.
    """
    data = bytes(backend.get_ranges(x.name, [(0, min(x.size, _FIRST_READ))]))
    try:
        return read_head(data, x.size)
    except DamagedRun:
        if len(data) >= x.size or head_bytes(data) > x.size:
            raise
    return read_head(bytes(backend.get_ranges(x.name, [(0, x.size)])), x.size)  # a long head
