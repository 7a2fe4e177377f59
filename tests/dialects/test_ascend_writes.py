"""Both sides are written or none: what would refuse the second write is found before the first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import assert_gathers, assert_same_memory, fork, gather_call, nz_call, token_call
from oracles.pmx_cases import Call
from oracles.rejection import Bad, assert_refused, rows
from torch import Tensor

from kvloom.dialects import ascend
from kvloom.errors import ArgumentError, KVError, ShapeError

KINDS = (torch.float16, torch.int64)


def gathered(mode: str = "Norm") -> Call:
    return gather_call(*KINDS, bits.generator(0), cache_mode=mode)


def in_memory_of(name: str, other: str) -> Callable[[Call], Call]:
    """``name`` in the memory of ``other``."""

    def change(call: Call) -> Call:
        shape = call[name].shape
        call[other] = torch.cat([call[other].flatten(), call[name].flatten()])[: call[other].numel()].view(
            call[other].shape
        )
        return {name: call[other].flatten()[: shape.numel()].view(shape), other: call[other]}

    return change


def loosened(name: str) -> Callable[[Call], Call]:
    """Rows of heads that lie apart, so that no view of them is one row."""
    return lambda call: {name: torch.nn.functional.pad(call[name], (0, 3))[..., : call[name].shape[-1]]}


GATHERS = [
    Bad("value on another device", "value", lambda c: {"value": c["value"].to("meta")}),
    Bad("value_cache on another device", "value_cache", lambda c: {
        "value_cache": c["value_cache"].to("meta")}),
    Bad("value and its cache on another device", "value|value_cache", lambda c: {
        name: c[name].to("meta") for name in ("value", "value_cache")}),
    Bad("value of another dtype", "value", lambda c: {"value": c["value"].float()}),
    Bad("value of another length", "value", lambda c: {"value": c["value"][:-1]}),
    Bad("value that overlaps itself", "value", lambda c: {"value": c["value"][:1].expand_as(c["value"])}),
    Bad("value in its cache", "value|value_cache", in_memory_of("value", "value_cache")),
    Bad("value in the cache of keys", "value|key_cache", in_memory_of("value", "key_cache")),
    Bad("key in its cache", "key|key_cache", in_memory_of("key", "key_cache")),
]  # fmt: skip


@rows(GATHERS)
def test_gather(bad: Bad) -> None:
    call = gather_call(*KINDS, bits.generator(0), num_blocks=40)
    assert_refused(ascend.gather_pa_kv_cache, call, bad, ShapeError)


@pytest.mark.parametrize("name", ["key", "value"])
def test_gather_of_pieces_into_rows_that_are_none(name: str) -> None:
    assert_refused(ascend.gather_pa_kv_cache, gathered("PA_NZ"), Bad("", name, loosened(name)), ShapeError)


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
def test_gather_from_caches_that_require_a_gradient(mode: str) -> None:
    def gather(**call: Tensor) -> None:
        for name in ("key_cache", "value_cache"):
            call[name].requires_grad_()
        ascend.gather_pa_kv_cache(**call)
        for name in ("key_cache", "value_cache"):
            call[name].requires_grad_(False)

    assert_gathers(gather, gathered(mode))


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
@pytest.mark.parametrize("name", ["key", "value"])
def test_gather_into_what_requires_a_gradient(name: str, mode: str) -> None:
    """As torch refuses to write a leaf in place."""
    call = gathered(mode)
    before = {side: call[side].clone() for side in ("key", "value")}
    call[name].requires_grad_()
    with pytest.raises(ArgumentError, match=rf"^{name} must not require a gradient"):
        ascend.gather_pa_kv_cache(**call)
    for side, x in before.items():
        bits.assert_same_bits(call[side].detach(), x, side)


def test_gather_into_an_inference_tensor() -> None:
    call = gathered()
    with torch.inference_mode():
        call["value"] = call["value"].clone()
    assert_gathers(ascend.gather_pa_kv_cache, call)


def nct_over(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> Call:
    """A call whose tokens begin before a cache in one memory and go on into it."""
    call = token_call(dtypes[0], torch.int64, bits.generator(0), heads=2, sizes=(16, 16))
    cache = call[f"{name}_cache"]
    memory = bits.poison((7 * 32 + cache.numel(),), cache.dtype, bits.generator(1))
    call |= {name: memory[: 7 * 32].view(7, 2, 16), f"{name}_cache": memory[7 * 32 :].view(cache.shape)}
    return {**call, "scatter_mode": "Nct", "strides": (32, 32), "offsets": (0, 0)}


@pytest.mark.parametrize("name", ["key", "value"])
def test_tokens_of_nct_may_end_where_their_cache_begins_but_not_reach_into_it(name: str) -> None:
    call = nct_over(name, (torch.float16, torch.float16))
    ascend.scatter_pa_kv_cache(**fork(call))
    offsets = (1, 0) if name == "key" else (0, 1)
    after = fork(call) | {"offsets": offsets}
    with pytest.raises(KVError, match=rf"\b{name} must not overlap {name}_cache"):
        ascend.scatter_pa_kv_cache(**after)
    assert_same_memory(after, {**call, "offsets": offsets})


@pytest.mark.parametrize("dtypes", [(torch.int8, torch.int8), (torch.int8, torch.float16)], ids=str)
def test_values_in_their_cache_keep_keys_from_being_written(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    call = nz_call(dtypes, torch.int64, bits.generator(0))
    bad = Bad("value in its cache", "value", in_memory_of("value", "value_cache"))
    assert_refused(ascend.scatter_pa_kv_cache, call, bad, ShapeError)
