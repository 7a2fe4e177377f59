"""The bytes of llama.cpp's states: in memory, in a file of a sequence, and in that of a context.

Versions: state files of a sequence 3, of a context 10, as llama-cpp-python 0.3.36 writes them. Little-endian,
packed without alignment. All sizes are compared with the bytes that are there before any is allocated.

Shapes: C cells, which are tokens; n elements of a row, H times D of a token.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvloom.carry.files.bytes import Cursor, Source, bytes_of
from kvloom.carry.files.writing import RoomFor, Target, new_room
from kvloom.carry.llama.ggml import GgmlType, type_of
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.ops.arrangement import arrange

STATE_MAGIC: Final = 0xAF143CD8
SEQUENCE_MAGIC: Final = 0x67677371
CONTEXT_MAGIC: Final = 0x6767736E
VERSIONS: Final = {
    "0.6.0": {SEQUENCE_MAGIC: 4, CONTEXT_MAGIC: 11},
    "0.5.0": {SEQUENCE_MAGIC: 3, CONTEXT_MAGIC: 10},
}
"""Versions of files by those of llama.cpp; since 0.6.0 they and states say how codes are rotated."""
SAYS_ROTATIONS: Final = "0.6.0"
FORMS: Final = {"state": STATE_MAGIC, "sequence": SEQUENCE_MAGIC, "context": CONTEXT_MAGIC}
"""First number of a state in memory, of a sequence's file, and of a context's file."""
_LONGEST_NAME: Final = 256
_PACKED, _PACKING = -1, 1
"""First numbers of tokens that a server packed: no token, and the version of that."""
_CELL: Final = 3
"""Numbers of a cell with one sequence id: position, number of ids, id."""


class StoredRows(NamedTuple):
    """Keys or values of one layer, as they lie in a state.

    Attributes:
        type: Type of the elements.
        raw: ``[C, bytes of a row]`` uint8; ``[n, bytes of C elements]`` of transposed values.
        is_transposed: Whether a row is one element of all tokens; then elements are floats.
    """

    type: GgmlType
    raw: Tensor
    is_transposed: bool

    @property
    def row_elements(self) -> int:
        """Elements of a token."""
        if self.is_transposed:
            return self.raw.shape[0]
        return self.raw.shape[1] // self.type.nbytes * self.type.block


@dataclass(frozen=True)
class StoredCache:
    """One of the caches of a state: layers that see all tokens, or those with a window.

    Attributes:
        positions: ``[C]`` int32, in the order of the cells.
        v_trans: Whether values are transposed, as a context without flash attention has them.
        keys: Keys of each layer.
        values: Values of each layer; empty of latents, whose values are a part of their keys.
        rotations: Elements of a key and of a value that are rotated together, 0 for none; ``None`` if it is
            not said.
    """

    positions: Tensor
    v_trans: bool
    keys: tuple[StoredRows, ...]
    values: tuple[StoredRows, ...]
    rotations: tuple[int, int] | None = None


@dataclass(frozen=True)
class LlamaState:
    """What a state says, without its numbers.

    Attributes:
        form: One of ``FORMS``.
        caches: One, or two with windows: layers that see all tokens first.
        tokens: Ids of the tokens of a file; ``None`` of a state in memory.
        architecture: Name of the architecture in a context's file; empty elsewhere.
    """

    form: str
    caches: tuple[StoredCache, ...]
    tokens: tuple[int, ...] | None = None
    architecture: str = ""


def parse_state(source: Source, has_values: bool | None = None) -> LlamaState:
    """What a state or one of its files says; numbers stay where they are until they are read.

    Args:
        source: A file, or the bytes of a state or of a file.
        has_values: Whether layers have values, which those of latents have not. ``None``: what fits to the
            last byte.

    Raises:
        ArgumentError: it is no whole state of one sequence, to the last byte.
        UnsupportedError: a type of its elements is not carried.
        OSError: the file cannot be read.
    """
    data = bytes_of("source", source)
    if has_values is not None:
        return _parse(Cursor("source", data), has_values)
    try:
        return _parse(Cursor("source", data), True)
    except ArgumentError as error:
        try:
            return _parse(Cursor("source", data), False)
        except ArgumentError:
            raise error from None


def _parse(cursor: Cursor, has_values: bool) -> LlamaState:
    [magic] = cursor.numbers("I", "a magic number")
    names = {number: form for form, number in FORMS.items()}
    if magic not in names:
        raise ArgumentError(f"source must be a state of llama.cpp or a file of one, got magic {magic:#010x}")
    tokens, architecture, version = None, "", None
    if magic == STATE_MAGIC:
        cursor.numbers("i", "a sequence id")
    else:
        number, count = cursor.numbers("II", "a version and a number of tokens")
        known = {numbers[magic]: name for name, numbers in VERSIONS.items()}
        if number not in known:
            wanted = " or ".join(map(str, sorted(known)))
            raise ArgumentError(
                f"source must be of version {wanted} of a {names[magic]}'s file, got {number}"
            )
        version = known[number]
        tokens = _unpacked(cursor.table(count, 1, "tokens").flatten().tolist())
    if magic == CONTEXT_MAGIC:
        architecture = _name_at(cursor)
    caches = _caches_of_any(cursor, has_values) if version is None else _caches(cursor, has_values, version)
    return LlamaState(names[magic], caches, tokens, architecture)


def _caches_of_any(cursor: Cursor, has_values: bool) -> tuple[StoredCache, ...]:
    """Caches of a state in memory, which names no version: those that end with the last byte."""
    other = Cursor(cursor.name, cursor.data)
    other.at = cursor.at
    try:
        return _caches(cursor, has_values, "0.5.0")
    except (ArgumentError, UnsupportedError):
        try:
            return _caches(other, has_values, SAYS_ROTATIONS)
        except (ArgumentError, UnsupportedError):
            if other.at > cursor.at + 8:  # it was read further, and not only the two numbers that it has more
                raise
        raise


def _caches(cursor: Cursor, has_values: bool, version: str) -> tuple[StoredCache, ...]:
    caches = list[StoredCache]()
    while cursor.left or not caches:
        if len(caches) == 2:
            raise ArgumentError(f"source must end with its second cache, got {cursor.left:,} more bytes")
        caches.append(_parse_cache(cursor, has_values, version == SAYS_ROTATIONS))
    return tuple(caches)


def _unpacked(tokens: list[int]) -> tuple[int, ...]:
    """Ids of a file; a server of llama.cpp packs them with where pictures begin, and zeros behind."""
    if tokens[:1] != [_PACKED]:
        return tuple(tokens)
    if len(tokens) < 3 or tokens[1] != _PACKING or not 0 <= tokens[2] <= len(tokens) - 4:
        raise ArgumentError(f"source must have tokens as a server packs them, got {tokens[:4]}")
    found, rest = tokens[3 : 3 + tokens[2]], tokens[3 + tokens[2] :]
    if any(rest):
        raise ArgumentError(f"source must have no pictures or sounds among its tokens, got {rest[0]:,}")
    return tuple(found)


def _name_at(cursor: Cursor) -> str:
    [length] = cursor.numbers("I", "the length of an architecture's name")
    if length > _LONGEST_NAME:
        raise ArgumentError(f"source must name an architecture in {_LONGEST_NAME} bytes, got {length:,}")
    try:
        return bytes(cursor.take(length, "an architecture's name").tolist()).decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(f"source must name an architecture in UTF-8: {error}") from error


def _parse_cache(cursor: Cursor, has_values: bool, has_rotations: bool) -> StoredCache:
    streams, cells = cursor.numbers("II", "streams and cells")
    if streams != 1:
        raise ArgumentError(f"source must have one stream, got {streams:,}")
    if not cells:
        raise ArgumentError("source must have cells, got none")
    table = cursor.table(cells, _CELL, "cells")
    wrong = (table[:, 1] != 1).nonzero()
    if len(wrong):
        cell = int(wrong[0])
        raise ArgumentError(f"source must have one sequence in cell {cell:,}, got {int(table[cell, 1]):,}")
    v_trans, layers = cursor.numbers("II", "v_trans and layers")
    if v_trans not in (0, 1):
        raise ArgumentError(f"source must have v_trans 0 or 1, got {v_trans:,}")
    if not layers:
        raise ArgumentError("source must have layers, got none")
    rotations = _rotations_at(cursor) if has_rotations else None
    least = 13 * cells  # a row of one byte and its header
    if layers * least > cursor.left:
        raise ArgumentError(f"source must have room for its layers, got {layers:,} in {cursor.left:,} bytes")
    keys = tuple(_rows_at(cursor, cells, f"keys of layer {i}") for i in range(layers))
    values = tuple[StoredRows, ...]()
    if has_values:
        read: Callable[[Cursor, int, str], StoredRows] = _columns_at if v_trans else _rows_at
        values = tuple(read(cursor, cells, f"values of layer {i}") for i in range(layers))
    return StoredCache(table[:, 0].clone(), bool(v_trans), keys, values, rotations)


def _rotations_at(cursor: Cursor) -> tuple[int, int]:
    of_keys, of_values = cursor.numbers("II", "rotations")
    for n in (of_keys, of_values):
        if n & (n - 1) or 0 < n < 64:
            raise ArgumentError(f"source must have rotations of 64 elements, 128 and so on, got {n:,}")
    return of_keys, of_values


def _rows_at(cursor: Cursor, cells: int, what: str) -> StoredRows:
    number, nbytes = cursor.numbers("iQ", f"the header of {what}")
    found = type_of(number)
    if not nbytes or nbytes % found.nbytes:
        raise ArgumentError(
            f"source must have {what} in rows of whole blocks of {found.nbytes} bytes, got {nbytes:,}"
        )
    return StoredRows(found, cursor.take(nbytes * cells, what).view(cells, nbytes), False)


def _columns_at(cursor: Cursor, cells: int, what: str) -> StoredRows:
    number, nbytes, rows = cursor.numbers("iII", f"the header of {what}")
    found = type_of(number)
    if found.dtype is None or nbytes != found.nbytes or not rows:
        raise ArgumentError(
            f"source must have {what} transposed in floats, got {rows:,} rows of {nbytes:,} bytes of "
            f"{found.name}"
        )
    return StoredRows(found, cursor.take(nbytes * rows * cells, what).view(rows, cells * nbytes), True)


# --- writing -----------------------------------------------------------------------------------------------


class RowsToWrite(NamedTuple):
    """Keys or values of one layer that are made when they are written.

    Attributes:
        type: Type of the elements.
        elements: Elements of a row.
        parts: Function that makes ``[c, bytes of a row]`` uint8 of some tokens after the other, in the memory
            that it is given or elsewhere, each with the number of its first token.
    """

    type: GgmlType
    elements: int
    parts: Callable[[RoomFor], Iterable[tuple[int, Tensor]]]


class CacheToWrite(NamedTuple):
    """One cache of a state; fields as of ``StoredCache``, positions in order."""

    positions: range
    v_trans: bool
    keys: Sequence[RowsToWrite]
    values: Sequence[RowsToWrite]
    rotations: tuple[int, int] | None


def write_head(file: Target, form: str, version: str, tokens: Sequence[int], architecture: str) -> None:
    """Write what is before the first cache of a state or file of a version of llama.cpp."""
    if form == "state":
        file.write(struct.pack("<Ii", STATE_MAGIC, 0))
        return
    magic = FORMS[form]
    file.write(struct.pack("<III", magic, VERSIONS[version][magic], len(tokens)))
    file.write_tensor(torch.tensor(tokens, dtype=torch.int32))
    if form == "context":
        name = architecture.encode()
        file.write(struct.pack("<I", len(name)) + name)


def write_cache(file: Target, cache: CacheToWrite) -> None:
    """Write one cache, layer by layer."""
    cells = len(cache.positions)
    file.write(struct.pack("<II", 1, cells))
    table = torch.zeros(cells, _CELL, dtype=torch.int32)  # a sequence id of any value is taken
    table[:, 0] = torch.arange(cache.positions.start, cache.positions.stop)
    table[:, 1] = 1
    file.write_tensor(table)
    file.write(struct.pack("<II", cache.v_trans, len(cache.keys)))
    if cache.rotations is not None:
        file.write(struct.pack("<II", *cache.rotations))
    for rows in cache.keys:
        _write_rows(file, rows, cells)
    for rows in cache.values:
        (_write_columns if cache.v_trans else _write_rows)(file, rows, cells)


def _write_rows(file: Target, rows: RowsToWrite, cells: int) -> None:
    file.write(struct.pack("<iQ", rows.type.number, rows.type.row_bytes(rows.elements)))
    for _, part in rows.parts(file.room):
        file.write_tensor(part)


def _write_columns(file: Target, rows: RowsToWrite, cells: int) -> None:
    """Write transposed values: a row is one element of all tokens."""
    file.write(struct.pack("<iII", rows.type.number, rows.type.nbytes, rows.elements))
    integers = torch.int32 if rows.type.nbytes == 4 else torch.int16
    columns = file.room((rows.elements, cells), integers)
    for first, part in rows.parts(new_room):
        arrange(part.view(integers)[:, None], columns.t()[first : first + len(part), None])
    file.write_tensor(columns)
