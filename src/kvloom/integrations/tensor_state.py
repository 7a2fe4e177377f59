"""Signs that a tensor was written: its version, address and a sample of its elements; and its sum."""

import ctypes
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.store.sums import checksum

_SAMPLED: Final = 64
"""Least number of elements in the sample of a tensor that has as many."""
_FORMATS: Final = {2: "H", 4: "I", 8: "Q"}
"""Formats of ``memoryview`` by the bytes of an element."""


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
    """Place that is sampled: the tensor, first byte, and number of bytes.

    ``None`` for an empty tensor, or one that is not a contiguous plain tensor on the CPU.
    """
    if tensor.device.type != "cpu" or type(tensor.data) is not Tensor or not tensor.is_contiguous():
        return None
    first = int(tensor.storage_offset()) * tensor.itemsize
    return (tensor, first, tensor.nbytes) if tensor.nbytes else None


def sample_at(tensor: Tensor, first: int, count: int) -> bytes:
    """Elements throughout the memory of a tensor; empty if the memory became too small."""
    storage = tensor.untyped_storage()  # held while it is read, whatever other threads do to the tensor
    if storage.nbytes() < first + count:
        return b""
    return bytes(spread(elements_at(storage.data_ptr() + first, count, tensor.itemsize), _SAMPLED).tobytes())


def elements_at(address: int, nbytes: int, itemsize: int) -> memoryview:
    """Elements in memory, as integers of their size; the memory is not kept alive."""
    kind: Any = ctypes.c_uint8 * nbytes
    memory = memoryview(kind.from_address(address)).cast("B")
    return memory.cast(_FORMATS.get(itemsize, "B"))  # type: ignore[call-overload, no-any-return]


def spread(elements: memoryview, count: int) -> memoryview:
    """At least ``count`` elements throughout others, if there are so many."""
    # A step is odd, so that other rows have other columns in the sample.
    return elements[:: len(elements) // count | 1]


def sample_on_devices(tensors: Iterable[Tensor]) -> list[bytes]:
    """Elements throughout tensors in memory that the processor cannot read, copied once from each device."""
    parts: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        elements = x.detach().reshape(-1)[:: x.numel() // _SAMPLED | 1]
        parts.setdefault(x.device, []).append(elements.float())
    return [torch.cat(x).cpu().numpy().tobytes() for x in parts.values()]


def sum_of(tensor: Tensor) -> str:
    """Dtype, shape and a checksum of a tensor's bytes; without it if they are not in memory."""
    found = bytes_sum(tensor)
    return f"{tensor.dtype} {list(tensor.shape)}{'' if found is None else ' ' + found.hex()}"


def bytes_sum(tensor: Any) -> bytes | None:
    """Checksum of the bytes of a tensor; ``None`` if it is no tensor in memory."""
    try:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    # What is no tensor has no ``detach``; on the meta device, or in another library's format, no bytes.
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
    return checksum(memoryview(data))
