"""Strides and addresses: views of larger buffers, odd strides, pools of more than 2**31 elements."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from oracles import bits
from oracles.pmx_attention import check_fused
from oracles.pmx_cases import (
    Call,
    Numerics,
    assert_matches_golden,
    attention_call,
    dynamic_call,
    random_batch,
    static_call,
)
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import pmx

F32 = Numerics(torch.float32, torch.float32)
INT8 = Numerics(torch.float16, torch.int8, torch.float32, bit=8)
INT4 = Numerics(torch.float32, torch.uint8, torch.float16, bit=4)
EVERY_NUMERICS = pytest.mark.parametrize("how", [F32, INT8, INT4], ids=["plain", "int8", "int4"])


def static_matches_golden(call: Call) -> None:
    assert_matches_golden(pmx.key_value_cache, pmx_golden.key_value_cache, call)


def dynamic_matches_golden(call: Call) -> None:
    assert_matches_golden(pmx.dynamic_batching.key_value_cache, pmx_golden.dynamic_key_value_cache, call)


def paged_call(how: Numerics, layout: int = 0) -> Call:
    batch = random_batch("page", 3, (3, 0, 2), (4, 2, 0), random.Random(1))
    call = dynamic_call(batch, how, pmx_golden.DYNAMIC_AXES[layout], bits.generator(1))
    return {**call, "cache_layout": layout}


# --- inputs -------------------------------------------------------------------------------------------------


def sliced(x: Tensor) -> Tensor:
    """A view in the middle of a larger buffer, every second row of the first axis."""
    buffer = torch.full([2 * x.shape[0] + 1, *(n + 3 for n in x.shape[1:])], 7, dtype=x.dtype)
    view = buffer[(slice(1, None, 2), *(slice(2, 2 + n) for n in x.shape[1:]))]
    return view.copy_(x)


def transposed(x: Tensor) -> Tensor:
    """The same values with the order of all axes in memory reversed."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def heads_first(x: Tensor) -> Tensor:
    """The same values as a view of a tensor whose heads come before its tokens."""
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def expanded(x: Tensor) -> Tensor:
    """One head vector for all tokens and heads, with strides of zero."""
    return x[(slice(0, 1),) * (x.dim() - 1)].expand(x.shape)


VIEWS = pytest.mark.parametrize("view", [sliced, transposed, heads_first, expanded])


@VIEWS
@EVERY_NUMERICS
@pytest.mark.parametrize("layout", [0, 1])
def test_static_inputs_may_have_any_strides(
    view: Callable[[Tensor], Tensor], how: Numerics, layout: int
) -> None:
    call = static_call(how, layout, 1, bits.generator(0))
    static_matches_golden({**call, **{name: view(call[name]) for name in ("current_key", "current_value")}})


@VIEWS
@EVERY_NUMERICS
def test_dynamic_inputs_may_have_any_strides(view: Callable[[Tensor], Tensor], how: Numerics) -> None:
    call = paged_call(how)
    dynamic_matches_golden({**call, **{name: view(call[name]) for name in ("current_key", "current_value")}})


def test_key_and_value_may_be_slices_of_one_projection() -> None:
    fused = torch.randn(5, 3 * 2 * 16, generator=bits.generator(5))
    _, key, value = (x.unflatten(-1, (2, 16)) for x in fused.chunk(3, dim=-1))
    before = fused.clone()
    dynamic_matches_golden({**paged_call(F32), "current_key": key, "current_value": value})
    bits.assert_same_bits(fused, before, "projection")


@VIEWS
def test_attention_inputs_may_have_any_strides(view: Callable[[Tensor], Tensor]) -> None:
    batch = random_batch("page", 3, (3, 0, 2), (4, 2, 0), random.Random(1))
    call = attention_call(batch, INT8, bits.generator(1), ratio=2)
    check_fused(
        pmx.dynamic_batching.multi_head_cache_attention,
        {**call, **{name: view(call[name]) for name in ("query", "current_key", "current_value")}},
    )


def test_index_tensors_may_have_any_strides() -> None:
    call = paged_call(INT8)
    strided = {name: sliced(call[name]) for name in ("seqstarts", "kvstarts", "cachestarts", "start_pos")}
    assert not any(x.is_contiguous() for x in strided.values())
    dynamic_matches_golden({**call, **strided})


# --- caches -------------------------------------------------------------------------------------------------


def inside(x: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """A poisoned buffer, and a view of it which holds ``x``: every second row, margins on all axes."""
    shape = [2 * x.shape[0] + 1, *(n + 2 for n in x.shape[1:])]
    buffer = bits.poison(shape, x.dtype, rng)
    view = buffer[(slice(1, None, 2), *(slice(1, 1 + n) for n in x.shape[1:]))]
    view.copy_(x)
    return buffer, view


def assert_surroundings_untouched(buffer: Tensor, before: Tensor, view: Tensor) -> None:
    """Outside ``view``, the buffer has the bytes of ``before``."""
    expected = before.clone()
    torch.as_strided(expected, view.shape, view.stride(), view.storage_offset()).copy_(view)
    bits.assert_same_bits(buffer, expected, "buffer")


def check_inside_a_buffer(matches_golden: Callable[[Call], object], call: Call) -> None:
    rng = bits.generator(6)
    surroundings = []
    for name in ("cache", "scale"):
        if call[name] is not None:
            buffer, call[name] = inside(call[name], rng)
            surroundings.append((buffer, buffer.clone(), call[name]))
    matches_golden(call)
    for buffer, before, view in surroundings:
        assert_surroundings_untouched(buffer, before, view)


@EVERY_NUMERICS
@pytest.mark.parametrize("layout", [0, 1])
def test_static_cache_may_be_a_view_of_a_larger_buffer(how: Numerics, layout: int) -> None:
    check_inside_a_buffer(static_matches_golden, static_call(how, layout, 1, bits.generator(0)))


@EVERY_NUMERICS
@pytest.mark.parametrize("layout", [0, 1, 2, 3])
def test_dynamic_cache_may_be_a_view_of_a_larger_buffer(how: Numerics, layout: int) -> None:
    check_inside_a_buffer(dynamic_matches_golden, paged_call(how, layout))


@EVERY_NUMERICS
@pytest.mark.parametrize("layout", [0, 2, 3])
def test_fused_cache_may_be_a_view_of_a_larger_buffer(how: Numerics, layout: int) -> None:
    batch = random_batch("token", 1, (3, 0, 2), (4, 2, 0), random.Random(1))
    call = attention_call(batch, how, bits.generator(1), layout=layout)
    check_inside_a_buffer(
        lambda call: check_fused(pmx.dynamic_batching.multi_head_cache_attention, call), call
    )


@EVERY_NUMERICS
@pytest.mark.parametrize("axes", ["TLKHD", "LKHTD", "HTLKD", "KTHLD"])
def test_cache_may_lie_in_memory_in_another_order(how: Numerics, axes: str) -> None:
    call = paged_call(how)
    for name in ("cache", "scale"):
        if call[name] is not None:
            stored = call[name].permute(["TLKHD".index(axis) for axis in axes]).contiguous()
            call[name] = stored.permute([axes.index(axis) for axis in "TLKHD"])
    dynamic_matches_golden(call)


def test_scale_has_strides_of_its_own() -> None:
    call = paged_call(INT8)
    call["scale"] = transposed(call["scale"])
    dynamic_matches_golden(call)


# --- large pools --------------------------------------------------------------------------------------------

HEAD_DIM = 16
NUM_SLOTS = 2**31 // (2 * HEAD_DIM) + 2**16
SEQLEN, PAGE_SIZE = 6, 4
PAGES = (NUM_SLOTS - 4, NUM_SLOTS - 9)  # 4 tokens in the last slots of the pool, 2 a little before them


def large_pool_call(layout: int, form: str) -> tuple[Call, list[int]]:
    """int8 pass-through into a pool of more than 2**31 bytes, of which only a few are ever touched."""
    slots = [PAGES[t // PAGE_SIZE] + t % PAGE_SIZE for t in range(SEQLEN)]
    if form == "offset":
        slots = list(range(NUM_SLOTS - SEQLEN, NUM_SLOTS))
    sizes = {"T": NUM_SLOTS, "L": 1, "K": 2, "H": 1, "D": HEAD_DIM}
    axes = pmx_golden.DYNAMIC_AXES[layout]
    table = {"offset": [slots[0]], "token": slots, "page": [list(PAGES)]}[form]
    rng = bits.generator(2)
    call = {
        "current_key": bits.poison((4, 1, HEAD_DIM), torch.int8, rng),
        "current_value": bits.poison((4, 1, HEAD_DIM), torch.int8, rng),
        "seqstarts": torch.tensor([0, 4]),
        "kvstarts": torch.tensor([0, SEQLEN]),
        "cachestarts": torch.tensor(table),
        "start_pos": torch.tensor([SEQLEN - 4]),
        "max_seqlen": 4,
        "max_kvlen": SEQLEN,
        "cache": torch.empty([sizes[axis] for axis in axes], dtype=torch.int8),
        "cache_mode": int(form != "offset"),
        "cache_layout": layout,
        "page_size": PAGE_SIZE,
    }
    return call, slots


def byte_offset(layout: int, slot: int, side: int) -> int:
    """Where a head vector begins, by hand: one layer, one head."""
    return (2 * slot + side if layout in (0, 1) else side * NUM_SLOTS + slot) * HEAD_DIM


@pytest.mark.parametrize("layout", [0, 1, 2, 3])
@pytest.mark.parametrize("form", ["offset", "page", "token"])
def test_slots_beyond_two_to_the_31_elements(layout: int, form: str) -> None:
    call, slots = large_pool_call(layout, form)
    memory = call["cache"].view(-1)
    assert memory.numel() > 2**31
    for slot in range(NUM_SLOTS - 16, NUM_SLOTS):
        for side in range(2):
            start = byte_offset(layout, slot, side)
            memory[start : start + HEAD_DIM] = torch.arange(HEAD_DIM) + (slot + 5 * side) % 100
    expected = {
        (slot, side): memory[byte_offset(layout, slot, side) :][:HEAD_DIM].clone()
        for slot in range(NUM_SLOTS - 16, NUM_SLOTS)
        for side in range(2)
    }
    for i, slot in enumerate(slots[SEQLEN - 4 :]):
        expected[slot, 0], expected[slot, 1] = call["current_key"][i, 0], call["current_value"][i, 0]
    loaded = pmx.dynamic_batching.key_value_cache(**call)
    for side in range(2):
        wanted = torch.stack([expected[slot, side] for slot in slots])[:, None]
        bits.assert_same_bits(loaded[side], wanted, ("key", "value")[side])
    for (slot, side), wanted in expected.items():
        start = byte_offset(layout, slot, side)
        bits.assert_same_bits(memory[start : start + HEAD_DIM], wanted, f"cache at slot {slot}")


def test_static_batch_slot_beyond_two_to_the_31_elements() -> None:
    max_seq = 2**31 // (2 * HEAD_DIM) + 5
    cache = torch.empty(2, 1, 2, max_seq, 1, HEAD_DIM, dtype=torch.int8)
    key, value = (bits.poison((2, 1, 1, HEAD_DIM), torch.int8, bits.generator(seed)) for seed in (3, 4))
    got_key, got_value = pmx.key_value_cache(key, value, 0, cache)
    bits.assert_same_bits(got_key, key, "key")
    bits.assert_same_bits(got_value, value, "value")
    second_value = (1 * 2 + 1) * max_seq * HEAD_DIM
    assert second_value > 2**31
    bits.assert_same_bits(cache.view(-1)[second_value : second_value + HEAD_DIM], value[1, 0, 0], "cache")
