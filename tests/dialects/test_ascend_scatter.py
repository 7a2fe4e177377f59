"""``scatter_pa_kv_cache``: every scenario in every dtype against the golden, whole storages bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import (
    CACHES,
    DTYPES,
    INDICES,
    assert_scatters,
    dtype_id,
    fused_call,
    keys_only,
    nhsd_call,
    nz_call,
    plan_call,
    standard_plan,
    token_call,
)
from oracles.pairs import pairwise
from oracles.pmx_cases import Call
from torch import Generator

from kvloom.dialects import ascend

Build = Callable[[torch.dtype, torch.dtype, Generator], Call]


def fractal(rank: int, dtype: torch.dtype, index: torch.dtype, rng: Generator) -> Call:
    return nz_call((dtype, dtype), index, rng, rank=rank)


def compressed(
    rule: str, dims: int, mode: str, dtype: torch.dtype, index: torch.dtype, rng: Generator
) -> Call:
    return plan_call(standard_plan(rule), dims, dtype, index, rng, scatter_mode=mode)


SCENARIOS: dict[str, Build] = {
    "1 fractal": partial(fractal, 4),
    "1 fractal of rank 5": partial(fractal, 5),
    "1 fractal keys only": lambda *a: keys_only(fractal(4, *a)),
    "2": token_call,
    "2 Nct": fused_call,
    "3 with offset": partial(compressed, "Rope", 4, "None"),
    "3 without offset": partial(compressed, "Alibi", 4, "None"),
    "3 Rope": partial(compressed, "Rope", 4, "Rope"),
    "3 Alibi": partial(compressed, "Alibi", 4, "Alibi"),
    "3 Omni": partial(compressed, "Omni", 4, "Omni"),
    "4": partial(compressed, "Alibi", 3, "Alibi"),
    "5 Rope": partial(compressed, "Rope", 3, "Rope"),
    "5 Omni": partial(compressed, "Omni", 3, "Omni"),
    "6": lambda *a: keys_only(token_call(*a)),
    "6 Nct": lambda *a: keys_only(fused_call(*a)),
    "7 NHSD": nhsd_call,
}


@pytest.mark.parametrize(
    ("scenario", "dtype", "index"), pairwise([*SCENARIOS], DTYPES, INDICES), ids=dtype_id
)
def test_every_scenario_matches_the_golden(scenario: str, dtype: torch.dtype, index: torch.dtype) -> None:
    for seed in range(2):
        assert_scatters(ascend.scatter_pa_kv_cache, SCENARIOS[scenario](dtype, index, bits.generator(seed)))


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.int8, torch.float16),
        (torch.float16, torch.int8),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.uint8, torch.float32),
    ],
    ids=lambda pair: f"{dtype_id(pair[0])}-{dtype_id(pair[1])}",
)
@pytest.mark.parametrize("rank", [4, 5])
def test_fractal_keys_and_values_may_differ_in_dtype(
    dtypes: tuple[torch.dtype, torch.dtype], rank: int
) -> None:
    assert_scatters(ascend.scatter_pa_kv_cache, nz_call(dtypes, torch.int32, bits.generator(1), rank=rank))


def test_fractal_pieces_may_hold_several_heads() -> None:
    rng = bits.generator(2)
    call = nz_call((torch.float16, torch.float16), torch.int64, rng)
    call |= {name: bits.poison((7, 8, size), torch.float16, rng) for name, size in (("key", 4), ("value", 8))}
    assert_scatters(ascend.scatter_pa_kv_cache, call)


@pytest.mark.parametrize("absent", ["", None])
@pytest.mark.parametrize("scenario", ["2", "3 with offset", "3 without offset", "6"])
def test_absent_modes_mean_norm_and_none(scenario: str, absent: str | None) -> None:
    call = SCENARIOS[scenario](torch.float16, torch.int32, bits.generator(3))
    assert_scatters(ascend.scatter_pa_kv_cache, {**call, "cache_mode": absent, "scatter_mode": absent})


def test_absent_scatter_mode_of_a_fractal_cache() -> None:
    call = fractal(4, torch.bfloat16, torch.int32, bits.generator(3))
    assert_scatters(ascend.scatter_pa_kv_cache, {**call, "scatter_mode": None})


def test_value_of_rank_0_means_keys_only() -> None:
    for scenario in ("2", "2 Nct", "1 fractal"):
        call = SCENARIOS[scenario](torch.float16, torch.int64, bits.generator(4))
        nothing = {name: torch.empty((), dtype=torch.float16) for name in ("value", "value_cache")}
        actual, expected = {**call, **nothing}, keys_only(call)
        actual["key_cache"], expected["key_cache"] = call["key_cache"].clone(), call["key_cache"].clone()
        ascend.scatter_pa_kv_cache(**actual)
        ascend.scatter_pa_kv_cache(**expected)
        bits.assert_same_bits(actual["key_cache"], expected["key_cache"], scenario)


@pytest.mark.parametrize("shape", [(-1,), (4, 3)], ids=["flat", "square"])
@pytest.mark.parametrize("scenario", ["3 with offset", "3 without offset", "4", "5 Rope", "5 Omni"])
def test_run_arguments_may_be_flat_or_square(scenario: str, shape: tuple[int, ...]) -> None:
    call = SCENARIOS[scenario](torch.float32, torch.int32, bits.generator(5))
    for name in ("slot_mapping", "compress_lens", "compress_seq_offset"):
        if name in call:
            call[name] = call[name].reshape(shape)
    assert_scatters(ascend.scatter_pa_kv_cache, call)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 40), (7, 7), (33, 2)])
@pytest.mark.parametrize("scenario", ["tokens", "Rope", "Alibi"])
def test_any_head_sizes(scenario: str, sizes: tuple[int, int]) -> None:
    rng = bits.generator(6)
    if scenario == "tokens":
        call = token_call(torch.bfloat16, torch.int32, rng, sizes=sizes, heads=1)
    else:
        call = plan_call(standard_plan(scenario), 3, torch.bfloat16, torch.int32, rng, sizes=sizes)
    assert_scatters(ascend.scatter_pa_kv_cache, call)


@pytest.mark.parametrize("block_size", [1, 2, 7, 64])
@pytest.mark.parametrize("scenario", ["3 with offset", "4", "5 Omni"])
def test_runs_cross_blocks_of_any_size(scenario: str, block_size: int) -> None:
    rule = {"3 with offset": "Rope", "4": "Alibi", "5 Omni": "Omni"}[scenario]
    dims = 4 if scenario[0] == "3" else 3
    call = plan_call(
        standard_plan(rule), dims, torch.int16, torch.int64, bits.generator(7), block_size=block_size
    )
    assert_scatters(ascend.scatter_pa_kv_cache, call)


def test_not_a_number_keeps_its_payload_and_zero_its_sign() -> None:
    words = torch.tensor([0x7F800001, 0x7FC01234, -0x7FFFFF, -0x80000000], dtype=torch.int32)
    key = words.view(torch.float32).reshape(2, 1, 2)
    caches = [torch.zeros(1, 2, 1, 2) for _ in range(2)]
    ascend.scatter_pa_kv_cache(key, key, *caches, torch.tensor([1, 0]))
    for cache, name in zip(caches, CACHES, strict=True):
        bits.assert_same_bits(cache, key.flip(0).reshape(1, 2, 1, 2), name)


def test_signalling_nan_of_sixteen_bits_is_not_quietened() -> None:
    for dtype, word in ((torch.float16, 0x7C01), (torch.bfloat16, 0x7F81)):
        key = torch.tensor([word], dtype=torch.int16).view(dtype).reshape(1, 1, 1)
        cache = torch.zeros(1, 1, 1, 1, dtype=dtype)
        ascend.scatter_pa_kv_cache(key, None, cache, None, torch.tensor([0]))
        bits.assert_same_bits(cache.flatten(), key.flatten(), "key_cache")
