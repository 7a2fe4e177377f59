"""Two 4-bit codes to a byte: two's complement, the even element in the low nibble."""

from __future__ import annotations

import itertools

import torch

from kvloom.quant.packing import pack, unpack

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
ALL_PAIRS = torch.tensor(list(itertools.product(range(-8, 8), repeat=2)), dtype=torch.int8)


def signed(nibble: int) -> int:
    return nibble - 16 if nibble > 7 else nibble


def test_every_byte_unpacks_low_nibble_first() -> None:
    expected = [[signed(byte % 16), signed(byte // 16)] for byte in range(256)]
    codes = unpack(ALL_BYTES.unsqueeze(1), 4)
    assert codes.dtype == torch.int8
    assert codes.tolist() == expected


def test_every_pair_packs_even_element_low() -> None:
    packed = pack(ALL_PAIRS, 4)
    assert packed.dtype == torch.uint8
    assert packed.flatten().tolist() == [(even % 16) + 16 * (odd % 16) for even, odd in ALL_PAIRS.tolist()]


def test_every_byte_survives_a_round_trip() -> None:
    assert torch.equal(pack(unpack(ALL_BYTES, 4), 4), ALL_BYTES)


def test_every_pair_survives_a_round_trip() -> None:
    assert torch.equal(unpack(pack(ALL_PAIRS, 4), 4), ALL_PAIRS)


def test_only_the_last_axis_changes() -> None:
    codes = ALL_PAIRS.view(2, 4, 8, 8)
    packed = pack(codes, 4)
    assert packed.shape == (2, 4, 8, 4)
    assert torch.equal(packed[1, 2, 3], pack(codes[1, 2, 3], 4))
    assert torch.equal(unpack(packed, 4), codes)


def test_strided_codes_are_packed_by_their_order() -> None:
    codes = ALL_PAIRS.view(16, 32)
    transposed = codes.t().contiguous().t()
    assert torch.equal(pack(transposed, 4), pack(codes, 4))
    assert torch.equal(unpack(pack(codes, 4).t().contiguous().t(), 4), codes)


def test_nothing_packs_to_nothing() -> None:
    assert pack(torch.empty(3, 0, dtype=torch.int8), 4).shape == (3, 0)
    assert unpack(torch.empty(0, 4, dtype=torch.uint8), 4).shape == (0, 8)
