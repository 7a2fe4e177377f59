"""Keys without values, in every spelling of a value that is not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import (
    CACHES,
    assert_same_memory,
    fork,
    fused_call,
    gather_call,
    keys_only,
    nhsd_call,
    nz_call,
    plan_call,
    settle,
    standard_plan,
    token_call,
)
from oracles.pmx_cases import Call
from torch import Tensor

from kvloom.conform.oracles import ascend as ascend_golden
from kvloom.dialects import ascend
from kvloom.dialects.ascend import torch_npu
from kvloom.errors import KVError

KINDS = (torch.float16, torch.int64)
ABSENT = pytest.mark.parametrize(
    "absent",
    [None, torch.empty(0), torch.tensor([], dtype=torch.int8), torch.tensor(0.0)],
    ids=["None", "[]", "[] of int8", "0-dim"],
)
SCATTERS: dict[str, Callable[[torch.Generator], Call]] = {
    "1": lambda r: nz_call((torch.float16, torch.float16), torch.int64, r),
    "3": lambda r: plan_call(standard_plan("Rope"), 4, *KINDS, r, scatter_mode="None"),
    "4": lambda r: plan_call(standard_plan("Alibi"), 3, *KINDS, r),
    "5": lambda r: plan_call(standard_plan("Omni"), 3, *KINDS, r),
    "6": lambda r: token_call(*KINDS, r),
    "6 Nct": lambda r: fused_call(*KINDS, r),
    "7": lambda r: nhsd_call(*KINDS, r),
}


@ABSENT
@pytest.mark.parametrize("scenario", SCATTERS)
def test_scatter(scenario: str, absent: Tensor | None) -> None:
    call = SCATTERS[scenario](bits.generator(0))
    expected, actual = keys_only(fork(call)), keys_only(fork(call), absent)
    averaged = ascend_golden.scatter_pa_kv_cache(**expected)
    ascend.scatter_pa_kv_cache(**actual)
    settle(actual["key_cache"], expected["key_cache"], averaged)
    assert_same_memory({**actual, "value": None, "value_cache": None}, expected)


@ABSENT
@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
def test_gather_reads_back_what_has_no_values(mode: str, absent: Tensor | None) -> None:
    call = gather_call(*KINDS, bits.generator(0), cache_mode=mode)
    expected, actual = fork(call), keys_only(fork(call), absent)
    ascend_golden.gather_pa_kv_cache(**expected)
    ascend.gather_pa_kv_cache(**actual)
    for name in ("key", "key_cache"):
        bits.assert_same_bits(actual[name], expected[name], name)


@ABSENT
def test_torch_npu(absent: Tensor | None) -> None:
    call = {**token_call(*KINDS, bits.generator(0)), "cache_mode": "Norm"}
    expected = keys_only(fork(call))
    ascend_golden.scatter_pa_kv_cache(**expected)
    written, returned = fork(call), keys_only(fork(call), absent)
    torch_npu.npu_scatter_pa_kv_cache(**keys_only(written, absent))
    bits.assert_same_bits(written["key_cache"], expected["key_cache"], "key_cache")
    key_cache, _ = torch_npu.npu_scatter_pa_kv_cache_functional(**returned)
    bits.assert_same_bits(key_cache, expected["key_cache"], "key_cache")
    bits.assert_same_bits(returned["key_cache"], call["key_cache"], "key_cache")

    read = gather_call(*KINDS, bits.generator(0))
    del read["cache_mode"]
    expected = fork(read)
    ascend_golden.gather_pa_kv_cache(**expected)
    key, _ = torch_npu.npu_gather_pa_kv_cache_functional(**keys_only(fork(read), absent))
    bits.assert_same_bits(key, expected["key"], "key")
    torch_npu.npu_gather_pa_kv_cache(**keys_only(read, absent))
    bits.assert_same_bits(read["key"], expected["key"], "key")


@ABSENT
@pytest.mark.parametrize("name", ["value", "value_cache"])
@pytest.mark.parametrize("operator", ["scatter", "gather"])
def test_one_of_the_two_is_refused(operator: str, name: str, absent: Tensor | None) -> None:
    make, run = {
        "scatter": (token_call, ascend.scatter_pa_kv_cache),
        "gather": (gather_call, ascend.gather_pa_kv_cache),
    }[operator]
    call = make(*KINDS, bits.generator(0))
    after = {**fork(call), name: absent}
    with pytest.raises(KVError, match=name):
        run(**after)
    kept = {key: call[key] for key in ("key", "value", *CACHES) if key != name}
    assert_same_memory(after, kept)
