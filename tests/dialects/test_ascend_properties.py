"""Random plans of runs, the two memory formats against each other, and reading back what was written."""

from __future__ import annotations

import random

import torch
from campaign import times
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import bits
from oracles.ascend_cases import (
    CACHES,
    DTYPES,
    INDICES,
    Plan,
    assert_scatters,
    blocks,
    fork,
    golden_nd_to_nz,
    lay_out,
    plan_call,
    settle,
    token_call,
)

from kvloom.conform.oracles import ascend as ascend_golden
from kvloom.dialects import ascend

RULES = ("Alibi", "Rope", "Omni")
SETTINGS = settings(max_examples=times(100))
PAIRS = [(dtype, index) for dtype in DTYPES for index in INDICES]


@st.composite
def windows(draw: st.DrawFn, length: int) -> tuple[int, int]:
    """Any legal (win, off) of a head with ``length`` tokens."""
    win = draw(st.integers(0, length))
    off = draw(st.one_of(st.sampled_from([-1, length]), st.integers(0, length - win)))
    return win, off


@st.composite
def plans(draw: st.DrawFn, may_skip: bool = True) -> Plan:
    """Any legal plan: few heads, sequences that may be empty, runs in any order, some without slots."""
    rule, heads = draw(st.sampled_from(RULES)), draw(st.integers(1, 3))
    seq_lens = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    drawn = [draw(windows(length)) for length in seq_lens for _ in range(heads)]
    skip = st.lists(st.integers(0, max(len(drawn) - 1, 0)), max_size=2 if may_skip else 0)
    wins, offs = tuple(win for win, _ in drawn), tuple(off for _, off in drawn)
    return lay_out(
        rule, seq_lens, heads, wins, offs, random.Random(draw(st.integers(0, 99))), tuple(draw(skip))
    )


@SETTINGS
@given(data=st.data())
def test_any_plan_of_runs_matches_the_golden(data: st.DataObject) -> None:
    plan, dims = data.draw(plans()), data.draw(st.sampled_from([3, 4]))
    mode = "rule"
    if dims == 4 and plan.rule != "Omni":
        mode = data.draw(st.sampled_from(["rule", "None", "", None]))
    call = plan_call(
        plan, dims, *data.draw(st.sampled_from(PAIRS)), bits.generator(data.draw(st.integers(0, 9))),
        sizes=(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))),
        block_size=data.draw(st.integers(1, 6)), scatter_mode=mode,
    )  # fmt: skip
    assert_scatters(ascend.scatter_pa_kv_cache, call)


@SETTINGS
@given(data=st.data())
def test_any_slots_match_the_golden(data: st.DataObject) -> None:
    size, num_blocks = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    slots = tuple(data.draw(st.lists(st.integers(-2, size * num_blocks - 1), max_size=12)))
    call = token_call(
        *data.draw(st.sampled_from(PAIRS)), bits.generator(data.draw(st.integers(0, 9))), slots=slots,
        sizes=(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))),
        heads=data.draw(st.integers(1, 3)), num_blocks=num_blocks, block_size=size,
    )  # fmt: skip
    assert_scatters(ascend.scatter_pa_kv_cache, call)


@SETTINGS
@given(plan=plans(may_skip=False), block_size=st.integers(1, 5), dims=st.sampled_from([3, 4]))
def test_planned_runs_read_back_as_slices(plan: Plan, block_size: int, dims: int) -> None:
    call = plan_call(plan, dims, torch.float16, torch.int64, bits.generator(1))
    lengths = ascend.run_lengths(
        plan.rule, call["seq_lens"], call["compress_lens"], call.get("compress_seq_offset")
    )
    assert lengths.tolist() == plan.lengths()
    slots, num_slots = ascend.plan_slots(lengths, block_size)
    for name, size in zip(CACHES, (5, 3), strict=True):
        call[name] = torch.zeros(blocks(num_slots, block_size), block_size, 1, size, dtype=torch.float16)
    call["slot_mapping"] = slots.view_as(call["slot_mapping"])
    expected = fork(call)
    averaged = ascend_golden.scatter_pa_kv_cache(**expected)
    ascend.scatter_pa_kv_cache(**call)
    for name, source in zip(CACHES, ("key", "value"), strict=True):
        settle(call[name], expected[name], averaged)
        flat = call[name].flatten(0, 2)
        for p, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            b, h = divmod(p, plan.heads)
            tokens = call[source][b] if dims == 4 else call[source][sum(plan.seq_lens[:b]) :]
            pieces = ascend_golden.pieces(plan.rule, plan.seq_lens[b], plan.wins[p], plan.offs[p])
            assert len(pieces) == length
            for k, piece in enumerate(pieces):
                if isinstance(piece, int):
                    bits.assert_same_bits(flat[slot + k], tokens[piece, h], f"token {k} of run {p}")


@settings(max_examples=times(40))
@given(data=st.data())
def test_norm_and_fractal_caches_hold_the_same(data: st.DataObject) -> None:
    dtype, index = data.draw(st.sampled_from(PAIRS))
    last = 32 // torch.empty((), dtype=dtype).element_size()
    heads = data.draw(st.sampled_from([1, 2, 4]))
    sizes = tuple(
        data.draw(st.integers(1, 2)) * last // data.draw(st.sampled_from([1, heads])) for _ in range(2)
    )
    rng = bits.generator(data.draw(st.integers(0, 9)))
    norm = token_call(dtype, index, rng, sizes=sizes, heads=heads)
    fractal = {**fork(norm), **{name: golden_nd_to_nz(norm[name]) for name in CACHES}}
    ascend.scatter_pa_kv_cache(**norm)
    ascend.scatter_pa_kv_cache(**fractal, cache_mode="PA_NZ")
    for name in CACHES:
        bits.assert_same_bits(ascend.nd_to_nz(norm[name]), fractal[name], name)
        bits.assert_same_bits(ascend.nz_to_nd(fractal[name], heads), norm[name], name)


@settings(max_examples=times(60))
@given(data=st.data())
def test_gather_returns_what_scatter_wrote(data: st.DataObject) -> None:
    mode, dtype = data.draw(st.sampled_from(["Norm", "PA_NZ"])), data.draw(st.sampled_from(DTYPES))
    index, size = data.draw(st.sampled_from(INDICES)), data.draw(st.integers(1, 5))
    seq_lens = data.draw(st.lists(st.integers(0, 9), max_size=4))
    width = max((blocks(n, size) for n in seq_lens), default=0) + data.draw(st.integers(0, 2))
    num_blocks = max(1, sum(blocks(n, size) for n in seq_lens)) + 1
    free = random.Random(data.draw(st.integers(0, 99))).sample(range(num_blocks), num_blocks)
    table = torch.full((len(seq_lens), width), -1, dtype=index)
    for b, n in enumerate(seq_lens):
        table[b, : blocks(n, size)] = torch.tensor([free.pop() for _ in range(blocks(n, size))], dtype=index)
    rng, features = bits.generator(1), 64 // torch.empty((), dtype=dtype).element_size()
    shape = (2 * features // (32 // dtype.itemsize), size, 32 // dtype.itemsize)
    block = (size, 2, features) if mode == "Norm" else shape
    key_cache, value_cache = (bits.poison((num_blocks, *block), dtype, rng) for _ in CACHES)
    key, value = (bits.poison((sum(seq_lens), 2, features), dtype, rng) for _ in CACHES)
    halves = [data.draw(st.integers(0, n)) for n in seq_lens]
    for starts, ends in ((halves, seq_lens), ([0] * len(halves), halves)):  # the later tokens first
        start = torch.tensor(starts, dtype=index)
        slots = ascend.slot_mapping(table, start, torch.tensor(ends, dtype=index) - start, size)
        rows = [
            sum(seq_lens[:b]) + t
            for b, (start, end) in enumerate(zip(starts, ends, strict=True))
            for t in range(start, end)
        ]
        picked = (ascend_golden.raw(x)[rows].view(dtype) for x in (key, value))
        ascend.scatter_pa_kv_cache(*picked, key_cache, value_cache, slots, cache_mode=mode)
    got = [bits.poison(key.shape, dtype, rng) for _ in CACHES]
    lens = torch.tensor(seq_lens, dtype=index)
    ascend.gather_pa_kv_cache(key_cache, value_cache, table, lens, *got, cache_mode=mode)
    bits.assert_same_bits(got[0], key, "key")
    bits.assert_same_bits(got[1], value, "value")
