"""Tensors of a safetensors file, read where they lie and written one after the other."""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvloom.carry.files.bytes import Cursor, typed
from kvloom.carry.files.writing import FileBehind, RoomFor
from kvloom.core.specs import dtype_name
from kvloom.errors import ArgumentError

DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.int32,  # of which only bits are read
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Dtypes that are read, by their names in a file."""
FLOAT_NAMES: Final = {dtype_name(DTYPES[name]): name for name in ("F32", "F16", "BF16")}
"""Names in a file of float dtypes."""
_ALIGNED: Final = 8


class StoredTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        dtype: Its dtype, a name of ``DTYPES``.
        shape: Its shape.
        raw: Its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    raw: Tensor

    def load(self) -> Tensor:
        """The tensor; a view of the file's bytes where they are aligned."""
        return typed(self.raw, DTYPES[self.dtype]).view(self.shape)


def read_tensors(data: Tensor) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors by name, and the metadata.

    Args:
        data: Bytes of the file.

    Raises:
        ArgumentError: it is no whole safetensors file, its tensors do not fill it, or one has another dtype.
    """
    cursor = Cursor("source", data)
    [size] = cursor.numbers("Q", "the size of a header")
    text = bytes(cursor.take(size, "a header").tolist())
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"source must have a header of JSON: {error}") from error
    if not isinstance(header, dict):
        raise ArgumentError(f"source must have an object as its header, got {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise ArgumentError("source must have texts as metadata")
    places = sorted((_place(name, entry), name) for name, entry in header.items())
    found, at = dict[str, StoredTensor](), 0
    for (begin, end), name in places:
        dtype, shape = header[name]["dtype"], tuple(header[name]["shape"])
        if begin != at or end - begin != prod(shape) * DTYPES[dtype].itemsize:
            raise ArgumentError(
                f"source must have tensor {name} from byte {at:,} on, of the bytes of {dtype} {list(shape)}, "
                f"got {begin:,} to {end:,}"
            )
        found[name] = StoredTensor(dtype, shape, cursor.take(end - begin, f"tensor {name}"))
        at = end
    if cursor.left:
        raise ArgumentError(f"source must end with its tensors, got {cursor.left:,} more bytes")
    return found, metadata


def _place(name: str, entry: Any) -> tuple[int, int]:
    """First byte of a tensor and that behind it, once its entry was checked."""
    is_known = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
    if not is_known or not (_are_sizes(entry["shape"]) and _are_sizes(entry["data_offsets"], 2)):
        raise ArgumentError(f"source must have dtype, shape and offsets of tensor {name}")
    if entry["dtype"] not in DTYPES:
        raise ArgumentError(
            f"source must have tensors of {', '.join(DTYPES)}, got {entry['dtype']!r} of {name}"
        )
    begin, end = entry["data_offsets"]
    return begin, end


def _are_sizes(numbers: Any, count: int | None = None) -> bool:
    if not isinstance(numbers, list) or count not in (None, len(numbers)):
        return False
    return all(type(x) is int and 0 <= x < 1 << 62 for x in numbers)


class TensorToWrite(NamedTuple):
    """A tensor that is made when it is written.

    Attributes:
        dtype: Its dtype, a name of ``DTYPES``.
        shape: Its shape.
        parts: Function that makes its parts ``[..., t, n]``, in the memory that it is given or elsewhere, in
            order along the last axis but one, each with the number of its first row; together they are all
            rows.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[RoomFor], Iterable[tuple[int, Tensor]]]

    @classmethod
    def whole(cls, dtype: str, shape: tuple[int, ...], make: Callable[[], Tensor]) -> "TensorToWrite":
        """A tensor that is made at once."""
        return cls(dtype, shape, lambda room: [(0, make())])


def write_tensors(
    file: FileBehind, tensors: Mapping[str, TensorToWrite], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file; each part goes to its rows at once, so that few are in memory."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, x in tensors.items():
        nbytes = prod(x.shape) * DTYPES[x.dtype].itemsize
        header[name] = {"dtype": x.dtype, "shape": [*x.shape], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    file.write(struct.pack("<Q", len(text)) + text)
    begin = file.end
    for name, x in tensors.items():
        at = begin + header[name]["data_offsets"][0]
        for first, part in x.parts(file.room):
            row = prod(x.shape[-1:]) * part.itemsize
            width, stride = (row * (shape[-2] if len(shape) > 1 else 1) for shape in (part.shape, x.shape))
            file.write_rows(at + first * row, part, width, stride)
