"""Signs that a tensor was written: its version, address and a sample of its bytes."""

import ctypes
from typing import Final

from torch import Tensor

_SAMPLE_BYTES: Final = 64


def version_of(tensor: Tensor) -> int:
    """Number of writes of a tensor that torch counted; -1 for inference tensors."""
    return -1 if tensor.is_inference() else tensor._version


def address_of(tensor: Tensor) -> int:
    """Address of the memory of a tensor."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return id(tensor)


def sample_place(tensor: Tensor) -> tuple[Tensor, int, int] | None:
    """Place of a sample in the middle of a tensor: the tensor, first byte, and number of bytes.

    ``None`` for an empty tensor, or one that is not a contiguous plain tensor on the CPU.
    """
    if tensor.device.type != "cpu" or type(tensor.data) is not Tensor or not tensor.is_contiguous():
        return None
    count = min(tensor.nbytes, _SAMPLE_BYTES)
    first = int(tensor.storage_offset()) * tensor.itemsize + (tensor.nbytes - count) // 2
    return (tensor, first, count) if count else None


def bytes_at(tensor: Tensor, first: int, count: int) -> bytes:
    """Bytes of the memory of a tensor; empty if the memory became too small."""
    storage = tensor.untyped_storage()  # held while it is read, whatever other threads do to the tensor
    if storage.nbytes() < first + count:
        return b""
    return ctypes.string_at(storage.data_ptr() + first, count)
