"""Specifications of a cache: shapes, dtypes, bytes, and a fingerprint."""

import hashlib
import json
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.checks import FLOAT_DTYPES
from kvloom.core.entries import (
    CODES,
    LEAST_GROUP,
    OF_BITS,
    Entry,
    Part,
    SideFormat,
    choice,
    expect_full_range,
    group_for,
    parts_of_codes,
)
from kvloom.core.layouts import CacheLayout, as_layout
from kvloom.core.spelling import Kind, parse_kind
from kvloom.errors import ArgumentError, ConfigError

CODE_DTYPE: Final[dict[int, torch.dtype]] = {bits: getattr(torch, x.dtype) for bits, x in OF_BITS.items()}
"""Dtype of the bytes of codes, by bits."""


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype, such as ``"float16"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Quantization of groups along the head dim.

    ``str`` is the format string that ``parse`` reads, such as ``"int8:g64"``, without ``scale_dtype``.
    Without a group it fits every head dim that is a multiple of 8; ``KVSpec`` chooses the group.

    Attributes:
        bits: Bits of one of ``CODES`` (``kvloom.core.entries``): 8, 4 or 2.
        group: Elements that share a scale; ``None`` for the greatest common divisor of 64 and the head dim.
            64 costs 1.03 bytes an element at 8 bits and float16 scales, 8 (the default of the PMX documents)
            1.25.
        scale_dtype: Dtype of the scales: float32, float16 or bfloat16.
        rotated: Whether head vectors are rotated before they are quantized, see ``kvloom.quant.rotation``.
        full_range: Whether codes of 4 or 2 bits are in full range, see ``kvloom.quant.affine``; all others
            are symmetric.
    """

    bits: int
    group: int | None = None
    scale_dtype: torch.dtype = torch.float16
    rotated: bool = False
    full_range: bool = False

    def __post_init__(self) -> None:
        if self.bits not in OF_BITS:
            raise ConfigError(f"bits must be {choice([*OF_BITS])}, got {self.bits!r}")
        group, multiple = self.group, OF_BITS[self.bits].per_byte
        if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
            raise ConfigError(f"group must be a positive int, got {group!r}")
        if group is not None and group % multiple:
            raise ConfigError(f"group must be a multiple of {multiple} for {self.bits} bits, got {group}")
        if self.scale_dtype not in FLOAT_DTYPES:
            raise ConfigError(f"scale_dtype must be one of {FLOAT_DTYPES}, got {self.scale_dtype!r}")
        if not isinstance(self.rotated, bool):
            raise ConfigError(f"rotated must be a bool, got {self.rotated!r}")
        expect_full_range(self.bits, self.full_range)

    @classmethod
    def parse(cls, text: str, name: str = "text", side: str = "keys") -> "QuantSpec":
        """Parse a format string of codes, such as ``"int8"`` or ``"int4:g32"``.

        Scales are float16. Rotation and range are the defaults of ``Codes`` unless the text has others.

        Args:
            text: The format string.
            name: Name of the argument in errors.
            side: ``"keys"`` or ``"values"``: it is rotated if ``rotate`` names it or both.

        Raises:
            ArgumentError: ``text`` is no format string of codes.
        """
        kind = parse_kind(name, text, tuple(CODES))
        if kind.recent:
            raise ArgumentError(f"{name} must be codes alone, without recent, got {text!r}")
        return cls.of(kind, side)

    @classmethod
    def of(cls, kind: Kind, side: str) -> "QuantSpec":
        """Spec of the codes of a kind, for ``"keys"`` or ``"values"``."""
        return cls(kind.bits, kind.group, rotated=kind.rotates(side), full_range=kind.range == "full")

    def for_head_dim(self, head_dim: int) -> "QuantSpec":
        """This spec for vectors of ``head_dim`` elements, with a group that divides them.

        Raises:
            ConfigError: the group does not divide them, or none is given and ``head_dim`` is no multiple of
                8.
        """
        group = self.group or group_for(head_dim)
        if group is None:
            raise ConfigError(
                f"head_dim must be a multiple of {LEAST_GROUP} for codes without a group, got {head_dim}"
            )
        if head_dim % group:
            raise ConfigError(f"head_dim must be a multiple of group {group}, got {head_dim}")
        return self if group == self.group else replace(self, group=group)

    def side(self, head_dim: int, dtype: str) -> SideFormat:
        """Format of vectors of ``head_dim`` elements as these codes; ``dtype`` is the unquantized dtype."""
        codes = self.for_head_dim(head_dim)
        scale_dtype = dtype_name(codes.scale_dtype)
        return SideFormat(
            head_dim, dtype, codes.bits, codes.group or 0, scale_dtype, codes.rotated, codes.full_range
        )

    @property
    def range(self) -> str:
        """Range of the codes, one of ``RANGES``; empty for bits that have no choice."""
        return OF_BITS[self.bits].range and ("full" if self.full_range else "symmetric")

    def __str__(self) -> str:
        rotate = "both" if self.rotated else "none"
        return str(Kind(OF_BITS[self.bits].name, self.group, rotate, range=self.range))


def _restore(self: QuantSpec, state: list[Any]) -> None:
    """Set the pickled state; states of earlier releases have no ranges: their codes are symmetric."""
    for field, value in zip(fields(self), [*state, False], strict=False):
        object.__setattr__(self, field.name, value)


QuantSpec.__setstate__ = _restore  # type: ignore[attr-defined]  # dataclass of Python 3.10 replaces one of a class


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape and dtype of a cache tensor and its scales.

    A layout with the axis ``2`` has keys and values in one tensor. A layout without it has one side: make a
    spec for each side, which may differ in head dim and quantization.

    Attributes:
        layers: Attention layers (1 where the layout has no L).
        heads: Key/value heads.
        head_dim: Elements of a head vector.
        dtype: Dtype of keys and values when they are not quantized.
        layout: A ``CacheLayout`` or its axes.
        quant: Quantization; ``None`` to keep ``dtype``. Codes without a group get one that divides the head
            dim.

    Raises:
        ConfigError: a field is no such value, or does not fit the layout or the group.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.float16
    layout: CacheLayout | str = "L 2 T H D"
    quant: QuantSpec | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive int, got {value!r}")
        object.__setattr__(self, "layout", as_layout("layout", self.layout))
        if self.layers > 1 and "L" not in self.axes.names:
            raise ConfigError(f"layers must be 1 for layout {self.axes.axes!r}, got {self.layers}")
        if self.quant is not None:
            object.__setattr__(self, "quant", self.quant.for_head_dim(self.head_dim))
        if self.quant is not None and self.quant.rotated and self.head_dim % 2:
            raise ConfigError(f"head_dim must be even to be rotated, got {self.head_dim}")
        chunk = self.axes.chunk("D") * (self.head_dim // self.parts[0].width)
        if self.head_dim % chunk:
            raise ConfigError(
                f"head_dim must be a multiple of {chunk} for layout {self.axes.axes!r}, got {self.head_dim}"
            )

    @property
    def axes(self) -> CacheLayout:
        """``layout`` as a ``CacheLayout``."""
        return as_layout("layout", self.layout)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of the cache tensor."""
        return self.dtype if self.quant is None else CODE_DTYPE[self.quant.bits]

    @property
    def group(self) -> int:
        """Number of elements that share a scale; 0 if not quantized."""
        return 0 if self.quant is None or self.quant.group is None else self.quant.group

    @property
    def side(self) -> SideFormat:
        """Format of the keys or values of one layer.

        Raises:
            ConfigError: ``dtype`` is none of ``FLOATS``.
        """
        name = dtype_name(self.dtype)
        return SideFormat(self.head_dim, name) if self.quant is None else self.quant.side(self.head_dim, name)

    @property
    def parts(self) -> list[Part]:
        """Tensors, as ``SideFormat.parts``, of any dtype."""
        if self.quant is None:
            return [Part(dtype_name(self.dtype), self.dtype.itemsize, self.head_dim)]
        return parts_of_codes(self.head_dim, self.quant.bits, self.group, dtype_name(self.quant.scale_dtype))

    def tensors(
        self, num_tokens: int, block_size: int | None = None
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor for ``num_tokens`` token slots, in the order of ``parts``.

        Args:
            num_tokens: Token slots in all.
            block_size: Slots in a block, for layouts with B and S; it divides ``num_tokens``.

        Raises:
            ArgumentError: ``num_tokens`` or ``block_size`` does not fit the layout.
        """
        if num_tokens < 0:
            raise ArgumentError(f"num_tokens must be at least 0, got {num_tokens}")
        sizes = {"L": self.layers, "H": self.heads}
        if "T" in self.axes.names:
            if block_size is not None:
                raise ArgumentError(
                    f"block_size must be None for layout {self.axes.axes!r}, got {block_size}"
                )
            sizes["T"] = num_tokens
        else:
            if block_size is None or block_size < 1 or num_tokens % block_size:
                raise ArgumentError(f"block_size must divide num_tokens {num_tokens}, got {block_size}")
            sizes |= {"B": num_tokens // block_size, "S": block_size}
        for name, axis in (("num_tokens", "T"), ("block_size", "S")):
            chunk = self.axes.chunk(axis)
            if axis in sizes and sizes[axis] % chunk:
                raise ArgumentError(
                    f"{name} must be a multiple of {chunk} for layout {self.axes.axes!r}, got {sizes[axis]}"
                )
        first, *others = self.parts
        layouts = [(self.axes, first), *((self.axes.for_scale(), part) for part in others)]
        return [(axes.shape(D=part.width, **sizes), getattr(torch, part.dtype)) for axes, part in layouts]

    def shapes(
        self, num_tokens: int, block_size: int | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Shapes of cache and scale (``None`` if not quantized); arguments and errors as of ``tensors``."""
        cache, *scale = (shape for shape, _ in self.tensors(num_tokens, block_size))
        return cache, scale[0] if scale else None

    def nbytes(self, num_tokens: int, block_size: int | None = None) -> int:
        """Bytes that ``empty`` allocates, scales included."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.tensors(num_tokens, block_size))

    def empty(
        self, num_tokens: int, block_size: int | None = None, *, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Allocate ``(cache, scale)``, zeroed; you own them. ``scale`` is ``None`` if not quantized."""
        cache, *scale = (_zeros(*x, device) for x in self.tensors(num_tokens, block_size))
        return cache, scale[0] if scale else None

    def fingerprint(self) -> str:
        """A digest of every field (64 hex digits): equal if and only if the bytes mean the same."""
        fields = {
            "layers": self.layers,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "dtype": str(self.dtype),
            "layout": self.axes.axes,
            "quant": None
            if self.quant is None
            else [
                self.quant.bits,
                self.group,
                str(self.quant.scale_dtype),
                *(["rotated"] if self.quant.rotated else []),
                *(["full range"] if self.quant.full_range else []),
            ],
        }
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def entry_of(key: Tensor, value: Tensor) -> Entry:
    """Unquantized entry of keys and values ``[B, H, Q, D]``; keys only if Dv is 0."""
    dtype = dtype_name(key.dtype)
    of_value = SideFormat(value.shape[3], dtype) if value.shape[3] else None
    return Entry(key.shape[1], SideFormat(key.shape[3], dtype), of_value)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    if dtype.itemsize > 1:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(
        dtype
    )  # torch may not fill dtypes of codes
