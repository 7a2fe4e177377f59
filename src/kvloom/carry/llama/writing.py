"""A ``CarriedCache`` as a state of llama.cpp, or as one of its files."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

import torch
from torch import Tensor

from kvloom.carry.carried import (
    CarriedCache,
    CarriedLayer,
    CarriedSide,
    Int8Codes,
    Vectors,
    expect_exact,
    expect_finite,
    floats_of,
)
from kvloom.carry.files.writing import InMemory, RoomFor, Target, new_room, written_whole
from kvloom.carry.float_parts import float_parts
from kvloom.carry.geometry import CacheGeometry, LayerGeometry, expect_layers
from kvloom.carry.llama.codes import coded_rows
from kvloom.carry.llama.conventions import (
    architecture_of,
    expect_rotation_said,
    kind_of_codes,
    rotation_of,
    rotations_of,
)
from kvloom.carry.llama.ggml import Q4_0, Q8_0, GgmlType, quantize, rows_of, type_named
from kvloom.carry.llama.reading import layer_groups
from kvloom.carry.llama.state import (
    FORMS,
    SAYS_ROTATIONS,
    VERSIONS,
    CacheToWrite,
    RowsToWrite,
    write_cache,
    write_head,
)
from kvloom.carry.rope_pairs import to_adjacent
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.quant.rotation import rotate

_Parts: TypeAlias = Iterator[tuple[int, Tensor]]
_KINDS: Final = {"int8:": Q8_0.name, Q8_0.name: Q8_0.name, Q4_0.name: Q4_0.name}
"""Types of codes by the first letters of kinds."""


def write_llama(
    cache: CarriedCache,
    target: str | os.PathLike[str],
    geometry: CacheGeometry,
    *,
    form: str = "sequence",
    kind: str | None = None,
    pairs: str | None = None,
    rotated: bool | None = None,
    flash_attention: bool = True,
    rounding: bool = False,
    version: str = "0.5.0",
) -> None:
    """Write a file that llama.cpp loads into a sequence or a context; it has its name when it is complete.

    Args:
        cache: What to write.
        target: Path of the file.
        geometry: Sizes of the model's layers.
        form: ``"sequence"`` for ``llama_state_seq_load_file``, ``"context"`` for ``llama_state_load_file``,
            or ``"state"`` for ``llama_state_seq_set_data``.
        kind: Type of the context's cache, such as ``"f16"``, ``"q8_0"`` or ``"q4_0"``; ``None`` for what the
            cache has.
        pairs: As of ``read_llama``.
        rotated: Whether the process that loads it rotates codes, as llama.cpp does unless it is told not to.
        flash_attention: Whether the context has flash attention; without it values are transposed.
        rounding: Whether numbers may be rounded to ``kind``.
        version: Version of llama.cpp that reads it, ``"0.6.0"`` or ``"0.5.0"``; neither reads the other's.

    Raises:
        ArgumentError: the cache does not fit the model or ``kind``, or has a NaN; nothing was written.
        UnsupportedError: llama.cpp has no such cache.
        OSError: the file cannot be written.
    """
    plan = _Plan.of(cache, geometry, form, kind, pairs, rotated, flash_attention, rounding, version)
    with written_whole(target) as file:
        plan.write(file)


def llama_state(
    cache: CarriedCache,
    geometry: CacheGeometry,
    *,
    kind: str | None = None,
    pairs: str | None = None,
    rotated: bool | None = None,
    flash_attention: bool = True,
    rounding: bool = False,
    version: str = "0.5.0",
) -> bytes:
    """The bytes for ``llama_state_seq_set_data``; arguments and errors as of ``write_llama``."""
    file = InMemory()
    _Plan.of(cache, geometry, "state", kind, pairs, rotated, flash_attention, rounding, version).write(file)
    return file.getvalue()


class _Plan:
    """What a file will have, checked before it is begun."""

    def __init__(
        self, form: str, version: str, cache: CarriedCache, architecture: str, parts: list[CacheToWrite]
    ) -> None:
        self.form, self.version, self.cache = form, version, cache
        self.architecture, self.parts = architecture, parts

    @classmethod
    def of(
        cls,
        cache: CarriedCache,
        geometry: CacheGeometry,
        form: str,
        kind: str | None,
        pairs: str | None,
        rotated: bool | None,
        flash_attention: bool,
        rounding: bool,
        version: str,
    ) -> "_Plan":
        if version not in VERSIONS:
            raise ArgumentError(f"version must be one of {', '.join(VERSIONS)}, got {version!r}")
        if form not in FORMS:
            raise ArgumentError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
        found = architecture_of(geometry.architecture, pairs)
        if form == "context" and not found.name:
            raise ArgumentError(
                f"form must be one without an architecture's name for {geometry.architecture!r}"
            )
        expect_layers(cache, geometry)
        types = [_type_for(kind, [getattr(x, side) for x in cache.layers]) for side in ("keys", "values")]
        for found_type in types:
            if found_type.dtype is not None:
                expect_exact(cache, found_type.kind, rounding)
        has_codes = any(x.dtype is None for x in types)
        has_latents = any(x.has_latents for x in cache.layers)
        if has_codes and (has_latents or not flash_attention):
            why = "of latents" if has_latents else "without flash attention"
            name = next(x.name for x in types if x.dtype is None)
            raise UnsupportedError(f"kind must be floats {why}, got {name}")
        groups = layer_groups(geometry)
        if len(groups) == 1 and cache.layers[0].keys.num_tokens != cache.num_tokens:
            raise UnsupportedError(
                f"cache must hold all {cache.num_tokens} tokens where llama.cpp has one cache, got "
                f"{cache.layers[0].keys.num_tokens} of a window"
            )
        dims = [dim for x in geometry.layers for dim in (x.key_dim, x.value_dim)]
        turned = expect_rotation_said(rotated, has_codes, dims)
        if has_codes and not rounding:
            _expect_codes(cache, types, turned)
        write = _Rows(types, found.pairs == "adjacent", turned, rounding)
        rotations = None
        if version == SAYS_ROTATIONS:
            sizes = geometry.layers[0]
            key, value = (x.dtype is None for x in types)
            rotations = rotations_of(turned, (key, value), (sizes.key_dim, sizes.value_dim))
        parts = []
        for numbers in groups:
            held = cache.layers[numbers[0]].keys.num_tokens
            keys = [write.keys(i, cache.layers[i], geometry.layers[i]) for i in numbers]
            values = [] if has_latents else [write.values(i, cache.layers[i]) for i in numbers]
            positions = range(cache.num_tokens - held, cache.num_tokens)
            parts.append(CacheToWrite(positions, not flash_attention, keys, values, rotations))
        return cls(form, version, cache, found.name, parts)

    def write(self, file: Target) -> None:
        write_head(file, self.form, self.version, self.cache.tokens or (), self.architecture)
        for part in self.parts:
            write_cache(file, part)


def _type_for(kind: str | None, sides: Sequence[CarriedSide]) -> GgmlType:
    """Type of keys or of values; that which they have if ``kind`` is ``None``."""
    if kind is not None:
        return type_named(kind)
    kinds = {next((t for k, t in _KINDS.items() if x.kind.startswith(k)), x.kind) for x in sides}
    if len(kinds) != 1:
        raise ArgumentError(f"kind must be given for a cache of {', '.join(sorted(kinds))}, got None")
    return type_named(kinds.pop())


def _expect_codes(cache: CarriedCache, types: Sequence[GgmlType], rotated: bool) -> None:
    """Raise ArgumentError unless sides that are written as codes have codes that may fit."""
    for layer in cache.layers:
        for (name, side), wanted in zip(layer.sides, types, strict=True):
            kind = kind_of_codes(wanted.name, rotated, side.head_dim)
            if wanted.dtype is None and side.kind != kind and not side.kind.startswith("int8:"):
                raise ArgumentError(
                    f"kind must hold {name} in {side.kind} without rounding, got {kind}: rounding was not "
                    f"asked for"
                )


class _Rows:
    """Makes the rows of layers."""

    def __init__(self, types: Sequence[GgmlType], is_adjacent: bool, rotated: bool, rounding: bool) -> None:
        self._types, self._is_adjacent, self._rotated, self._rounding = types, is_adjacent, rotated, rounding

    def keys(self, number: int, layer: CarriedLayer, sizes: LayerGeometry) -> RowsToWrite:
        """Keys of a layer, or its latents with their rope keys."""
        rotary = sizes.rotary if self._is_adjacent else 0
        if not layer.has_latents:
            return self._side("keys", number, layer.keys, rotary)
        elements = layer.keys.head_dim + layer.values.head_dim
        return RowsToWrite(self._types[0], elements, partial(self._latents, number, layer, rotary))

    def values(self, number: int, layer: CarriedLayer) -> RowsToWrite:
        """Values of a layer."""
        return self._side("values", number, layer.values, 0)

    def _side(self, name: str, number: int, side: CarriedSide, rotary: int) -> RowsToWrite:
        wanted = self._types[name == "values"]
        elements = side.heads * side.head_dim
        wanted.row_bytes(elements)  # whole blocks, or an error before anything is written
        make = self._codes if wanted.dtype is None else self._floats
        return RowsToWrite(wanted, elements, partial(make, name, number, side, rotary))

    def _floats(self, name: str, number: int, side: CarriedSide, rotary: int, room: RoomFor) -> _Parts:
        dtype = self._types[name == "values"].dtype or torch.float32
        for first, x in float_parts(name, number, side, dtype, room, rotary):
            yield first, _as_bytes(x)

    def _codes(self, name: str, number: int, side: CarriedSide, rotary: int, room: RoomFor) -> _Parts:
        for tokens in side.parts():
            yield tokens.start, self._codes_of(name, number, side, rotary, side.load(tokens))

    def _codes_of(self, name: str, number: int, side: CarriedSide, rotary: int, vectors: Vectors) -> Tensor:
        expect_finite(name, number, vectors)
        rotation = rotation_of(side.head_dim, name == "keys") if self._rotated else 0
        kind = self._types[name == "values"]
        if isinstance(vectors, Int8Codes) and rotary in (0, side.head_dim):
            try:
                return coded_rows(vectors, kind, bool(rotary), rotation)
            except ArgumentError:
                if not self._rounding:
                    raise
        x = floats_of(vectors).float()
        x = to_adjacent(x, rotary) if rotary else x
        x = rotate(x, rotation) if rotation else x
        codes, scales = quantize(x.flatten(1), kind)
        expect_finite(name, number, scales)
        return rows_of(codes, scales, kind)

    def _latents(self, number: int, layer: CarriedLayer, rotary: int, room: RoomFor) -> _Parts:
        dtype, parts = self._types[0].dtype or torch.float32, []
        for (name, side), turned in zip(layer.sides, (0, rotary), strict=True):
            found = float_parts(name, number, replace(side, is_whole=True), dtype, new_room, turned)
            parts.append(next(found)[1])
        yield 0, _as_bytes(torch.cat(parts, -1))


def _as_bytes(x: Tensor) -> Tensor:
    """Vectors ``[T, H, D]`` as rows of float elements, ``[T, bytes]`` uint8."""
    return x.flatten(1).contiguous().view(torch.uint8)
