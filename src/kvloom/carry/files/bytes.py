"""Files as bytes that are mapped, and a cursor that stays within them."""

import os
import struct
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvloom.errors import ArgumentError

Source: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | Tensor
"""A file by its path, or its bytes; ``bytearray`` and uint8 tensors are not copied."""


def bytes_of(name: str, source: Source) -> Tensor:
    """Bytes of a source, ``[n]`` uint8; a file is mapped, and only what is looked at is read.

    Raises:
        ArgumentError: it is empty, or no such source.
        OSError: the file cannot be read.
    """
    if isinstance(source, Tensor):
        if source.dtype != torch.uint8 or source.ndim != 1 or not source.is_contiguous():
            raise ArgumentError(
                f"{name} must be bytes, one after the other, got {source.dtype} {list(source.shape)}"
            )
        data = source
    elif isinstance(source, bytes | bytearray | memoryview):
        data = torch.empty(0, dtype=torch.uint8)
        if len(source):
            data = torch.frombuffer(
                source if isinstance(source, bytearray) else bytearray(source), dtype=torch.uint8
            )
    elif isinstance(source, str | os.PathLike):
        with Path(source).open("rb") as file:  # the system's message
            size = file.seek(0, os.SEEK_END)
        data = torch.empty(0, dtype=torch.uint8)
        if size:
            data = torch.from_file(os.fspath(source), shared=False, size=size, dtype=torch.uint8)
    else:
        raise ArgumentError(f"{name} must be a path or bytes, got {type(source).__name__}")
    if not len(data):
        raise ArgumentError(f"{name} must have bytes, got none")
    return data


class Cursor:
    """A place in bytes, and what is read there.

    Args:
        name: Name of the source in errors.
        data: ``[n]`` uint8.
    """

    def __init__(self, name: str, data: Tensor) -> None:
        self.name, self.data, self.at = name, data, 0

    @property
    def left(self) -> int:
        """Bytes behind this place."""
        return len(self.data) - self.at

    def take(self, nbytes: int, what: str) -> Tensor:
        """A view of the next bytes.

        Raises:
            ArgumentError: there are fewer.
        """
        if nbytes > self.left:
            raise ArgumentError(
                f"{self.name} must have {nbytes:,} bytes of {what} at byte {self.at:,}, got {self.left:,}"
            )
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        """The next numbers, little-endian and side by side, as of ``struct``; errors as ``take``."""
        data = self.take(struct.calcsize(f"<{form}"), what)
        return struct.unpack(f"<{form}", bytes(data.tolist()))

    def table(self, rows: int, columns: int, what: str) -> Tensor:
        """The next int32 numbers ``[rows, columns]``, copied; errors as ``take``."""
        return self.take(4 * rows * columns, what).clone().view(torch.int32).view(rows, columns)


def typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes ``[..., n]`` as numbers ``[..., n / itemsize]``; a copy where they are not aligned."""
    is_aligned = raw.data_ptr() % dtype.itemsize == 0 and raw.storage_offset() % dtype.itemsize == 0
    return (raw if is_aligned and raw.is_contiguous() else raw.clone()).view(dtype)
