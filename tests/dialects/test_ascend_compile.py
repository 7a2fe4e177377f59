"""Ascend operators inside ``torch.compile(fullgraph=True)``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracles import ascend_golden, bits
from oracles.ascend_cases import (
    assert_gathers,
    assert_scatters,
    gather_call,
    keys_only,
    nz_call,
    plan_call,
    standard_plan,
    token_call,
)
from oracles.pmx_cases import Call

from kvloom.dialects import ascend
from kvloom.dialects.ascend import torch_npu


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


SCATTERS = {
    "2": lambda rng: token_call(torch.float16, torch.int32, rng),
    "6": lambda rng: keys_only(token_call(torch.uint16, torch.int64, rng)),
    "1 fractal": lambda rng: nz_call((torch.float8_e5m2, torch.float8_e5m2), torch.int32, rng),
    "1 fractal of two dtypes": lambda rng: nz_call((torch.int8, torch.float16), torch.int64, rng),
    "3": lambda rng: plan_call(
        standard_plan("Rope"), 4, torch.float16, torch.int64, rng, scatter_mode="None"
    ),
    "4": lambda rng: plan_call(standard_plan("Alibi"), 3, torch.int8, torch.int32, rng),
    "5 Rope": lambda rng: plan_call(standard_plan("Rope"), 3, torch.bfloat16, torch.int32, rng),
    "5 Omni": lambda rng: plan_call(standard_plan("Omni"), 3, torch.float32, torch.int32, rng),
}


@pytest.mark.parametrize("scenario", SCATTERS)
def test_compiled_scatter_matches_the_golden(scenario: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(**call: object) -> None:
        ascend.scatter_pa_kv_cache(**call)

    for seed in range(2):
        assert_scatters(compiled, SCATTERS[scenario](bits.generator(seed)))


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
def test_compiled_gather_matches_the_golden(mode: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(**call: object) -> None:
        ascend.gather_pa_kv_cache(**call)

    assert_gathers(compiled, gather_call(torch.bfloat16, torch.int32, bits.generator(0), cache_mode=mode))


def test_scatter_between_other_operators() -> None:
    def step(x: torch.Tensor, call: Call) -> torch.Tensor:
        key, value = x * 2, x + 1
        torch_npu.npu_scatter_pa_kv_cache(key, value, **call, cache_mode="Norm")
        return call["key_cache"].sum() + call["value_cache"].sum()

    slots = torch.tensor([5, -1, 2], dtype=torch.int32)
    caches = {name: torch.zeros(2, 4, 2, 4) for name in ("key_cache", "value_cache")}
    x = torch.arange(24.0).reshape(3, 2, 4)
    total = torch.compile(step, fullgraph=True, backend="aot_eager")(x, {**caches, "slot_mapping": slots})
    expected = {name: torch.zeros_like(cache) for name, cache in caches.items()}
    ascend_golden.scatter_pa_kv_cache(x * 2, x + 1, **expected, slot_mapping=slots)
    for name, cache in caches.items():
        bits.assert_same_bits(cache, expected[name], name)
    assert total == sum(cache.sum() for cache in expected.values())
