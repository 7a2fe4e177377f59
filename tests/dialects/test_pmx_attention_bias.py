"""Additive masks, ALiBi, and rows that see nothing."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from oracles import bits
from oracles.pmx_attention import check_fused, check_unfused, random_unfused_call
from oracles.pmx_cases import Call, Numerics, attention_call, random_batch, with_copies
from torch import Tensor

from kvloom.dialects import pmx

pytestmark = pytest.mark.usefixtures("each_backend")

fused = pmx.dynamic_batching.multi_head_cache_attention
unfused = pmx.dynamic_batching.multi_head_attention

SEQLENS, START_POS = (1, 3, 2), (4, 0, 3)
NUM_ROWS, NUM_COLUMNS = 6, 13


def masked_call(dtype: torch.dtype = torch.float32, form: str = "page", **more: Any) -> Call:
    batch = random_batch(form, 3, SEQLENS, START_POS, random.Random(3))
    return attention_call(batch, Numerics(dtype, dtype), bits.generator(3), ratio=2, **more)


def random_mask(shape: tuple[int, ...], dtype: torch.dtype, hide: float = 0.0) -> Tensor:
    rng = bits.generator(8)
    mask = torch.randn(shape, generator=rng)
    mask[torch.rand(shape, generator=rng) < hide] = -math.inf
    return mask.to(dtype)


def diagonal_blocks() -> Tensor:
    """True where a mask element belongs to the query and the keys of one entry."""
    blocks = torch.zeros(NUM_ROWS, NUM_COLUMNS, dtype=torch.bool)
    row = column = 0
    for seqlen, start in zip(SEQLENS, START_POS, strict=True):
        blocks[row : row + seqlen, column : column + start + seqlen] = True
        row, column = row + seqlen, column + start + seqlen
    return blocks


# --- attn_mask ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("per_head", [False, True], ids=["2-d", "3-d"])
@pytest.mark.parametrize("extra", [0, 1, 3, 16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_additive_mask(dtype: torch.dtype, per_head: bool, extra: int, is_causal: bool) -> None:
    shape = (4,) * per_head + (NUM_ROWS, NUM_COLUMNS + extra)
    check_fused(fused, masked_call(dtype, is_causal=is_causal, attn_mask=random_mask(shape, dtype, hide=0.2)))


@pytest.mark.parametrize("per_head", [False, True], ids=["2-d", "3-d"])
@pytest.mark.parametrize("form", ["offset", "token", "page"])
def test_only_the_blocks_of_the_entries_are_read(per_head: bool, form: str) -> None:
    mask = torch.full((4, NUM_ROWS, NUM_COLUMNS + 3), math.nan)
    mask[:, :, :NUM_COLUMNS][:, diagonal_blocks()] = random_mask(
        (4, int(diagonal_blocks().sum())), torch.float32
    )
    check_fused(fused, masked_call(form=form, attn_mask=mask if per_head else mask[0].clone()))


@pytest.mark.parametrize("shape", [(0,), (0, 0), (NUM_ROWS, 0), (4, 0, NUM_COLUMNS)], ids=str)
def test_mask_without_elements_means_none(shape: tuple[int, ...]) -> None:
    call = masked_call()
    expected = fused(**with_copies(call))
    output = fused(**with_copies(call, attn_mask=torch.empty(shape)))
    bits.assert_same_bits(output, expected, "attn_output")


def test_mask_adds_to_the_causal_mask() -> None:
    call = masked_call(is_causal=True)
    without = fused(**with_copies(call))
    zeros = fused(**with_copies(call, attn_mask=torch.zeros(NUM_ROWS, NUM_COLUMNS)))
    torch.testing.assert_close(zeros, without)


@pytest.mark.parametrize("dtype", bits.FLOATS)
def test_lowest_finite_value_hides_as_well_as_infinity(dtype: torch.dtype) -> None:
    lowest = torch.zeros(NUM_ROWS, NUM_COLUMNS, dtype=dtype)
    lowest[:, ::3] = torch.finfo(dtype).min
    infinite = torch.where(lowest < 0, -math.inf, 0.0).to(dtype)
    call = masked_call(dtype, is_causal=False)
    got = fused(**with_copies(call, attn_mask=lowest))
    bits.assert_same_bits(got, fused(**with_copies(call, attn_mask=infinite)), "attn_output")


def test_mask_may_be_an_expanded_or_sliced_view() -> None:
    base = random_mask((NUM_ROWS, 2 * NUM_COLUMNS), torch.float32, hide=0.2)
    check_fused(fused, masked_call(attn_mask=base[:, ::2].expand(4, -1, -1)))


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("per_head", [False, True], ids=["2-d", "3-d"])
def test_unfused_mask(dtype: torch.dtype, per_head: bool) -> None:
    mask = random_mask((4,) * per_head + (6, 15), dtype, hide=0.2)
    check_unfused(unfused, random_unfused_call(dtype, [2, 1, 3], [4, 6, 3], ratio=2, attn_mask=mask))


# --- rows that see nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_alibi", [False, True])
def test_fully_masked_row_gives_zero(dtype: torch.dtype, is_causal: bool, is_alibi: bool) -> None:
    mask = random_mask((NUM_ROWS, NUM_COLUMNS), dtype)
    mask[2] = mask[5] = -math.inf
    output = check_fused(fused, masked_call(dtype, is_causal=is_causal, is_alibi=is_alibi, attn_mask=mask))
    assert not bool(output[2].any())
    assert not bool(output[5].any())
    assert bool(output[[0, 1, 3, 4]].flatten(1).any(-1).all())


def test_row_masked_for_one_head_only() -> None:
    mask = random_mask((4, NUM_ROWS, NUM_COLUMNS), torch.float32)
    mask[2, 4] = -math.inf
    output = check_fused(fused, masked_call(attn_mask=mask))
    assert output.abs().amax(-1)[4].gt(0).tolist() == [True, True, False, True]


def test_row_hidden_by_mask_and_causality_together_gives_zero() -> None:
    mask = torch.zeros(NUM_ROWS, NUM_COLUMNS)
    mask[1, 5] = -math.inf
    output = check_fused(fused, masked_call(is_causal=True, attn_mask=mask))
    assert not bool(output[1].any())


# --- ALiBi --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("is_causal", [False, True])
def test_alibi(dtype: torch.dtype, num_heads: int, is_causal: bool) -> None:
    batch = random_batch("page", 3, SEQLENS, START_POS, random.Random(4))
    call = attention_call(
        batch,
        Numerics(dtype, dtype),
        bits.generator(4),
        kv_heads=num_heads,
        is_causal=is_causal,
        is_alibi=True,
    )
    check_fused(fused, call)


@pytest.mark.parametrize("ratio", [2, 3])
def test_alibi_slopes_count_query_heads(ratio: int) -> None:
    batch = random_batch("offset", 3, SEQLENS, START_POS, random.Random(4))
    how = Numerics(torch.float32, torch.float32)
    check_fused(fused, attention_call(batch, how, bits.generator(4), kv_heads=2, ratio=ratio, is_alibi=True))


def test_alibi_hides_the_future_whatever_causality_says() -> None:
    call = masked_call(is_causal=False, is_alibi=True)
    expected = check_fused(fused, with_copies(call))
    for is_causal, decoding_batches in ((True, 0), (True, 3), (False, 3)):
        other = with_copies(call, is_causal=is_causal, decoding_batches=decoding_batches)
        bits.assert_same_bits(check_fused(fused, other), expected, "attn_output")


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("per_head", [False, True], ids=["2-d", "3-d"])
def test_alibi_adds_to_the_mask(dtype: torch.dtype, per_head: bool) -> None:
    mask = random_mask((4,) * per_head + (NUM_ROWS, NUM_COLUMNS + 3), dtype, hide=0.1)
    check_fused(fused, masked_call(dtype, is_alibi=True, attn_mask=mask))


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_unfused_alibi_is_applied(dtype: torch.dtype, is_causal: bool) -> None:
    call = random_unfused_call(dtype, [2, 1, 3], [4, 6, 3], ratio=3, is_causal=is_causal, is_alibi=True)
    output = check_unfused(unfused, call)
    assert not torch.equal(output, unfused(**{**call, "is_alibi": False}))


def test_alibi_over_a_long_history() -> None:
    batch = random_batch("page", 16, (1, 2), (300, 90), random.Random(0))
    how = Numerics(torch.float16, torch.float16)
    check_fused(fused, attention_call(batch, how, bits.generator(0), kv_heads=3, is_alibi=True))
