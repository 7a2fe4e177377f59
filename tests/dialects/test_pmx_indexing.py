"""Slots: page tables and padding, shared pages, the order of stores and loads, spellings of one place."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from oracles import bits
from oracles.pmx_cases import (
    PADDING,
    Batch,
    Call,
    Numerics,
    as_tokens,
    assert_matches_golden,
    dynamic_call,
    random_batch,
    with_copies,
)

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import pmx

F32 = Numerics(torch.float32, torch.float32)
INT8 = Numerics(torch.float16, torch.int8, torch.float16, bit=8)
INT4 = Numerics(torch.float32, torch.uint8, torch.float32, bit=4)
EVERY_NUMERICS = pytest.mark.parametrize("how", [F32, INT8, INT4], ids=["plain", "int8", "int4"])


def matches_golden(call: Call) -> pmx_golden.Stored:
    operator = pmx.dynamic_batching.key_value_cache
    return assert_matches_golden(operator, pmx_golden.dynamic_key_value_cache, call)


def call_for(batch: Batch, how: Numerics, seed: int = 0) -> Call:
    return dynamic_call(batch, how, "TLKHD", bits.generator(seed))


# --- page tables --------------------------------------------------------------------------------------------


@EVERY_NUMERICS
@pytest.mark.parametrize("padding", PADDING)
def test_padding_of_the_page_table_is_never_read(how: Numerics, padding: int) -> None:
    rows = ((8, 0, padding, padding), (padding,) * 4, (4, 12, 16, padding))
    matches_golden(call_for(Batch("page", (2, 0, 1), (4, 0, 9), rows, 20, page_size=4), how))


@EVERY_NUMERICS
@pytest.mark.parametrize("kvlen", [1, 2, 3, 4, 5, 6, 7])
def test_entries_beyond_the_last_page_are_padding_at_every_length(how: Numerics, kvlen: int) -> None:
    rows = ((13, 5, 9, -1)[: -(-kvlen // 3)] + (-1,) * (4 - -(-kvlen // 3)),)
    for num_new in {0, 1, kvlen}:
        matches_golden(call_for(Batch("page", (num_new,), (kvlen - num_new,), rows, 16, page_size=3), how))


@pytest.mark.parametrize("unused", [-5, 2**63 - 1])
def test_offset_of_an_empty_entry_is_never_read(unused: int) -> None:
    matches_golden(call_for(Batch("offset", (0, 3), (0, 1), (unused, 2), 7), F32))


@EVERY_NUMERICS
def test_page_starts_need_not_be_multiples_of_the_page_size(how: Numerics) -> None:
    matches_golden(call_for(Batch("page", (5, 1), (1, 7), ((7, 1), (12, 17)), 21, page_size=4), how))


@EVERY_NUMERICS
def test_last_page_may_reach_beyond_the_pool(how: Numerics) -> None:
    matches_golden(call_for(Batch("page", (2, 1), (4, 1), ((0, 10), (8, -1)), 12, page_size=4), how))


@EVERY_NUMERICS
def test_page_size_larger_than_the_pool(how: Numerics) -> None:
    matches_golden(call_for(Batch("page", (3, 2), (0, 4), ((9,), (2,)), 12, page_size=128), how))


def test_overlapping_pages_are_read_as_the_table_says() -> None:
    matches_golden(call_for(Batch("page", (1,), (7,), ((0, 2),), 8, page_size=4), F32))


# --- sharing ------------------------------------------------------------------------------------------------


@EVERY_NUMERICS
def test_entries_may_share_prefix_pages(how: Numerics) -> None:
    rows = ((8, 0, 20), (8, 0, 4), (8, 12, -1))
    matches_golden(call_for(Batch("page", (2, 1, 3), (8, 9, 4), rows, 24, page_size=4), how))


@EVERY_NUMERICS
@pytest.mark.parametrize("form", ["page", "token", "offset"])
def test_entry_sees_what_a_later_entry_stores_in_the_same_call(how: Numerics, form: str) -> None:
    if form == "offset":
        batch = Batch("offset", (2, 4), (4, 0), (0, 0), 8)
    else:
        batch = Batch("page", (2, 4), (4, 0), ((8, 12), (8, -1)), 16, page_size=4)
        batch = as_tokens(batch) if form == "token" else batch
    call = call_for(batch, how)
    matches_golden(with_copies(call))
    key, value = pmx.dynamic_batching.key_value_cache(**call)
    bits.assert_same_bits(key[:4], key[6:], "key")
    bits.assert_same_bits(value[:4], value[6:], "value")


def test_later_store_is_seen_by_value_too() -> None:
    call = call_for(Batch("page", (0, 4), (4, 0), ((0,), (0,)), 4, page_size=4), F32)
    _, value = pmx.dynamic_batching.key_value_cache(**call)
    bits.assert_same_bits(value[:4], call["current_value"], "value")


@EVERY_NUMERICS
def test_entry_sees_what_an_earlier_entry_stores_in_the_same_call(how: Numerics) -> None:
    matches_golden(call_for(Batch("page", (4, 2), (0, 4), ((8, -1), (8, 0)), 16, page_size=4), how))


@EVERY_NUMERICS
def test_full_prefix_hit_rewrites_the_last_token_of_a_shared_page(how: Numerics) -> None:
    matches_golden(call_for(Batch("page", (1, 0), (7, 8), ((8, 0), (8, 0)), 16, page_size=4), how))


# --- spellings ----------------------------------------------------------------------------------------------


@EVERY_NUMERICS
def test_three_spellings_of_the_same_slots_give_the_same_bits(how: Numerics) -> None:
    offset = Batch("offset", (3, 0, 1), (2, 4, 6), (14, 0, 5), 20)
    page = replace(offset, form="page", cachestarts=((14,), (0,), (5,)), page_size=128)
    call = call_for(offset, how)
    results = []
    for batch in (offset, page, as_tokens(offset), replace(as_tokens(offset), page_size=1)):
        spelled = {**with_copies(call), **batch.arguments()}
        results.append((*pmx.dynamic_batching.key_value_cache(**spelled), spelled["cache"], spelled["scale"]))
    for other in results[1:]:
        for name, one, two in zip(("key", "value", "cache", "scale"), results[0], other, strict=True):
            bits.assert_same_bits(two, one, name)


@pytest.mark.parametrize("page_size", [1, 3, 128])
def test_page_size_means_nothing_to_a_token_table(page_size: int) -> None:
    batch = random_batch("token", page_size, (2, 3), (1, 0), random.Random(1))
    matches_golden(call_for(batch, INT8))


@pytest.mark.parametrize("page_size", [1, 3, 128])
def test_page_size_means_nothing_to_offsets(page_size: int) -> None:
    batch = random_batch("offset", page_size, (2, 3), (1, 4), random.Random(1))
    matches_golden(call_for(batch, INT8))


@pytest.mark.parametrize("form", ["page", "token"])
@pytest.mark.parametrize("spec", ["pmx", "opmx"])
def test_fused_operator_tells_page_and_token_tables_apart_by_rank(form: str, spec: str) -> None:
    batch = Batch("page", (2, 1), (4, 1), ((8, 3), (0, -1)), 12, page_size=4)
    batch = as_tokens(batch) if form == "token" else batch
    call = call_for(batch, INT8)
    expected = pmx_golden.dynamic_key_value_cache(**call)
    query = torch.zeros(3, 2, 16, dtype=torch.float16)
    pmx.dynamic_batching.multi_head_cache_attention(
        query, **call, decoding_batches=0, num_heads=2, head_dim=16, is_causal=True, spec=spec
    )
    bits.assert_same_bits(call["cache"], expected.cache, "cache")
    bits.assert_same_bits(call["scale"], expected.scale, "scale")
