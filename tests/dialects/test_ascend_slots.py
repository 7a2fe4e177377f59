"""Slots that are negative, repeated or missing, and calls without tokens."""

from __future__ import annotations

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import (
    CACHES,
    DTYPES,
    INDICES,
    assert_same_memory,
    assert_scatters,
    dtype_id,
    fork,
    keys_only,
    nhsd_call,
    nz_call,
    plan_call,
    standard_plan,
    token_call,
)
from oracles.pmx_cases import Call

from kvloom.dialects import ascend

INDEX = pytest.mark.parametrize("index", INDICES, ids=dtype_id)
RULES = pytest.mark.parametrize("rule", ["Alibi", "Rope", "Omni"])
DIMS = pytest.mark.parametrize("dims", [3, 4])
TOKEN_SCENARIOS = ["Norm", "keys only", "PA_NZ", "NHSD"]


def tokens_of(scenario: str, index: torch.dtype = torch.int32) -> Call:
    rng = bits.generator(0)
    if scenario == "PA_NZ":
        return nz_call((torch.bfloat16, torch.bfloat16), index, rng)
    if scenario == "NHSD":
        return nhsd_call(torch.bfloat16, index, rng)
    call = token_call(torch.bfloat16, index, rng)
    return keys_only(call) if scenario == "keys only" else call


def runs_of(rule: str, dims: int, index: torch.dtype = torch.int32) -> Call:
    return plan_call(standard_plan(rule), dims, torch.float16, index, bits.generator(0))


def assert_writes_nothing(call: Call) -> None:
    after = fork(call)
    assert ascend.scatter_pa_kv_cache(**after) is None
    assert_same_memory(after, call)


@INDEX
@pytest.mark.parametrize("scenario", TOKEN_SCENARIOS)
def test_any_negative_slot_skips_its_token(scenario: str, index: torch.dtype) -> None:
    call = tokens_of(scenario, index)
    call["slot_mapping"][2:5] = torch.tensor([torch.iinfo(index).min, -15, -16])
    assert_scatters(ascend.scatter_pa_kv_cache, call)


@pytest.mark.parametrize("scenario", TOKEN_SCENARIOS)
def test_only_negative_slots_write_nothing(scenario: str) -> None:
    call = tokens_of(scenario)
    assert_writes_nothing({**call, "slot_mapping": torch.full_like(call["slot_mapping"], -1)})


@INDEX
@DIMS
@RULES
def test_negative_start_skips_the_whole_run(rule: str, dims: int, index: torch.dtype) -> None:
    call = runs_of(rule, dims, index)
    call["slot_mapping"].view(-1)[:3] = torch.tensor([-1, torch.iinfo(index).min, -2])
    assert_scatters(ascend.scatter_pa_kv_cache, call)


@DIMS
@RULES
def test_only_negative_starts_write_nothing(rule: str, dims: int) -> None:
    call = runs_of(rule, dims)
    assert_writes_nothing({**call, "slot_mapping": torch.full_like(call["slot_mapping"], -1)})


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_last_token_wins_a_repeated_slot(dtype: torch.dtype) -> None:
    slots = (3, 9, 3, -1, 9, 3, 0)
    assert_scatters(
        ascend.scatter_pa_kv_cache, token_call(dtype, torch.int32, bits.generator(1), slots=slots)
    )


@pytest.mark.parametrize("scenario", TOKEN_SCENARIOS)
def test_last_of_many_tokens_wins_one_slot(scenario: str) -> None:
    call = tokens_of(scenario)
    assert_scatters(
        ascend.scatter_pa_kv_cache, {**call, "slot_mapping": torch.full_like(call["slot_mapping"], 7)}
    )


def test_last_of_thousands_of_tokens_wins() -> None:
    slots = torch.randint(-3, 16, (4000,), generator=bits.generator(2))
    key = torch.arange(4000, dtype=torch.int32).view(4000, 1, 1)
    cache = torch.full((4, 4, 1, 1), -1, dtype=torch.int32)
    ascend.scatter_pa_kv_cache(key, None, cache, None, slots)
    assert cache.flatten().tolist() == [int((slots == s).nonzero().max()) for s in range(16)]


@DIMS
@RULES
def test_last_run_wins_where_runs_overlap(rule: str, dims: int) -> None:
    call = runs_of(rule, dims)
    call["slot_mapping"].view(-1)[:] = torch.tensor([0, 2, 1, 0, 0, 0, 3, 1, 4, 2, 6, 5])
    assert_scatters(ascend.scatter_pa_kv_cache, call)


def test_more_tokens_than_slots_may_be_padding() -> None:
    slots = (*[-1] * 30, 2, *[-1] * 10)
    assert_scatters(
        ascend.scatter_pa_kv_cache, token_call(torch.int8, torch.int32, bits.generator(3), slots=slots)
    )


@pytest.mark.parametrize("scenario", TOKEN_SCENARIOS)
def test_no_tokens_write_nothing(scenario: str) -> None:
    call = tokens_of(scenario)
    for name in ("key", "value", "slot_mapping"):
        call[name] = call[name][:0] if call[name] is not None else None
    assert_writes_nothing(call)


def test_no_tokens_with_strides_write_nothing() -> None:
    call = tokens_of("Norm")
    for name in ("key", "value", "slot_mapping"):
        call[name] = call[name][:0]
    assert_writes_nothing({**call, "scatter_mode": "Nct", "strides": (15, 9), "offsets": (0, 0)})


@DIMS
@RULES
def test_no_sequences_write_nothing(rule: str, dims: int) -> None:
    call = runs_of(rule, dims)
    for name in ("key", "value", "slot_mapping", "compress_lens", "compress_seq_offset", "seq_lens"):
        call[name] = call[name][:0] if name in call else None
    assert_writes_nothing(call)


@DIMS
@RULES
def test_empty_sequences_write_nothing(rule: str, dims: int) -> None:
    call = runs_of(rule, dims)
    for name in ("slot_mapping", "compress_lens", "seq_lens"):
        call[name] = torch.zeros_like(call[name])
    if rule != "Alibi":
        call["compress_seq_offset"] = torch.zeros_like(call["compress_seq_offset"])
    if dims == 3:
        call |= {"key": call["key"][:0], "value": call["value"][:0]}
    assert_writes_nothing(call)


def test_cache_without_blocks_accepts_padding() -> None:
    call = tokens_of("Norm")
    call |= {name: call[name][:0] for name in CACHES}
    assert_writes_nothing({**call, "slot_mapping": torch.full_like(call["slot_mapping"], -1)})


@RULES
def test_empty_run_may_start_at_the_end_of_the_cache(rule: str) -> None:
    call = runs_of(rule, 3)
    end = call["key_cache"].shape[0] * call["key_cache"].shape[1]
    call["slot_mapping"][3] = end
    assert_scatters(ascend.scatter_pa_kv_cache, call)


@INDEX
@DIMS
@RULES
def test_run_may_end_with_the_cache(rule: str, dims: int, index: torch.dtype) -> None:
    call = runs_of(rule, dims, index)
    plan = standard_plan(rule)
    end = call["key_cache"].shape[0] * call["key_cache"].shape[1]
    slots = torch.full((12,), -1, dtype=index)
    slots[0] = end - plan.lengths()[0]
    assert_scatters(ascend.scatter_pa_kv_cache, {**call, "slot_mapping": slots.view_as(call["slot_mapping"])})


def test_last_slot_of_the_cache_is_written() -> None:
    call = tokens_of("Norm")
    call["slot_mapping"][0] = 14
    call["slot_mapping"][3] = -1
    assert_scatters(ascend.scatter_pa_kv_cache, call)


def test_large_index_of_64_bits_is_not_read_as_32() -> None:
    call = tokens_of("Norm", torch.int64)
    call["slot_mapping"][1] = -(2**33) + 5
    assert_scatters(ascend.scatter_pa_kv_cache, call)
