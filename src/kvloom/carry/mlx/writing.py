"""A ``CarriedCache`` as a file that mlx-lm's ``load_prompt_cache`` reads, of either version."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Final

import torch
from torch import Tensor

from kvloom.carry.carried import (
    AffineCodes,
    CarriedCache,
    CarriedLayer,
    CarriedSide,
    expect_exact,
    expect_finite,
    floats_of,
)
from kvloom.carry.files.tensor_file import FLOAT_NAMES, TensorToWrite, write_tensors
from kvloom.carry.files.writing import RoomFor, written_whole
from kvloom.carry.float_parts import float_parts
from kvloom.carry.mlx.affine import BITS, GROUPS, quantize
from kvloom.carry.mlx.reading import CODES, FLOATS, RING, TOKENS
from kvloom.carry.rope_pairs import expect_pairs_named, to_adjacent
from kvloom.core.specs import dtype_name
from kvloom.errors import ArgumentError, UnsupportedError

VERSIONS: Final = ("0.32.2", "0.28.4")
"""Versions of mlx-lm whose files are written; neither reads the other's."""


def write_mlx(
    cache: CarriedCache,
    target: str | os.PathLike[str],
    *,
    kind: str | None = None,
    bits: int = 0,
    group: int = 64,
    pairs: str = "halves",
    rotary: int | None = None,
    version: str = VERSIONS[0],
    metadata: Mapping[str, str] | None = None,
    rounding: bool = False,
) -> None:
    """Write a prompt cache of mlx-lm; the file has its name when it is complete.

    Args:
        cache: What to write.
        target: Path of the file.
        kind: Dtype of floats, or of scales and offsets of codes; ``None`` for what the cache has.
        bits: Bits of codes to round to, of a ``QuantizedKVCache``; 0 for floats, or for the codes that the
            cache has.
        group: Elements that share a scale, if ``bits`` are given.
        pairs: Order of RoPE's pairs in mlx-lm's model: ``"adjacent"`` if it has ``rope_traditional``.
        rotary: Elements that RoPE turns, the first of a key; ``None`` for all.
        version: Version of mlx-lm, one of ``VERSIONS``.
        metadata: Texts to keep in the file, by name.
        rounding: Whether numbers may be rounded to ``kind`` and ``bits``.

    Raises:
        ArgumentError: the cache does not fit ``kind`` or ``bits``, or has a NaN; nothing was written.
        UnsupportedError: mlx-lm has no such cache.
        OSError: the file cannot be written.
    """
    expect_pairs_named("pairs", pairs)
    if version not in VERSIONS:
        raise ArgumentError(f"version must be one of {', '.join(VERSIONS)}, got {version!r}")
    if bits and (bits not in BITS or group not in GROUPS):
        raise ArgumentError(f"bits must be of {BITS} in groups of {GROUPS}, got {bits} in {group}")
    _expect_carried(cache, version, bits)
    keeps = not bits and all(x.startswith("affine") for x in cache.kinds) and pairs != "adjacent"
    dtype = _dtype(cache, kind, keeps)
    if not keeps and bits and not rounding:
        raise ArgumentError(
            f"bits must hold {', '.join(cache.kinds)} without rounding, got {bits}: rounding was not asked "
            f"for"
        )
    if not keeps and not bits:
        expect_exact(cache, dtype, rounding)
    turned = 0 if pairs != "adjacent" else (rotary or cache.layers[0].keys.head_dim)
    layers = [
        _Layer(i, x, cache.num_tokens, dtype, bits, group, turned, keeps) for i, x in enumerate(cache.layers)
    ]
    tensors = {name: tensor for layer in layers for name, tensor in layer.tensors().items()}
    user = dict(metadata or {}) | ({} if cache.tokens is None else {TOKENS: json.dumps(cache.tokens)})
    if version == VERSIONS[0]:
        scalars = [(f"{x.number}.{at}", n) for x in layers for at, n in enumerate(x.numbers, 2)]
        for name, number in scalars:
            tensors[name] = TensorToWrite.whole("I32", (), partial(torch.tensor, number, dtype=torch.int32))
        said = (
            {f"0.{k}": v for k, v in user.items()} | {f"1.{x.number}": x.form for x in layers} | {"2.0": ""}
        )
        for at, (name, _) in enumerate(scalars, 1):
            said |= {f"2.{at}.0": name, f"2.{at}.1": "scalar"}
    else:
        said = {f"1.{k}": v for k, v in user.items()} | {f"2.{x.number}": x.form for x in layers}
        for x in layers:
            numbers = x.numbers if x.form == CODES else ()
            said |= {f"0.{x.number}.{at}": str(n) for at, n in enumerate(numbers)} or {f"0.{x.number}": ""}
    with written_whole(target) as file:
        write_tensors(file, tensors, said)


def _expect_carried(cache: CarriedCache, version: str, bits: int) -> None:
    for i, layer in enumerate(cache.layers):
        if layer.window is not None and version != VERSIONS[0]:
            raise UnsupportedError(f"version must be {VERSIONS[0]} for layers with a window, got {version}")
        if layer.has_latents and (bits or version != VERSIONS[0]):
            raise UnsupportedError(
                f"cache must have keys and values for codes and for {VERSIONS[1]}, got latents in layer {i}"
            )
        if layer.window is not None and layer.keys.kind.startswith("affine"):
            raise UnsupportedError(f"cache must have floats in layers with a window, got codes in layer {i}")


def _dtype(cache: CarriedCache, kind: str | None, keeps: bool) -> str:
    """Dtype of floats; that of the scales of codes that are kept follows from them."""
    if kind is not None:
        if kind not in FLOAT_NAMES:
            raise ArgumentError(f"kind must be float32, float16 or bfloat16, got {kind!r}")
        return kind
    if keeps or any(side.has_codes for x in cache.layers for _, side in x.sides):
        return "float32"
    if len(cache.kinds) != 1:
        raise ArgumentError(f"kind must be given for a cache of {', '.join(cache.kinds)}, got None")
    return cache.kinds[0]


class _Layer:
    """Tensors and numbers of one layer."""

    def __init__(
        self,
        number: int,
        layer: CarriedLayer,
        num_tokens: int,
        dtype: str,
        bits: int,
        group: int,
        rotary: int,
        keeps: bool,
    ) -> None:
        self.number, self._layer, self._num_tokens, self._dtype = number, layer, num_tokens, dtype
        self._bits, self._group, self._rotary, self._keeps = bits, group, rotary, keeps
        self._first: AffineCodes | None = None
        if keeps:
            found = layer.keys.load()
            self._first = found if isinstance(found, AffineCodes) else None
        is_ring = layer.window is not None
        self.form = RING if is_ring else CODES if bits or keeps else FLOATS
        if is_ring and bits:
            raise UnsupportedError(f"bits must be 0 for layers with a window, got {bits} in layer {number}")

    @property
    def numbers(self) -> list[int]:
        """What a layer says beside its tensors, in mlx-lm's order."""
        if self.form == RING:
            return [self._num_tokens, 0, self._layer.window or 0, self._slots]
        if self.form == FLOATS:
            return [self._num_tokens]
        kept = self._first
        return [self._num_tokens, *((kept.group, kept.bits) if kept else (self._group, self._bits))]

    @property
    def _slots(self) -> int:
        """Slots that are written. A full ring has one more than is seen, which the next token replaces."""
        held = self._layer.keys.num_tokens
        return held if held == self._num_tokens else self._layer.window or held

    def tensors(self) -> dict[str, TensorToWrite]:
        """Tensors by name."""
        found = {}
        for place, (name, side) in enumerate(self._layer.sides):
            if self.form != CODES:
                shape = (1, side.heads, self._slots, side.head_dim)
                parts = partial(self._floats, name, side)
                found[f"{self.number}.{place}"] = TensorToWrite(FLOAT_NAMES[self._dtype], shape, parts)
                continue
            load = lru_cache(1)(partial(self._codes, name, side))  # of which three tensors are written
            bits, group, dtype = self._bits, self._group, self._dtype
            if self._first is not None:
                bits, group = self._first.bits, self._first.group
                dtype = dtype_name(self._first.scales.dtype)
            widths = ("U32", side.head_dim * bits // 32), *((FLOAT_NAMES[dtype], side.head_dim // group),) * 2
            for part, (stored, width) in enumerate(widths):
                shape = (1, side.heads, side.num_tokens, width)
                found[f"{self.number}.{place}.{part}"] = TensorToWrite.whole(
                    stored, shape, partial(_part, load, part)
                )
        return found

    def _floats(self, name: str, side: CarriedSide, room: RoomFor) -> Iterator[tuple[int, Tensor]]:
        dtype = getattr(torch, self._dtype)
        free = self._slots - side.num_tokens  # slots of a ring before its tokens
        if free:
            yield 0, torch.zeros(1, side.heads, free, side.head_dim, dtype=dtype)
        rotary = self._rotary if name == "keys" else 0
        if self._layer.has_latents:  # a rope key is turned as a whole
            rotary = 0 if name == "keys" else side.head_dim
        for first, x in float_parts(name, self.number, side, dtype, room, rotary, by_head=True):
            yield free + first, x.transpose(0, 1)[None]

    def _codes(self, name: str, side: CarriedSide) -> AffineCodes:
        found = side.load()
        expect_finite(name, self.number, found)
        if self._keeps and isinstance(found, AffineCodes):
            return found
        x = floats_of(found)
        x = to_adjacent(x, self._rotary) if self._rotary and name == "keys" else x
        return quantize(x, self._bits, self._group, getattr(torch, self._dtype))


def _part(load: Callable[[], AffineCodes], part: int) -> Tensor:
    """Words, scales or offsets of codes ``[1, H, T, n]``."""
    codes = load()
    return (codes.words, codes.scales, codes.biases)[part].transpose(0, 1)[None]
