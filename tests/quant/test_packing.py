"""Codes of 4 and 2 bits in bytes: two's complement, the first one in the lowest bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvloom.quant.packing import pack, unpack

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
WIDTHS = pytest.mark.parametrize("bits", [4, 2])


def all_codes(bits: int) -> Tensor:
    """Every combination that a byte holds, ``[256, codes]``."""
    values = range(-(1 << (bits - 1)), 1 << (bits - 1))
    return torch.tensor(list(itertools.product(values, repeat=8 // bits)), dtype=torch.int8)


@WIDTHS
def test_every_byte_unpacks_lowest_bits_first(bits: int) -> None:
    def signed(field: int) -> int:
        return field - (1 << bits) if field >> (bits - 1) else field

    expected = [[signed(byte >> i & ((1 << bits) - 1)) for i in range(0, 8, bits)] for byte in range(256)]
    codes = unpack(ALL_BYTES.unsqueeze(1), bits)
    assert codes.dtype == torch.int8
    assert codes.tolist() == expected


@WIDTHS
def test_every_combination_packs_the_first_code_lowest(bits: int) -> None:
    packed = pack(all_codes(bits), bits)
    assert packed.dtype == torch.uint8
    expected = [
        sum((code % (1 << bits)) << (bits * i) for i, code in enumerate(codes))
        for codes in all_codes(bits).tolist()
    ]
    assert packed.flatten().tolist() == expected


@WIDTHS
def test_every_byte_survives_a_round_trip(bits: int) -> None:
    assert torch.equal(pack(unpack(ALL_BYTES, bits), bits), ALL_BYTES)


@WIDTHS
def test_every_combination_survives_a_round_trip(bits: int) -> None:
    assert torch.equal(unpack(pack(all_codes(bits), bits), bits), all_codes(bits))


@WIDTHS
def test_only_the_last_axis_changes(bits: int) -> None:
    codes = all_codes(bits).view(2, 4, 8, -1)
    packed = pack(codes, bits)
    assert packed.shape == (2, 4, 8, codes.shape[-1] * bits // 8)
    assert torch.equal(packed[1, 2, 3], pack(codes[1, 2, 3], bits))
    assert torch.equal(unpack(packed, bits), codes)


@WIDTHS
def test_strided_codes_are_packed_by_their_order(bits: int) -> None:
    codes = all_codes(bits).view(16, -1)
    transposed = codes.t().contiguous().t()
    assert torch.equal(pack(transposed, bits), pack(codes, bits))
    assert torch.equal(unpack(pack(codes, bits).t().contiguous().t(), bits), codes)


@WIDTHS
def test_nothing_packs_to_nothing(bits: int) -> None:
    assert pack(torch.empty(3, 0, dtype=torch.int8), bits).shape == (3, 0)
    assert unpack(torch.empty(0, 4, dtype=torch.uint8), bits).shape == (0, 32 // bits)
