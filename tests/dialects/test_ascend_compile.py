"""Ascend operators among others inside ``torch.compile(fullgraph=True)``, and Nct's place in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import assert_same_memory, fork, fused_call
from oracles.pmx_cases import Call
from torch import Tensor

from kvloom.conform.oracles import ascend as ascend_golden
from kvloom.dialects import ascend
from kvloom.dialects.ascend import torch_npu
from kvloom.dialects.ascend.nct import collect
from kvloom.errors import ArgumentError

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_scatter_between_other_operators() -> None:
    def step(x: Tensor, call: Call) -> Tensor:
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


def test_nct_of_other_lengths_and_places_in_one_graph() -> None:
    """A tensor's place in its memory is no part of what a compiler knows: it must not be remembered."""
    memory = torch.randn(200)

    def call(key: Tensor, cache: Tensor, slots: Tensor) -> None:
        ascend.scatter_pa_kv_cache(
            key, None, cache, None, slots, scatter_mode="Nct", strides=(9, 9), offsets=(3, 3)
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for tokens, start in ((7, 20), (6, 20), (6, 16), (7, 0), (3, 0)):
        key = memory[start : start + 4 * tokens].view(tokens, 1, 4)
        expected, actual = torch.zeros(2, 4, 1, 4), torch.zeros(2, 4, 1, 4)
        call(key, expected, torch.arange(tokens))
        compiled(key, actual, torch.arange(tokens))
        bits.assert_same_bits(actual, expected, "cache")


def test_compiled_nct_stays_within_the_memory() -> None:
    call = fused_call(torch.float16, torch.int64, bits.generator(0))
    compiled = torch.compile(ascend.scatter_pa_kv_cache, fullgraph=True, backend="aot_eager")
    after = fork(call) | {"strides": (24, 28)}
    with pytest.raises(
        ArgumentError, match="strides and offsets must stay within the 189 elements after value"
    ):
        compiled(**after)
    assert_same_memory(after, {**call, "strides": (24, 28)})


def test_nct_operator_keeps_its_contract() -> None:
    torch.library.opcheck(collect, (torch.randn(3, 2, 4), 5, 2, "key"))
