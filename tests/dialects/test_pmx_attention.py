"""Attention, fused and not, against float64: dtypes, head groups, causality, layouts, quantizers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from oracles import bits
from oracles.attention import assert_as_good_as_plain, plain_attention
from oracles.pairs import pairwise
from oracles.pmx_attention import check_fused, check_unfused, random_unfused_call, unfused_call
from oracles.pmx_cases import (
    Batch,
    Call,
    Numerics,
    attention_call,
    quantized_numerics,
    random_batch,
    with_copies,
)
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import pmx
from kvloom.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("each_backend")

fused = pmx.dynamic_batching.multi_head_cache_attention
unfused = pmx.dynamic_batching.multi_head_attention

SEQLENS, START_POS = (1, 4, 3, 0, 2), (6, 0, 2, 3, 0)
F32 = Numerics(torch.float32, torch.float32)
F16 = Numerics(torch.float16, torch.float16)


def mixed_batch(form: str = "page", page_size: int = 3, seed: int = 0) -> Batch:
    """A decoding entry, a prefill, a chunk with history, an entry that only has history, a short prefill."""
    return random_batch(form, page_size, SEQLENS, START_POS, random.Random(seed))


def mixed_call(how: Numerics = F32, seed: int = 0, **more: Any) -> Call:
    return attention_call(mixed_batch(seed=seed), how, bits.generator(seed), **more)


# --- the grid -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "ratio", "is_causal", "form"),
    pairwise(bits.FLOATS, [1, 2, 4], [False, True], ["offset", "token", "page"]),
    ids=str,
)
def test_fused_equals_float64(dtype: torch.dtype, ratio: int, is_causal: bool, form: str) -> None:
    batch = mixed_batch(form, 3 if form == "page" else 128, seed=ratio)
    check_fused(
        fused,
        attention_call(
            batch,
            Numerics(dtype, dtype),
            bits.generator(ratio),
            ratio=ratio,
            is_causal=is_causal,
            decoding_batches=1,
        ),
    )


@pytest.mark.parametrize(
    ("spec", "layout", "bit", "dtype"),
    pairwise(["pmx", "opmx"], [0, 1, 2, 3], [0, 8, 4], bits.FLOATS),
    ids=str,
)
def test_every_layout_of_both_documents(spec: str, layout: int, bit: int, dtype: torch.dtype) -> None:
    numerics = (
        quantized_numerics(dtype, bit, (8, 16)) if bit else [Numerics(dtype, cache) for cache in bits.FLOATS]
    )
    for seed, how in enumerate(numerics):
        batch = random_batch(
            ("offset", "page", "token")[seed % 3], 4, (1, 3, 0), (4, 1, 2), random.Random(seed)
        )
        check_fused(
            fused, attention_call(batch, how, bits.generator(seed), layout=layout, spec=spec, kv_heads=3)
        )


@pytest.mark.parametrize("head_dim", [2, 16, 40, 64, 128])
@pytest.mark.parametrize("dtype", bits.FLOATS)
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    check_fused(fused, mixed_call(Numerics(dtype, dtype), head_dim=head_dim, ratio=2))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", bits.FLOATS)
def test_long_history(is_causal: bool, dtype: torch.dtype) -> None:
    batch = random_batch("page", 16, (1, 5), (150, 70), random.Random(0))
    call = attention_call(batch, Numerics(dtype, dtype), bits.generator(0), kv_heads=1, is_causal=is_causal)
    check_fused(fused, call)


# --- causality ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoding_batches", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("dtype", bits.FLOATS)
def test_decoding_entries_have_no_causal_mask(decoding_batches: int, dtype: torch.dtype) -> None:
    check_fused(fused, mixed_call(Numerics(dtype, dtype), decoding_batches=decoding_batches))


def test_decoding_batches_matters_for_an_entry_with_several_new_tokens() -> None:
    call = mixed_call()
    masked = fused(**with_copies(call, decoding_batches=1))
    free = fused(**with_copies(call, decoding_batches=2))
    changed = (masked != free).flatten(1).any(-1)
    assert changed.tolist() == [False] + [True] * 3 + [False] * 6


@pytest.mark.parametrize("as_tensor", [torch.tensor, lambda n: torch.tensor([n])], ids=["0-d", "1-d"])
def test_decoding_batches_may_be_a_one_element_tensor(as_tensor: object) -> None:
    assert callable(as_tensor)
    check_fused(fused, mixed_call(decoding_batches=as_tensor(2)))


@pytest.mark.parametrize("decoding_batches", [0, 3])
def test_one_new_token_sees_everything_whether_causal_or_not(decoding_batches: int) -> None:
    batch = random_batch("page", 4, (1, 1, 1), (5, 0, 9), random.Random(2))
    results = []
    for is_causal in (True, False):
        call = attention_call(
            batch, F32, bits.generator(2), is_causal=is_causal, decoding_batches=decoding_batches
        )
        results.append(check_fused(fused, call))
    bits.assert_same_bits(results[0], results[1], "attn_output")


def test_causal_mask_is_aligned_to_the_last_token() -> None:
    batch = Batch("offset", (2,), (3,), (0,), 5)
    call = attention_call(batch, F32, bits.generator(0), kv_heads=1)
    first = fused(**with_copies(call))
    call["current_value"][1] += 1.0
    second = fused(**with_copies(call))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


@pytest.mark.parametrize("max_seqlen", [0, 2, 10**6])
def test_length_hints_do_not_change_results(max_seqlen: int) -> None:
    call = mixed_call(F16)
    expected = fused(**with_copies(call))
    hinted = with_copies(call, max_seqlen=torch.tensor(max_seqlen), max_kvlen=max_seqlen)
    bits.assert_same_bits(check_fused(fused, hinted), expected, "attn_output")


# --- inputs of every kind -----------------------------------------------------------------------------------


def shaped_inputs(call: Call, family: str) -> Call:
    """The call with queries, keys and values of one family."""
    call = with_copies(call)
    for name in ("query", "current_key", "current_value"):
        x: Tensor = call[name]
        tokens = torch.arange(x.shape[0])[:, None, None]
        match family:
            case "equal":
                x.fill_(0.75)
            case "one-hot":
                x.copy_((torch.arange(x.shape[-1]) == tokens % x.shape[-1]) * 8.0)
            case "growing":
                x.mul_((1.5**tokens).to(x.dtype))
            case "outliers":
                x[..., 3] = 100.0
            case "zero":
                x.zero_()
    return call


@pytest.mark.parametrize(
    ("family", "dtype", "bit"),
    pairwise(["equal", "one-hot", "growing", "outliers", "zero"], bits.FLOATS, [0, 8]),
    ids=str,
)
def test_input_families(family: str, dtype: torch.dtype, bit: int) -> None:
    how = quantized_numerics(dtype, bit, (8,))[0] if bit else Numerics(dtype, dtype)
    check_fused(fused, shaped_inputs(mixed_call(how, ratio=2), family))


@pytest.mark.parametrize(
    ("seqlens", "start_pos"),
    [((), ()), ((0,), (0,)), ((0, 0), (3, 0)), ((1,), (0,))],
    ids=["no entries", "empty entry", "history only", "one token"],
)
@pytest.mark.parametrize("form", ["offset", "page", "token"])
def test_degenerate_batches(seqlens: tuple, start_pos: tuple, form: str) -> None:
    batch = random_batch(form, 4, seqlens, start_pos, random.Random(1))
    check_fused(fused, attention_call(batch, F32, bits.generator(1)))


@pytest.mark.parametrize("bit", [0, 8, 4])
def test_fused_entry_attends_to_what_a_later_entry_stores_in_the_same_call(bit: int) -> None:
    how = quantized_numerics(torch.float32, bit, (8,))[0] if bit else F32
    batch = Batch("page", (2, 4, 1), (4, 0, 5), ((8, 12), (8, -1), (8, 0)), 16, page_size=4)
    check_fused(fused, attention_call(batch, how, bits.generator(0), is_causal=True))


def test_num_kv_heads_zero_means_num_heads() -> None:
    call = mixed_call(ratio=1)
    check_fused(fused, with_copies(call, num_kv_heads=0))


# --- fused and unfused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bit", "layout", "dtype"), pairwise([0, 8, 4], [0, 1, 2, 3], bits.FLOATS), ids=str)
def test_fused_is_store_and_load_then_attention(bit: int, layout: int, dtype: torch.dtype) -> None:
    how = quantized_numerics(dtype, bit, (16,))[1] if bit else Numerics(dtype, torch.float16)
    call = mixed_call(how, layout=layout, spec="opmx", ratio=2, decoding_batches=1)
    steps = with_copies(call)
    of_store = {
        name: steps[name]
        for name in steps
        if name
        not in ("query", "decoding_batches", "num_heads", "head_dim", "num_kv_heads", "is_causal", "spec")
    }
    key, value = pmx.dynamic_batching.key_value_cache(**of_store)
    expected = unfused(**unfused_call(steps, key, value))
    output = fused(**call)
    bits.assert_same_bits(call["cache"], steps["cache"], "cache")
    bits.assert_same_bits(call["scale"], steps["scale"], "scale")
    if bit == 0:
        bits.assert_same_bits(output, expected, "attn_output")
    else:  # codes need not become numbers first: another arithmetic, by the same rule for its error
        loaded = unfused_call(steps, key, value)
        golden = pmx_golden.multi_head_attention(**loaded)
        assert_as_good_as_plain(output, golden, plain_attention(**loaded))


@pytest.mark.parametrize("layout", [2, 3])
def test_layouts_two_and_three_differ_between_the_documents(layout: int) -> None:
    outputs = []
    for spec, axes in (("pmx", {2: "LHTKD", 3: "KLHTD"}[layout]), ("opmx", {2: "LKTHD", 3: "LKHTD"}[layout])):
        call = mixed_call(layout=layout, spec=spec, kv_heads=3)
        order = [axes.index(axis) for axis in "TLKHD"]
        call["cache"].permute(order).copy_(torch.zeros(()))
        outputs.append((fused(**call), call["cache"].permute(order).contiguous()))
    bits.assert_same_bits(outputs[0][0], outputs[1][0], "attn_output")
    bits.assert_same_bits(outputs[0][1], outputs[1][1], "cache")


@pytest.mark.parametrize(
    ("dtype", "ratio", "is_causal"), pairwise(bits.FLOATS, [1, 2, 4], [False, True]), ids=str
)
def test_unfused_equals_float64(dtype: torch.dtype, ratio: int, is_causal: bool) -> None:
    check_unfused(
        unfused,
        random_unfused_call(
            dtype, [1, 4, 0, 3], [7, 4, 5, 6], ratio=ratio, is_causal=is_causal, decoding_batches=1
        ),
    )


@pytest.mark.parametrize(("is_causal", "decoding_batches"), [(False, 0), (True, 1)])
def test_query_row_without_any_key_gives_zero(is_causal: bool, decoding_batches: int) -> None:
    call = random_unfused_call(
        torch.float32, [2, 3], [0, 3], is_causal=is_causal, decoding_batches=decoding_batches
    )
    output = check_unfused(unfused, call)
    assert not bool(output[:2].any())


@pytest.mark.parametrize("more", [{}, {"is_causal": False, "is_alibi": True}], ids=["causal", "alibi"])
def test_row_before_the_first_key_is_refused(more: dict[str, bool]) -> None:
    call = random_unfused_call(torch.float32, [2, 5], [2, 3], **more)
    with pytest.raises(
        ArgumentError, match=r"^kvstarts must give sequence 1 at least its 5 new tokens, got 3$"
    ):
        unfused(**call)
