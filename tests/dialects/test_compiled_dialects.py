"""Every public function of the dialects inside ``torch.compile(fullgraph=True)``, in each of its modes.

Eager calls are compared with the documents elsewhere; here compiled ones are compared with eager ones.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from campaign import is_whole
from oracles import bits
from oracles.ascend_cases import (
    assert_same_memory,
    fork,
    fused_call,
    gather_call,
    keys_only,
    nhsd_call,
    nz_call,
    plan_call,
    standard_plan,
    token_call,
)
from oracles.pairs import in_turn, pairwise
from oracles.pmx_attention import unfused_call
from oracles.pmx_cases import (
    Call,
    Numerics,
    attention_call,
    dynamic_call,
    quantized_numerics,
    random_batch,
    static_call,
)
from oracles.recurrent_cases import Sizes, linear_call
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import ascend, onnx, pmx
from kvloom.dialects.ascend import torch_npu
from kvloom.dialects.pmx import static

pytestmark = pytest.mark.compile

F16, I64 = torch.float16, torch.int64
Case = tuple[Callable[..., object], Callable[[torch.Generator], Call]]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    # Lengths of some results are values of tensors. Not by monkeypatch, which leaves the setting deleted.
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield
    torch.compiler.reset()


def scatters() -> dict[str, Callable[[torch.Generator], Call]]:
    """Every scenario of ScatterPaKvCache, in every spelling of absent values and of Nct."""
    tokens = {
        "1 PA_NZ": lambda r: nz_call((F16, F16), I64, r),
        "1 PA_NZ 5-D": lambda r: nz_call((F16, F16), I64, r, rank=5),
        "1 PA_NZ two dtypes": lambda r: nz_call((torch.int8, F16), I64, r),
        "1 PA_NZ keys only": lambda r: keys_only(nz_call((F16, F16), I64, r)),
        "2 Norm": lambda r: token_call(F16, I64, r),
        "2 Nct by views": lambda r: {**token_call(F16, I64, r), "scatter_mode": "Nct"},
        "2 Nct": lambda r: fused_call(F16, I64, r),
        "2 Nct strides only": lambda r: {**fused_call(torch.uint16, I64, r), "offsets": None},
        "2 Nct offsets only": lambda r: {**fused_call(torch.float8_e5m2, I64, r), "strides": None},
        "2 Nct behind others": lambda r: behind_others(fused_call(F16, I64, r)),
        "6 keys only": lambda r: keys_only(token_call(F16, I64, r)),
        "6 Nct": lambda r: keys_only(fused_call(F16, I64, r)),
        "6 empty": lambda r: keys_only(token_call(F16, I64, r), absent=torch.empty(0)),
        "7 NHSD": lambda r: nhsd_call(F16, I64, r),
    }  # fmt: skip
    runs = {
        f"{'3' if dims == 4 else '4' if rule == 'Alibi' else '5'} {rule} {dims}-D": (
            lambda r, rule=rule, dims=dims: plan_call(standard_plan(rule), dims, F16, I64, r)
        )
        for rule, dims in (("Alibi", 4), ("Alibi", 3), ("Rope", 3), ("Omni", 4))
    }
    implied = {
        "3 Rope implied": lambda r: plan_call(standard_plan("Rope"), 4, F16, I64, r, scatter_mode="None")
    }
    return {**tokens, **runs, **implied}


def behind_others(call: Call) -> Call:
    """The same memory, declared from its 7th element on."""
    for name in ("key", "value"):
        x: Tensor = call[name]
        call[name] = x.as_strided(x.shape, x.stride(), 7)
    return {**call, "offsets": (0, 2), "strides": (23, 26)}


def gathers() -> dict[str, Callable[[torch.Generator], Call]]:
    modes = (("Norm", False), ("PA_NZ", True))
    plain = {
        f"{mode}{' cumulative' if cumulative else ''}": (
            lambda r, mode=mode, cumulative=cumulative: gather_call(
                F16, I64, r, cache_mode=mode, cumulative=cumulative
            )
        )
        for mode, cumulative in modes
    }
    return {
        **plain,
        "offset": lambda r: {**gather_call(F16, I64, r), "seq_offset": torch.tensor([4, 0, 2**63 - 1])},
        "keys only": lambda r: keys_only(gather_call(F16, I64, r)),
    }


def of_npu(call: Call) -> Call:
    """The arguments that torch_npu's functions have."""
    names = {"compress_seq_offset": "compress_seq_offsets", "scatter_mode": None}
    return {names.get(name, name): x for name, x in call.items() if names.get(name, name) is not None}


def without(call: Call, *names: str) -> Call:
    return {name: x for name, x in call.items() if name not in names}


NUMERICS = {
    "float": Numerics(torch.float32, F16),
    "int8": quantized_numerics(torch.float32, 8, (8,))[0],
    "int4": quantized_numerics(torch.float32, 4, (8,))[0],
}
FORMS = ("offset", "page", "token")


def ragged(form: str) -> Any:
    return random_batch(form, 3, (1, 3, 0, 2), (4, 0, 2, 1), random.Random(0))


def dynamic(form: str, how: Numerics, layout: int, rng: torch.Generator) -> Call:
    axes = pmx_golden.DYNAMIC_AXES[layout]
    return {**dynamic_call(ragged(form), how, axes, rng), "cache_layout": layout, "num_repeat": 2}


def unfused(rng: torch.Generator, **more: Any) -> Call:
    call = attention_call(ragged("page"), NUMERICS["float"], rng, ratio=2, decoding_batches=1, **more)
    stored = int(call["kvstarts"][-1])
    key, value = torch.randn(2, stored, 2, 16, generator=rng).unbind()
    return unfused_call(call, key, value)


def cases() -> Iterator[tuple[str, Case]]:
    for name, make in scatters().items():
        yield f"scatter_pa_kv_cache {name}", (ascend.scatter_pa_kv_cache, make)
    for name, make in gathers().items():
        yield f"gather_pa_kv_cache {name}", (ascend.gather_pa_kv_cache, make)
    lens, win, off = torch.tensor([5, 4]), torch.tensor([[2, 1], [0, 3]]), torch.tensor([[1, -1], [0, 1]])
    for rule in ("Alibi", "Rope", "Omni"):
        more = {} if rule == "Alibi" else {"compress_seq_offset": off}
        given = {"scatter_mode": rule, "seq_lens": lens, "compress_lens": win, **more}
        yield f"run_lengths {rule}", (ascend.run_lengths, lambda r, given=given: dict(given))
    yield "plan_slots", (ascend.plan_slots, lambda r: {"lengths": win, "block_size": 4, "start": 3})
    table = {"block_table": torch.tensor([[2, 0], [1, 3]]), "block_size": 4}
    where = {"positions_start": torch.tensor([1, 2]), "lengths": torch.tensor([5, 3])}
    yield "slot_mapping", (ascend.slot_mapping, lambda r: table | where)
    yield "nd_to_nz", (ascend.nd_to_nz, lambda r: {"cache": bits.poison((3, 5, 2, 16), F16, r)})
    fractal = {"num_heads": 2}
    yield "nz_to_nd", (ascend.nz_to_nd, lambda r: {"cache": bits.poison((3, 4, 5, 16), F16, r), **fractal})

    rope = lambda r: plan_call(standard_plan("Rope"), 4, F16, I64, r, scatter_mode=None)  # noqa: E731
    norm = lambda r: {**of_npu(rope(r)), "cache_mode": "Norm"}  # noqa: E731
    nz = lambda r: nz_call((F16, F16), I64, r)  # noqa: E731
    yield "npu_scatter_pa_kv_cache Norm", (torch_npu.npu_scatter_pa_kv_cache, norm)
    yield "npu_scatter_pa_kv_cache_functional PA_NZ", (torch_npu.npu_scatter_pa_kv_cache_functional, nz)
    keys = lambda r: without(token_call(F16, I64, r), "value", "value_cache")  # noqa: E731
    yield "npu_scatter_pa_cache", (torch_npu.npu_scatter_pa_cache, keys)
    for name, mode in (("npu_gather_pa_kv_cache", "PA_NZ"), ("npu_gather_pa_kv_cache_functional", "Norm")):
        yield (
            f"{name} {mode}",
            (
                getattr(torch_npu, name),
                lambda r, mode=mode: without(gather_call(F16, I64, r, cache_mode=mode), "cache_mode"),
            ),
        )

    for (name, how), layout in in_turn([*NUMERICS.items()], (0, 1)):
        yield (
            f"key_value_cache {name} {layout}",
            (
                pmx.key_value_cache,
                lambda r, how=how, layout=layout: static_call(how, layout, 2, r),
            ),
        )
    stored, attended = "key_value_cache", "multi_head_cache_attention"
    for (name, how), (i, form), which in pairwise(
        [*NUMERICS.items()], [*enumerate(FORMS)], (stored, attended)
    ):
        make = {
            stored: lambda r, how=how, form=form, i=i: dynamic(form, how, i, r),
            attended: lambda r, how=how, form=form, i=i: attention_call(
                ragged(form), how, r, layout=i + 1, ratio=2, decoding_batches=1
            ),
        }[which]
        yield f"dynamic_batching.{which} {name} {form}", (getattr(pmx.dynamic_batching, which), make)
    for name, more in {"causal": {}, "alibi": {"is_alibi": True}, "free": {"is_causal": False},
                       "mask": {"attn_mask": torch.randn(6, 13)}}.items():  # fmt: skip
        yield (
            f"dynamic_batching.multi_head_attention {name}",
            (
                pmx.dynamic_batching.multi_head_attention,
                lambda r, more=more: unfused(r, **more),
            ),
        )
    for rule in ("linear", "gated", "delta", "gated_delta"):
        yield (
            f"linear_attention {rule}",
            (onnx.linear_attention, lambda r, rule=rule: linear_call(rule, r, Sizes(T=6), chunk_size=4)),
        )
    conv = {"input": torch.randn(2, 3, 5), "weight": torch.randn(3, 1, 4), "bias": torch.randn(3)}
    for activation in ("silu", "none"):
        more = {"past_state": torch.randn(2, 3, 3), "activation": activation}
        yield (
            f"causal_conv_with_state {activation}",
            (onnx.causal_conv_with_state, lambda r, more=more: {**conv, **more}),
        )


SPELLINGS = {
    f"scatter_pa_kv_cache {name}"
    for name in (
        "1 PA_NZ 5-D", "1 PA_NZ two dtypes", "2 Nct by views", "2 Nct strides only", "2 Nct offsets only",
        "6 Nct", "6 empty", "4 Alibi 3-D", "3 Rope implied",
    )
}  # fmt: skip
"""Others of a mode that is compiled anyway: ``--campaign`` has them."""
SKIPPED = SPELLINGS if not is_whole() else set()
CASES = {name: case for name, case in cases() if name not in SKIPPED}


@pytest.mark.parametrize("name", CASES)
def test_compiled_is_eager(name: str) -> None:
    function, make = CASES[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    call = make(bits.generator(0))
    eager, other = fork(call), fork(call)
    expected, actual = function(**eager), compiled(**other)
    assert_same_results(actual, expected)
    assert_same_memory(other, eager)


def assert_same_results(actual: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for mine, theirs in zip(actual, expected, strict=True):
            assert_same_results(mine, theirs)
    elif isinstance(expected, Tensor):
        bits.assert_same_bits(actual, expected, "result")
    else:
        assert actual == expected


def test_every_public_function_is_compiled() -> None:
    public = {*ascend.__all__, *functions_of(torch_npu), *functions_of(static), *onnx.__all__}
    public |= {f"dynamic_batching.{name}" for name in functions_of(pmx.dynamic_batching)}
    assert {name.split()[0] for name in CASES} == public


def functions_of(module: ModuleType) -> list[str]:
    """Public functions that are written there."""
    own = inspect.getmembers(module, lambda x: inspect.isfunction(x) and x.__module__ == module.__name__)
    return [name for name, _ in own if not name.startswith("_")]
