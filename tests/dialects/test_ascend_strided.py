"""``scatter_pa_kv_cache`` on views: fused projections, declared strides, interleaved and padded pools."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import (
    CACHES,
    DTYPES,
    assert_scatters,
    dtype_id,
    fork,
    fused_call,
    keys_only,
    nhsd_call,
    nz_call,
    plan_call,
    standard_plan,
    token_call,
)
from oracles.pmx_cases import Call
from torch import Tensor

from kvloom.dialects import ascend

Pool = Callable[[Call], Call]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
HEADS, SIZES = 3, (5, 3)


def interleaved(call: Call) -> Call:
    """Both caches as the halves of one pool: block by block a key block, then a value block."""
    pool = torch.stack([call["key_cache"], call["value_cache"]], dim=1)
    return {**call, "key_cache": pool[:, 0], "value_cache": pool[:, 1]}


def side_by_side(call: Call) -> Call:
    """Both caches in one pool whose feature axis holds key, three unused features and value."""
    key_cache, value_cache = call["key_cache"], call["value_cache"]
    gap = key_cache[..., :1].expand(*key_cache.shape[:-1], 3)
    pool = torch.cat([key_cache, gap, value_cache], dim=-1)
    size = key_cache.shape[-1]
    return {**call, "key_cache": pool[..., :size], "value_cache": pool[..., size + 3 :]}


def padded(x: Tensor) -> Tensor:
    """The same elements in memory with room after every axis but the last, and before the first element."""
    room = torch.nn.functional.pad(x.view(torch.uint8), (0, 0, *[0, 1] * (x.dim() - 1)))
    room = torch.cat([room[:1], room]).view(x.dtype)
    return room[1:][tuple(slice(n) for n in x.shape)]


def every_other_block(call: Call) -> Call:
    return {**call, **{name: call[name].repeat_interleave(2, dim=0)[::2] for name in CACHES}}


@EVERY_DTYPE
def test_fused_projection_read_through_views(dtype: torch.dtype) -> None:
    call = token_call(dtype, torch.int32, bits.generator(0), sizes=SIZES, heads=HEADS)
    buffer = bits.poison((7, 6 + HEADS * sum(SIZES)), dtype, bits.generator(1))
    key = buffer[:, 5 : 5 + HEADS * SIZES[0]].unflatten(1, (HEADS, SIZES[0]))
    value = buffer[:, 6 + HEADS * SIZES[0] :].unflatten(1, (HEADS, SIZES[1]))
    assert_scatters(ascend.scatter_pa_kv_cache, {**call, "key": key, "value": value})


@EVERY_DTYPE
def test_fused_projection_read_through_strides(dtype: torch.dtype) -> None:
    call = token_call(dtype, torch.int32, bits.generator(2), sizes=SIZES, heads=HEADS)
    width = 6 + HEADS * sum(SIZES)
    memory = bits.poison((7 * width,), dtype, bits.generator(3))
    key = memory[: 7 * HEADS * SIZES[0]].view(7, HEADS, SIZES[0])
    value = memory[: 7 * HEADS * SIZES[1]].view(7, HEADS, SIZES[1])
    call |= {"scatter_mode": "Nct", "strides": (width, width), "offsets": (5, 6 + HEADS * SIZES[0])}
    assert_scatters(ascend.scatter_pa_kv_cache, {**call, "key": key, "value": value})


def test_views_and_strides_of_one_buffer_write_the_same() -> None:
    call = token_call(torch.float16, torch.int64, bits.generator(4), heads=2, sizes=(4, 4))
    buffer = bits.poison((7, 24), torch.float16, bits.generator(5))
    by_view, by_stride = fork(call), fork(call)
    by_view |= {"key": buffer[:, 8:16].unflatten(1, (2, 4)), "value": buffer[:, 16:].unflatten(1, (2, 4))}
    declared = buffer.flatten()[:56].view(7, 2, 4)
    by_stride |= {"key": declared, "value": declared}
    ascend.scatter_pa_kv_cache(**by_view)
    ascend.scatter_pa_kv_cache(**by_stride, scatter_mode="Nct", strides=(24, 24), offsets=(8, 16))
    for name in CACHES:
        bits.assert_same_bits(by_stride[name], by_view[name], name)


def test_each_tensor_has_its_own_stride_and_offset() -> None:
    call = fused_call(torch.int8, torch.int32, bits.generator(6), lengths=(40, 19))
    assert_scatters(ascend.scatter_pa_kv_cache, {**call, "offsets": (0, 10)})


def test_offsets_count_from_the_first_element_of_the_argument() -> None:
    call = keys_only(token_call(torch.float32, torch.int32, bits.generator(7), sizes=(4, 4), heads=1))
    memory = bits.poison((100,), torch.float32, bits.generator(8))
    call |= {
        "key": memory[20:48].view(7, 1, 4),
        "scatter_mode": "Nct",
        "strides": (12, 12),
        "offsets": (4, 4),
    }
    assert_scatters(ascend.scatter_pa_kv_cache, call)


def test_offsets_left_out_are_zero() -> None:
    call = fused_call(torch.float16, torch.int32, bits.generator(9))
    del call["offsets"]
    assert_scatters(ascend.scatter_pa_kv_cache, call)


def test_tokens_may_overlap_in_the_buffer() -> None:
    call = fused_call(torch.int16, torch.int32, bits.generator(9))
    assert_scatters(ascend.scatter_pa_kv_cache, {**call, "strides": (1, 2), "offsets": (3, 0)})


def test_the_last_token_may_end_with_the_buffer() -> None:
    call = fused_call(torch.float16, torch.int32, bits.generator(10))
    width = call["strides"]
    ends = tuple(n - HEADS * size for n, size in zip(width, SIZES, strict=True))
    assert_scatters(ascend.scatter_pa_kv_cache, {**call, "offsets": ends})


@pytest.mark.parametrize("mode", ["Nct", "None"])
def test_without_strides_the_view_tells_them(mode: str) -> None:
    call = token_call(torch.bfloat16, torch.int32, bits.generator(11))
    call["key"] = call["key"].repeat_interleave(2, dim=0)[::2]
    call["value"] = padded(call["value"])
    assert_scatters(ascend.scatter_pa_kv_cache, {**call, "scatter_mode": mode})


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("rule", ["Alibi", "Rope", "Omni"])
def test_compressed_sources_may_be_transposed(rule: str, dims: int) -> None:
    call = plan_call(standard_plan(rule), dims, torch.float16, torch.int32, bits.generator(12))
    for name in ("key", "value"):
        call[name] = call[name].transpose(-3, -1).contiguous().transpose(-3, -1)
    assert_scatters(ascend.scatter_pa_kv_cache, call)


def test_expanded_keys_are_read_once_for_every_head() -> None:
    call = token_call(torch.float32, torch.int32, bits.generator(13))
    call["key"] = call["key"][:, :1].expand(-1, HEADS, -1)
    assert_scatters(ascend.scatter_pa_kv_cache, call)


@EVERY_DTYPE
@pytest.mark.parametrize("pool", [interleaved, side_by_side, every_other_block], ids=lambda f: f.__name__)
def test_caches_may_be_views_of_a_pool(pool: Pool, dtype: torch.dtype) -> None:
    rng = bits.generator(14)
    call = token_call(dtype, torch.int32, rng, sizes=(4, 4))
    assert_scatters(ascend.scatter_pa_kv_cache, pool(call))


@pytest.mark.parametrize("pool", [interleaved, side_by_side, every_other_block], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("rule", ["Alibi", "Rope", "Omni"])
def test_compressed_caches_may_be_views_of_a_pool(rule: str, dims: int, pool: Pool) -> None:
    call = plan_call(standard_plan(rule), dims, torch.bfloat16, torch.int64, bits.generator(15), sizes=(4, 4))
    assert_scatters(ascend.scatter_pa_kv_cache, pool(call))


@pytest.mark.parametrize("pool", [every_other_block, side_by_side], ids=lambda f: f.__name__)
def test_head_wise_caches_may_be_views_of_a_pool(pool: Pool) -> None:
    call = nhsd_call(torch.float32, torch.int32, bits.generator(16))
    assert_scatters(ascend.scatter_pa_kv_cache, pool(call))


@pytest.mark.parametrize("rank", [4, 5])
def test_fractal_caches_may_be_views_of_a_pool(rank: int) -> None:
    call = nz_call((torch.float16, torch.float16), torch.int32, bits.generator(17), rank=rank)
    call |= {"value": call["value"][..., :16], "value_cache": call["key_cache"].clone()}
    assert_scatters(ascend.scatter_pa_kv_cache, interleaved(call))
    assert_scatters(ascend.scatter_pa_kv_cache, every_other_block(call))


@pytest.mark.parametrize("layout", ["Norm", "NHSD", "PA_NZ", "Rope"])
def test_caches_may_have_room_after_every_axis(layout: str) -> None:
    rng, kinds = bits.generator(18), (torch.float16, torch.int32)
    call = {
        "Norm": lambda: token_call(*kinds, rng),
        "NHSD": lambda: nhsd_call(*kinds, rng),
        "PA_NZ": lambda: nz_call((torch.float16, torch.float16), torch.int32, rng),
        "Rope": lambda: plan_call(standard_plan("Rope"), 3, *kinds, rng),
    }[layout]()
    assert_scatters(ascend.scatter_pa_kv_cache, {**call, **{name: padded(call[name]) for name in CACHES}})


def test_head_wise_memory_may_be_passed_as_a_norm_cache() -> None:
    call = token_call(torch.bfloat16, torch.int32, bits.generator(19))
    for name in CACHES:
        call[name] = call[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert_scatters(ascend.scatter_pa_kv_cache, call)


@pytest.mark.parametrize("name", ["slot_mapping", "compress_lens", "compress_seq_offset", "seq_lens"])
def test_index_tensors_may_be_strided(name: str) -> None:
    call = plan_call(standard_plan("Rope"), 3, torch.float32, torch.int64, bits.generator(20))
    call[name] = call[name].repeat_interleave(3, dim=0)[::3]
    assert_scatters(ascend.scatter_pa_kv_cache, call)
