"""Lengths of runs, laying them out, slots of block tables, and conversion between the two memory formats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import DTYPES, INDICES, dtype_id, golden_nd_to_nz, golden_slot_mapping
from torch import Tensor

from kvloom.dialects import ascend
from kvloom.errors import KVError

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
INDEX = pytest.mark.parametrize("index", INDICES, ids=dtype_id)


def ints(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@INDEX
@pytest.mark.parametrize("shape", [(6,), (3, 2)], ids=["flat", "square"])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [("Alibi", [2, 0, 7, 3, 0, 0]), ("Rope", [6, 7, 1, 7, 0, 0]), ("Omni", [5, 7, 0, 7, 0, 0])],
)
def test_lengths_of_runs(mode: str, expected: list[int], shape: tuple[int, ...], index: torch.dtype) -> None:
    seq_lens, wins = ints(7, 7, 0).to(index), ints(2, 0, 7, 3, 0, 0).reshape(shape).to(index)
    offset = None if mode == "Alibi" else ints(3, 2, 0, -1, 0, -1).to(index)
    got = ascend.run_lengths(mode, seq_lens, wins, offset)
    assert got.dtype == torch.int64
    assert got.tolist() == expected


@pytest.mark.parametrize(("mode", "length"), [("Rope", 5), ("Omni", 5)])
def test_window_that_starts_at_the_end_compresses_nothing(mode: str, length: int) -> None:
    assert ascend.run_lengths(mode, ints(5), ints(3), ints(5)).tolist() == [length]


def test_lengths_of_no_runs() -> None:
    assert ascend.run_lengths("Alibi", ints(), ints()).tolist() == []


def test_runs_are_laid_one_after_another() -> None:
    slots, num_slots = ascend.plan_slots(ints(3, 0, 2, 5))
    assert slots.dtype == torch.int64
    assert slots.tolist() == [0, 3, 3, 5]
    assert num_slots == 10


@pytest.mark.parametrize("start", [0, 1, 4, 6])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_runs_begin_with_blocks_and_do_not_overlap(block_size: int, start: int) -> None:
    lengths = [3, 0, 4, 1, 9, 0, 2]
    slots, num_slots = ascend.plan_slots(ints(*lengths), block_size, start)
    end = start
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        assert slot % block_size == 0
        assert end <= slot < end + block_size
        end = slot + length
    if start == 0:
        assert end <= num_slots < end + block_size


def test_plan_keeps_the_shape_of_the_lengths() -> None:
    slots, _ = ascend.plan_slots(ints([3, 1], [2, 2], [0, 4]), block_size=2)
    assert slots.tolist() == [[0, 4], [6, 8], [10, 10]]


@INDEX
def test_plan_of_either_index_dtype(index: torch.dtype) -> None:
    slots, _ = ascend.plan_slots(ints(2, 2).to(index))
    assert slots.dtype == torch.int64
    assert slots.tolist() == [0, 2]


def test_plan_of_no_runs() -> None:
    slots, num_slots = ascend.plan_slots(ints(), 4)
    assert (slots.tolist(), num_slots) == ([], 0)


@INDEX
def test_slots_through_a_block_table(index: torch.dtype) -> None:
    table = ints([7, 2, 9], [1, -1, -1], [4, 0, -1]).to(index)
    starts, lengths = ints(3, 0, 2).to(index), ints(6, 0, 5).to(index)
    got = ascend.slot_mapping(table, starts, lengths, 4)
    assert got.dtype == torch.int64
    assert got.tolist() == [31, 8, 9, 10, 11, 36, 18, 19, 0, 1, 2]
    assert got.tolist() == golden_slot_mapping(table, starts, lengths, 4)


def test_slots_beyond_32_bits() -> None:
    table = torch.tensor([[2**30]], dtype=torch.int32)
    zero = torch.tensor([0], dtype=torch.int32)
    assert ascend.slot_mapping(table, zero, zero + 2, 128).tolist() == [2**37, 2**37 + 1]


def test_slots_of_no_tokens() -> None:
    assert ascend.slot_mapping(ints([3, 4]), ints(5), ints(0), 4).tolist() == []
    assert ascend.slot_mapping(torch.zeros(0, 3, dtype=torch.int64), ints(), ints(), 4).tolist() == []


@EVERY_DTYPE
def test_conversion_to_fractal_matches_the_golden(dtype: torch.dtype) -> None:
    nd = bits.poison((2, 3, 2, 32), dtype, bits.generator(0))
    got = ascend.nd_to_nz(nd)
    bits.assert_same_bits(got, golden_nd_to_nz(nd), "nz")
    assert got.is_contiguous()


@EVERY_DTYPE
def test_conversion_from_fractal_is_the_inverse(dtype: torch.dtype) -> None:
    nd = bits.poison((2, 3, 4, 8), dtype, bits.generator(1))
    got = ascend.nz_to_nd(golden_nd_to_nz(nd), 4)
    bits.assert_same_bits(got, nd, "nd")
    assert got.is_contiguous()


def test_conversions_return_new_memory() -> None:
    nd = torch.zeros(1, 1, 1, 8)
    for got in (ascend.nd_to_nz(nd), ascend.nz_to_nd(nd, 1)):
        assert got.untyped_storage().data_ptr() != nd.untyped_storage().data_ptr()


def test_conversions_accept_views() -> None:
    nd = bits.poison((4, 2, 3, 16), torch.float16, bits.generator(2))[::2].transpose(1, 2)
    nz = ascend.nd_to_nz(nd)
    bits.assert_same_bits(nz, golden_nd_to_nz(nd), "nz")
    spaced = nz.repeat_interleave(2, dim=2)[:, :, ::2]
    bits.assert_same_bits(ascend.nz_to_nd(spaced, nd.shape[2]), nd, "nd")


def test_conversions_of_empty_caches() -> None:
    assert ascend.nd_to_nz(torch.zeros(0, 4, 2, 8)).shape == (0, 2, 4, 8)
    assert ascend.nz_to_nd(torch.zeros(0, 2, 4, 8), 2).shape == (0, 4, 2, 8)


TABLE = ints([1, 2], [3, 4])
REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "runs of an unknown mode": (
        "scatter_mode",
        lambda: ascend.run_lengths("rope", ints(3), ints(1), ints(0)),
    ),
    "runs without offsets": ("compress_seq_offset", lambda: ascend.run_lengths("Rope", ints(3), ints(1))),
    "windows of another batch": (
        "compress_lens",
        lambda: ascend.run_lengths("Alibi", ints(3, 3), ints(1, 1, 1)),
    ),
    "offsets of another batch": (
        "compress_seq_offset",
        lambda: ascend.run_lengths("Omni", ints(3, 3), ints(1, 1), ints(0)),
    ),
    "windows of float": ("compress_lens", lambda: ascend.run_lengths("Alibi", ints(3), ints(1).float())),
    "window beyond the sequence": ("compress_lens", lambda: ascend.run_lengths("Alibi", ints(3), ints(4))),
    "negative window": ("compress_lens", lambda: ascend.run_lengths("Rope", ints(3), ints(-1), ints(0))),
    "window that ends late": (
        "compress_seq_offset|compress_lens",
        lambda: ascend.run_lengths("Rope", ints(3), ints(2), ints(2)),
    ),
    "negative sequence": ("seq_lens", lambda: ascend.run_lengths("Alibi", ints(-3), ints(0))),
    "blocks of size 0": ("block_size", lambda: ascend.plan_slots(ints(3), 0)),
    "plan of negative lengths": ("lengths", lambda: ascend.plan_slots(ints(3, -1))),
    "plan from a negative start": ("start", lambda: ascend.plan_slots(ints(3), 1, -1)),
    "slots beyond the table": (
        "block_table|positions_start|lengths",
        lambda: ascend.slot_mapping(TABLE, ints(0, 3), ints(0, 6), 4),
    ),
    "slots of negative positions": (
        "positions_start",
        lambda: ascend.slot_mapping(TABLE, ints(0, -1), ints(1, 1), 4),
    ),
    "slots of negative lengths": ("lengths", lambda: ascend.slot_mapping(TABLE, ints(0, 0), ints(2, -1), 4)),
    "slots of another batch": (
        "positions_start|block_table",
        lambda: ascend.slot_mapping(TABLE, ints(0), ints(1), 4),
    ),
    "slots of blocks of size 0": (
        "block_size",
        lambda: ascend.slot_mapping(TABLE, ints(0, 0), ints(1, 1), 0),
    ),
    "slots through a float table": (
        "block_table",
        lambda: ascend.slot_mapping(TABLE.float(), ints(0, 0), ints(1, 1), 4),
    ),
    "features that fill no piece": ("cache", lambda: ascend.nd_to_nz(torch.zeros(1, 1, 1, 7))),
    "cache of rank 3": ("cache", lambda: ascend.nd_to_nz(torch.zeros(1, 1, 8))),
    "pieces of another width": ("cache", lambda: ascend.nz_to_nd(torch.zeros(1, 1, 1, 16), 1)),
    "heads that do not divide": ("num_heads", lambda: ascend.nz_to_nd(torch.zeros(1, 1, 1, 8), 3)),
    "no heads": ("num_heads", lambda: ascend.nz_to_nd(torch.zeros(1, 1, 1, 8), 0)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_helpers_refuse_by_name(what: str) -> None:
    names, call = REFUSED[what]
    with pytest.raises(KVError, match=rf"\b({names})\b") as raised:
        call()
    assert isinstance(raised.value, ValueError)
