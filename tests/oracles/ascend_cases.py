"""Calls of the Ascend operators over poisoned caches, and comparison of whole storages with the golden."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvloom.conform.oracles import ascend as ascend_golden
from oracles import bits
from oracles.pmx_cases import Call

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32)
DTYPES = (*FLOATS, *INTEGERS)
INDICES = (torch.int32, torch.int64)
CACHES = ("key_cache", "value_cache")


def dtype_id(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Plan:
    """Where the runs of a compressed call go; the run of head h of sequence b is entry b * heads + h."""

    rule: str
    seq_lens: tuple[int, ...]
    heads: int
    wins: tuple[int, ...]
    offs: tuple[int, ...]
    slots: tuple[int, ...]
    num_slots: int

    def lengths(self) -> list[int]:
        """The number of slots of every run."""
        return [
            len(ascend_golden.pieces(self.rule, self.seq_lens[p // self.heads], self.wins[p], self.offs[p]))
            for p in range(len(self.wins))
        ]


def lay_out(
    rule: str, seq_lens: tuple[int, ...], heads: int, wins: tuple[int, ...], offs: tuple[int, ...],
    rng: random.Random, skipped: tuple[int, ...] = (),
) -> Plan:  # fmt: skip
    """Give every run slots of its own, in random order with random gaps; the runs ``skipped`` get none."""
    empty = Plan(rule, seq_lens, heads, wins, offs, (), 0)
    lengths, slots, at = empty.lengths(), [0] * len(wins), 0
    for p in rng.sample(range(len(wins)), len(wins)):
        if p in skipped:
            slots[p] = -rng.randint(1, 9)
            continue
        at += rng.randint(0, 2)
        slots[p], at = at, at + lengths[p]
    return Plan(rule, seq_lens, heads, wins, offs, tuple(slots), at + rng.randint(0, 3))


def standard_plan(rule: str) -> Plan:
    """Runs of 3 heads over 5, 0, 4 and 3 tokens: every kind of window, and one run without slots."""
    windows = (
        *((2, 1), (3, -1), (5, 0)),
        *((0, 0), (0, -1), (0, 0)),
        *((3, 4), (1, 3), (2, 0)),
        *((0, 1), (2, -1), (1, 1)),
    )
    wins, offs = tuple(win for win, _ in windows), tuple(off for _, off in windows)
    return lay_out(rule, (5, 0, 4, 3), 3, wins, offs, random.Random(7), skipped=(8,))


def soft(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Values whose sum over a short window is exact in float32 in any order; integers are any integers."""
    if not dtype.is_floating_point:
        return bits.poison(shape, dtype, rng)
    return (torch.randint(-4096, 4096, shape, generator=rng) / 1024).to(dtype)


def blocks(num_slots: int, size: int) -> int:
    return -(-num_slots // size)


def plan_call(
    plan: Plan, dims: int, dtype: torch.dtype, index: torch.dtype, rng: torch.Generator, *,
    sizes: tuple[int, int] = (5, 3), block_size: int = 4, scatter_mode: str | None = "rule",
) -> Call:  # fmt: skip
    """A compressed call with poison in the caches, the padding and every token that is not averaged."""
    num_seqs = len(plan.seq_lens)
    longest = max(plan.seq_lens, default=0) + 2
    total = sum(plan.seq_lens)
    lead = (num_seqs, longest, plan.heads) if dims == 4 else (total, plan.heads)
    call: Call = {}
    for name, size in zip(("key", "value"), sizes, strict=True):
        x = bits.poison((*lead, size), dtype, rng)
        for p, (win, off) in enumerate(zip(plan.wins, plan.offs, strict=True)):
            b, h = divmod(p, plan.heads)
            first = 0 if dims == 4 else sum(plan.seq_lens[:b])
            if plan.rule == "Rope" and off >= 0 and off + win <= plan.seq_lens[b]:
                tokens = x[b] if dims == 4 else x
                window = ascend_golden.raw(tokens)[first + off : first + off + win, h]
                window.copy_(ascend_golden.raw(soft((win, size), dtype, rng)))
        call[name] = x
    num_blocks = blocks(plan.num_slots, block_size)
    for name, size in zip(CACHES, sizes, strict=True):
        call[name] = bits.poison((num_blocks, block_size, 1, size), dtype, rng)
    slots = torch.tensor(plan.slots, dtype=index)
    wins = torch.tensor(plan.wins, dtype=index)
    square = (num_seqs, plan.heads)
    call |= {
        "slot_mapping": slots.reshape(square) if dims == 4 else slots,
        "compress_lens": wins.reshape(square) if dims == 4 else wins,
        "seq_lens": torch.tensor(plan.seq_lens, dtype=index),
        "scatter_mode": plan.rule if scatter_mode == "rule" else scatter_mode,
    }
    if plan.rule != "Alibi":
        call["compress_seq_offset"] = torch.tensor(plan.offs, dtype=index)
    return call


SLOTS = (9, -1, 0, 14, 3, -7, 7)  # of 15 in 3 blocks of 5


def token_call(
    dtype: torch.dtype, index: torch.dtype, rng: torch.Generator, *, sizes: tuple[int, int] = (5, 3),
    heads: int = 3, slots: tuple[int, ...] = SLOTS, num_blocks: int = 3, block_size: int = 5,
) -> Call:  # fmt: skip
    """A call of scenario 2, all of it poison."""
    call: Call = {}
    for name, size in zip(("key", "value"), sizes, strict=True):
        call[name] = bits.poison((len(slots), heads, size), dtype, rng)
    for name, size in zip(CACHES, sizes, strict=True):
        call[name] = bits.poison((num_blocks, block_size, heads, size), dtype, rng)
    return {**call, "slot_mapping": torch.tensor(slots, dtype=index)}


def keys_only(call: Call, absent: Tensor | None = None) -> Call:
    return {**call, "value": absent, "value_cache": absent}


def nz_call(
    dtypes: tuple[torch.dtype, torch.dtype], index: torch.dtype, rng: torch.Generator, *, rank: int = 4,
    slots: tuple[int, ...] = SLOTS,
) -> Call:  # fmt: skip
    """A call of scenario 1 with 2 heads; key heads fill one 32-byte piece, value heads two."""
    call: Call = {"slot_mapping": torch.tensor(slots, dtype=index), "cache_mode": "PA_NZ"}
    for which, (name, dtype) in enumerate(zip(("key", "value"), dtypes, strict=True)):
        last = 32 // torch.empty((), dtype=dtype).element_size()
        pieces = which + 1
        call[name] = bits.poison((len(slots), 2, pieces * last), dtype, rng)
        shape = (3, 2, pieces, 5, last) if rank == 5 else (3, 2 * pieces, 5, last)
        call[CACHES[which]] = bits.poison(shape, dtype, rng)
    return call


def nhsd_call(dtype: torch.dtype, index: torch.dtype, rng: torch.Generator) -> Call:
    call = token_call(dtype, index, rng)
    moved = {name: call[name].transpose(1, 2).contiguous() for name in CACHES}
    return {**call, **moved, "scatter_mode": "NHSD"}


def fused_call(
    dtype: torch.dtype, index: torch.dtype, rng: torch.Generator, *, lengths: tuple[int, int] = (24, 27)
) -> Call:
    """Scenario 2 Nct: two buffers with rows of different ``lengths``, declared by their first elements."""
    call = token_call(dtype, index, rng)
    for name, length in zip(("key", "value"), lengths, strict=True):
        declared = call[name].shape
        buffer = bits.poison((declared[0], length), dtype, rng)
        call[name] = buffer.reshape(-1)[: declared.numel()].view(declared)
    return {**call, "scatter_mode": "Nct", "strides": lengths, "offsets": (4, 13)}


def settle(actual: Tensor, expected: Tensor, averaged: set[int]) -> None:
    """Where an average is within one unit in the last place, take the actual one as expected."""
    size = expected.shape[1]
    for slot in sorted(averaged):
        at = (slot // size, slot % size, 0)
        assert_within_one_ulp(actual[at], expected[at], f"the average in slot {slot}")
        ascend_golden.raw(expected)[at] = ascend_golden.raw(actual)[at]


def rank(x: Tensor) -> Tensor:
    """Position of every float in the order of all floats of its dtype; both zeros are 0."""
    word = ascend_golden.raw(x).long()
    return torch.where(word < 0, -(word & torch.iinfo(ascend_golden.raw(x).dtype).max), word)


def assert_within_one_ulp(actual: Tensor, expected: Tensor, what: str) -> None:
    """Floats may be off by one; every NaN equals every NaN; integers are equal."""
    if not expected.dtype.is_floating_point:
        bits.assert_same_bits(actual, expected, what)
        return
    both_nan = actual.isnan() & expected.isnan()
    either_nan = actual.isnan() | expected.isnan()
    near = ((rank(actual) - rank(expected)).abs() <= 1) & ~either_nan
    assert (both_nan | near).all(), f"{what} is {actual.tolist()}, expected {expected.tolist()}"


def storage(x: Tensor) -> Tensor:
    """Every byte behind ``x``, also those between its elements."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def fork(call: Call) -> Call:
    """The same call with memory of its own; what shares memory keeps sharing it, and views stay views."""
    return copy.deepcopy(call)


def assert_same_memory(actual: Call, expected: Call) -> None:
    """Every tensor, and every byte of the storage behind it, is the same."""
    for name, x in expected.items():
        if isinstance(x, Tensor):
            bits.assert_same_bits(actual[name], x, name)
            bits.assert_same_bits(storage(actual[name]), storage(x), f"the storage of {name}")


def assert_scatters(operator: Callable[..., object], call: Call) -> None:
    """``operator`` leaves all memory of ``call`` as the golden does, and returns None."""
    actual, expected = fork(call), fork(call)
    averaged = ascend_golden.scatter_pa_kv_cache(**expected)
    assert operator(**actual) is None
    for name in CACHES:
        if averaged and expected[name] is not None:
            settle(actual[name], expected[name], averaged)
    assert_same_memory(actual, expected)


def assert_gathers(operator: Callable[..., object], call: Call) -> None:
    """``operator`` leaves all memory of ``call`` as the golden does, and returns None."""
    actual, expected = fork(call), fork(call)
    ascend_golden.gather_pa_kv_cache(**expected)
    assert operator(**actual) is None
    assert_same_memory(actual, expected)


def gather_call(
    dtype: torch.dtype, index: torch.dtype, rng: torch.Generator, *, cache_mode: str = "Norm",
    out_rank: int = 3, seq_lens: tuple[int, ...] = (6, 0, 9), extra: int = 2, cumulative: bool = False,
    tables: tuple[tuple[int, ...], ...] = ((4, 0, 2), (-1, -1, -1), (1, 5, 3)), num_blocks: int = 6,
    block_size: int = 4,
) -> Call:  # fmt: skip
    """Poison in caches and outputs; ``extra`` rows more (or fewer) than the sequences fill; 2 heads."""
    last = 32 // torch.empty((), dtype=dtype).element_size()
    sizes = (5, 3) if cache_mode == "Norm" else (last, 2 * last)
    rows = sum(seq_lens) + extra
    lens = [sum(seq_lens[:b]) for b in range(len(seq_lens) + 1)] if cumulative else list(seq_lens)
    call: Call = {"cache_mode": cache_mode, "is_seq_lens_cumsum": cumulative}
    for name, size in zip(CACHES, sizes, strict=True):
        block = (block_size, 2, size) if cache_mode == "Norm" else (2 * size // last, block_size, last)
        call[name] = bits.poison((num_blocks, *block), dtype, rng)
    for name, size in zip(("key", "value"), sizes, strict=True):
        call[name] = bits.poison((rows, 2, size) if out_rank == 3 else (rows, 2 * size), dtype, rng)
    call["block_tables"] = torch.tensor(tables, dtype=index).reshape(
        len(seq_lens), len(tables[0]) if tables else 2
    )
    call["seq_lens"] = torch.tensor(lens, dtype=index)
    return call


def golden_slot_mapping(block_table: Tensor, starts: Tensor, lengths: Tensor, block_size: int) -> list[int]:
    """Slots of tokens starts[b] .. starts[b] + lengths[b] of each sequence."""
    slots = []
    for b, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        for t in range(start, start + length):
            slots.append(int(block_table[b, t // block_size]) * block_size + t % block_size)
    return slots


def golden_nd_to_nz(nd: Tensor) -> Tensor:
    """Convert [nb, bs, H, D] to [nb, H*D // last, bs, last], one element at a time."""
    num_blocks, size, num_heads, head_size = nd.shape
    last = 32 // nd.element_size()
    shape = num_blocks, num_heads * head_size // last, size, last
    nz = torch.zeros(shape, dtype=ascend_golden.WORD[nd.element_size()])
    for b in range(num_blocks):
        for o in range(size):
            for h in range(num_heads):
                for d in range(head_size):
                    j = h * head_size + d
                    nz[b, j // last, o, j % last] = ascend_golden.raw(nd)[b, o, h, d]
    return nz.view(nd.dtype)
