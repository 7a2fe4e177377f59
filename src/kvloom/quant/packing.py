"""Four-bit codes two to a byte: two's complement, the even element in the low nibble (as ONNX INT4)."""

import torch
from torch import Tensor


def pack_int4(codes: Tensor) -> Tensor:
    """Pack int8 codes in [-8, 7], ``[..., D]`` with D even, into uint8 ``[..., D / 2]``."""
    nibbles = codes.view(torch.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """Inverse of ``pack_int4``: uint8 ``[..., D / 2]`` to int8 ``[..., D]``."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return (nibbles ^ 8).view(torch.int8) - 8
