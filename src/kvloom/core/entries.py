"""Entry: the keys and values that a layer stores for one token. Tensors, bytes, files, plans follow from it.

Dtypes are named as in torch; this imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final, NamedTuple

from kvloom.errors import ConfigError

FLOATS: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by dtype of unquantized keys, values and scales."""
GROUP: Final = 64
"""Largest number of elements along the head dim that share a scale, if no group is given."""
LEAST_GROUP: Final = 8
"""Smallest number of elements that share a scale, if no group is given; fewer save no bytes."""


class Codes(NamedTuple):
    """A kind of codes.

    Attributes:
        name: In a format string, such as ``"int4:g32"``.
        bits: Bits of a code; a byte holds ``8 / bits``, the first in the lowest bits.
        dtype: Dtype of the bytes. In a tensor with scales it tells the kind.
        largest: The largest magnitude of a group, in scales.
        rotate: Default rotation, one of ``ROTATIONS``.
        recent: Default residual window.
        range: Default range, one of ``RANGES``; empty where codes have no choice.
    """

    name: str
    bits: int
    dtype: str
    largest: int
    rotate: str = "none"
    recent: int = 0
    range: str = ""

    @property
    def per_byte(self) -> int:
        """Number of codes in a byte; a group has a multiple of it."""
        return 8 // self.bits


CODES: Final = {
    codes.name: codes
    for codes in (
        Codes("int8", 8, "int8", 127),
        Codes("int4", 4, "uint8", 7, rotate="keys", recent=64, range="full"),
        Codes("int2", 2, "bits2x4", 4, rotate="keys", recent=64, range="full"),
    )
}
"""The kinds of codes by name; ``quant/affine.py`` defines the codes."""
OF_BITS: Final = {codes.bits: codes for codes in CODES.values()}
"""The kinds of codes by bits."""
ROTATIONS: Final = ("none", "keys", "values", "both")
"""Sides that are rotated before they are quantized."""
RANGES: Final = ("full", "symmetric")
"""Ranges of codes, see ``quant/affine.py``; standards have symmetric ones."""


def group_for(head_dim: int) -> int | None:
    """Default number of elements that share a scale: the greatest common divisor of 64 and ``head_dim``.

    ``None`` for head dims that are no multiple of 8.
    """
    group = gcd(GROUP, head_dim)
    return group if group >= LEAST_GROUP else None


def choice(values: Sequence[object]) -> str:
    """Join values for a message: ``"8, 4 or 2"``."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


class Part(NamedTuple):
    """One tensor of keys or values, such as codes or scales.

    Attributes:
        dtype: Dtype of the tensor.
        itemsize: Bytes of an element.
        width: Number of elements for a head vector.
    """

    dtype: str
    itemsize: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes for a head vector."""
        return self.itemsize * self.width


def parts_of_codes(head_dim: int, bits: int, group: int, scale_dtype: str) -> list[Part]:
    """Tensors of codes and of their scales; arguments as the fields of ``SideFormat``."""
    codes = OF_BITS[bits]
    return [
        Part(codes.dtype, 1, head_dim // codes.per_byte),
        Part(scale_dtype, FLOATS[scale_dtype], head_dim // group),
    ]


@dataclass(frozen=True, slots=True)
class SideFormat:
    """Format of the keys or values of one layer.

    Attributes:
        head_dim: Elements of a head vector.
        dtype: Dtype of unquantized vectors, one of ``FLOATS``.
        bits: Bits of a code; 0 if not quantized.
        group: Elements that share a scale; 0 if not quantized.
        scale_dtype: Dtype of the scales, one of ``FLOATS``; empty if not quantized.
        rotated: Whether head vectors are rotated before they are quantized.
        full_range: Whether codes of 4 or 2 bits are in full range, see ``quant/affine.py``.

    Raises:
        ConfigError: a field is no such value, or does not fit the others.
    """

    head_dim: int
    dtype: str
    bits: int = 0
    group: int = 0
    scale_dtype: str = ""
    rotated: bool = False
    full_range: bool = False

    def __post_init__(self) -> None:
        _expect_count("head_dim", self.head_dim)
        if self.dtype not in FLOATS:
            raise ConfigError(f"dtype must be one of {tuple(FLOATS)}, got {self.dtype!r}")
        if type(self.bits) is not int or self.bits not in (0, *OF_BITS):
            raise ConfigError(f"bits must be {choice([0, *OF_BITS])}, got {self.bits!r}")
        if type(self.rotated) is not bool:
            raise ConfigError(f"rotated must be a bool, got {self.rotated!r}")
        expect_full_range(self.bits, self.full_range)
        if not self.bits:
            if (self.group, self.scale_dtype, self.rotated) != (0, "", False):
                raise ConfigError(
                    f"group must be 0 without codes, and nothing scaled or rotated, got {self.group!r} "
                    f"{self.scale_dtype!r} {self.rotated}"
                )
            return
        _expect_count("group", self.group)
        if self.head_dim % self.group or self.group * self.bits % 8:
            raise ConfigError(f"group must divide head_dim {self.head_dim} in bytes, got {self.group}")
        if self.scale_dtype not in FLOATS:
            raise ConfigError(f"scale_dtype must be one of {tuple(FLOATS)}, got {self.scale_dtype!r}")

    @property
    def parts(self) -> list[Part]:
        """Tensors, in the order of files: codes and their scales, or the vectors."""
        if not self.bits:
            return [Part(self.dtype, FLOATS[self.dtype], self.head_dim)]
        return parts_of_codes(self.head_dim, self.bits, self.group, self.scale_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of a head vector, scales included."""
        return sum(part.nbytes for part in self.parts)

    @property
    def kind(self) -> str:
        """Format string, such as ``"float16"`` or ``"int8:g32"``."""
        return f"{OF_BITS[self.bits].name}:g{self.group}" if self.bits else self.dtype


@dataclass(frozen=True, slots=True)
class Entry:
    """Format of what a layer stores for a token.

    Attributes:
        heads: Key/value heads.
        key: Format of the keys.
        value: Format of the values; ``None`` in a cache of keys only.

    Raises:
        ConfigError: ``heads`` is no positive int, a side none, or codes of one side are in full range and
            those of the other not.
    """

    heads: int
    key: SideFormat
    value: SideFormat | None

    def __post_init__(self) -> None:
        _expect_count("heads", self.heads)
        for name, side in (("key", self.key), ("value", self.value)):
            if not isinstance(side, SideFormat) and (side is not None or name == "key"):
                raise ConfigError(f"{name} must be a SideFormat, got {side!r}")
        if len({side.full_range for side in self.sides if side.bits and OF_BITS[side.bits].range}) > 1:
            raise ConfigError(f"full_range must be that of the keys, {self.key.full_range}, for values, too")

    @property
    def sides(self) -> tuple[SideFormat, ...]:
        """Keys, and values if there are any."""
        return (self.key,) if self.value is None else (self.key, self.value)

    @property
    def has_codes(self) -> bool:
        """Whether keys or values are codes."""
        return any(side.bits for side in self.sides)

    @property
    def nbytes(self) -> int:
        """Bytes of a token, scales included."""
        return self.heads * sum(side.nbytes for side in self.sides)

    @property
    def nbytes_scales(self) -> int:
        """Bytes of the scales of a token."""
        return self.heads * sum(part.nbytes for side in self.sides for part in side.parts[1:])

    def rotated_as(self, rotation: str) -> "Entry":
        """This entry with another rotation of its codes, one of ``ROTATIONS``."""
        key, value = self.key, self.value
        if key.bits:
            key = replace(key, rotated=rotation in ("keys", "both"))
        if value is not None and value.bits:
            value = replace(value, rotated=rotation in ("values", "both"))
        return replace(self, key=key, value=value)


def expect_full_range(bits: int, full_range: object) -> None:
    """Raise ConfigError if codes of ``bits``, 0 for none, do not have this range."""
    if type(full_range) is not bool:
        raise ConfigError(f"full_range must be a bool, got {full_range!r}")
    if full_range and not (bits and OF_BITS[bits].range):
        raise ConfigError(f"full_range must be False for {bits} bits, got True")


def _expect_count(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value < 2**31:
        raise ConfigError(f"{name} must be a positive int, got {value!r}")
