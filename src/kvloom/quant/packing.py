"""Packing of codes of fewer than 8 bits: two's complement, the first code in the lowest bits of a byte.

Four bits are packed as ONNX INT4, the even element in the low nibble; two bits as ONNX INT2.
"""

import torch
from torch import Tensor

from kvloom.core.entries import OF_BITS


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack int8 codes ``[..., D]`` into bytes.

    Args:
        codes: Codes in the range of ``bits``: -8 to 7 for 4 bits, -2 to 1 for 2 bits.
        bits: Bits of a code. A byte holds ``8 / bits`` codes, and D is a multiple of that.

    Returns:
        uint8 ``[..., D * bits / 8]``.
    """
    count, lowest = OF_BITS[bits].per_byte, (1 << bits) - 1
    fields = codes.view(torch.uint8) & lowest
    packed = fields[..., ::count]
    for i in range(1, count):
        packed = packed | (fields[..., i::count] << (i * bits))
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of ``pack``: uint8 ``[..., D * bits / 8]`` to int8 ``[..., D]``."""
    lowest, sign = (1 << bits) - 1, 1 << (bits - 1)
    fields = torch.stack([(packed >> i) & lowest for i in range(0, 8, bits)], dim=-1).flatten(-2)
    return (fields ^ sign).view(torch.int8) - sign
