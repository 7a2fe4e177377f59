"""Types of elements in llama.cpp's states, and the two kinds of codes that are read and written here.

Both have blocks of 32 elements of a row, a float16 scale first. q8_0 has 32 int8 codes then, 34 bytes in all.
q4_0 has 16 bytes, byte i with element i in its low bits and element i + 16 in its high ones, as codes from -8
to 7 with 8 added, 18 bytes in all; its scales may be negative.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvloom.carry.files.bytes import typed
from kvloom.core.specs import dtype_name
from kvloom.errors import ArgumentError, UnsupportedError

BLOCK: Final = 32
"""Elements in a block of codes."""
_SCALE_BYTES: Final = 2
_LARGEST: Final = 127
_MIDDLE: Final = 8
"""What q4_0 adds to a code."""


class GgmlType(NamedTuple):
    """A type of elements.

    Attributes:
        number: Its number in a state.
        name: Its name.
        block: Elements in a block.
        nbytes: Bytes of a block.
        dtype: Dtype of torch; ``None`` for codes.
    """

    number: int
    name: str
    block: int
    nbytes: int
    dtype: torch.dtype | None = None

    @property
    def kind(self) -> str:
        """Name of the same kind in a ``CarriedSide``."""
        return self.name if self.dtype is None else dtype_name(self.dtype)

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row.

        Raises:
            ArgumentError: the row does not have whole blocks.
        """
        if elements % self.block:
            raise ArgumentError(
                f"kind must have whole blocks of {self.block} in a row of {elements}, got {self.name}"
            )
        return elements // self.block * self.nbytes


Q8_0: Final = GgmlType(8, "q8_0", BLOCK, _SCALE_BYTES + BLOCK)
Q4_0: Final = GgmlType(2, "q4_0", BLOCK, _SCALE_BYTES + BLOCK // 2)
TYPES: Final = {
    x.number: x
    for x in (
        GgmlType(0, "f32", 1, 4, torch.float32),
        GgmlType(1, "f16", 1, 2, torch.float16),
        GgmlType(30, "bf16", 1, 2, torch.bfloat16),
        Q8_0,
        Q4_0,
    )
}
"""Types that are carried, by number."""
_OTHERS: Final = {3: "q4_1", 6: "q5_0", 7: "q5_1", 20: "iq4_nl"}
_BY_NAME: Final = {name: x for x in TYPES.values() for name in (x.name, x.kind)}


def type_of(number: int) -> GgmlType:
    """The type with a number in a state.

    Raises:
        UnsupportedError: it is a type that is not carried.
    """
    if number not in TYPES:
        known = ", ".join(x.name for x in TYPES.values())
        raise UnsupportedError(
            f"source must have elements of {known}, got {_OTHERS.get(number, f'type {number}')}"
        )
    return TYPES[number]


def type_named(name: str) -> GgmlType:
    """The type with a name, such as ``"f16"``, ``"float16"`` or ``"q8_0"``.

    Raises:
        ArgumentError: there is none of that name.
    """
    if name not in _BY_NAME:
        raise ArgumentError(f"kind must be one of {', '.join(_BY_NAME)}, got {name!r}")
    return _BY_NAME[name]


def blocks_of(raw: Tensor, kind: GgmlType) -> tuple[Tensor, Tensor]:
    """Codes ``[T, n]`` int8 and scales ``[T, n / 32]`` float16 of rows of codes ``[T, bytes]`` uint8."""
    blocks = raw.unflatten(-1, (-1, kind.nbytes))
    scales = typed(blocks[..., :_SCALE_BYTES].contiguous(), torch.float16).squeeze(-1)
    codes = blocks[..., _SCALE_BYTES:].contiguous()
    if kind == Q4_0:
        codes = torch.cat((codes & 15, codes >> 4), -1) - _MIDDLE
    return codes.view(torch.int8).flatten(-2), scales


def rows_of(codes: Tensor, scales: Tensor, kind: GgmlType) -> Tensor:
    """The reverse of ``blocks_of``; codes are ``fits``."""
    blocks = torch.empty(*scales.shape, kind.nbytes, dtype=torch.uint8)
    blocks[..., :_SCALE_BYTES] = scales.contiguous()[..., None].view(torch.uint8)
    found = codes.contiguous().view(torch.uint8).unflatten(-1, (-1, BLOCK))
    if kind == Q4_0:
        low, high = (found + _MIDDLE).split(BLOCK // 2, -1)
        found = low | high << 4
    blocks[..., _SCALE_BYTES:] = found
    return blocks.flatten(-2)


def fits(codes: Tensor, kind: GgmlType) -> bool:
    """Whether a kind of codes has all of these int8 codes."""
    return kind != Q4_0 or not bool(((codes < -_MIDDLE) | (codes >= _MIDDLE)).any())


def quantize(x: Tensor, kind: GgmlType) -> tuple[Tensor, Tensor]:
    """Codes and scales, as ``blocks_of``, of rows ``[T, n]`` float32, rounded as ggml rounds.

    In q8_0, with a the largest magnitude of a block the scale is a / 127, rounded to float16 when it is
    stored, and a code is x times 127 / a, both in float32, ties to even. In q4_0, with a the first element
    of the largest magnitude the scale is a / -8, and a code is x over it plus 8.5, cut to an integer, at most
    15, less 8. A block of zeros has scale 0.
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    if kind == Q4_0:
        at = blocks.abs().argmax(-1, keepdim=True)
        scales = blocks.gather(-1, at).squeeze(-1) / -_MIDDLE
        inverse = torch.where(scales != 0, 1 / scales, 0.0)
        codes = (blocks * inverse[..., None] + (_MIDDLE + 0.5)).to(torch.int32).clamp(max=15) - _MIDDLE
        return codes.to(torch.int8).flatten(-2), scales.half()
    largest = blocks.abs().amax(-1)
    inverse = torch.where(largest > 0, _LARGEST / largest, 0.0)
    codes = (blocks * inverse[..., None]).round().to(torch.int8)
    return codes.flatten(-2), (largest / _LARGEST).half()
