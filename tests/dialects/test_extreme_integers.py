"""Integers near the ends of int64, in every place of every index: right, or refused by name."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import (
    assert_same_memory,
    fork,
    fused_call,
    gather_call,
    golden_slot_mapping,
    keys_only,
    nz_call,
    plan_call,
    settle,
    standard_plan,
    token_call,
)
from oracles.pmx_attention import random_unfused_call
from oracles.pmx_cases import Call, Numerics, attention_call, dynamic_call, random_batch, static_call
from torch import Tensor

from kvloom.conform.oracles import ascend as ascend_golden
from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import ascend, pmx
from kvloom.errors import KVError

INT64, INT32 = torch.iinfo(torch.int64), torch.iinfo(torch.int32)
EXTREMES = (INT64.min, INT64.min + 1, -(2**62), INT32.min, INT32.max, 2**32, 2**62, 2**62 + 1,
            INT64.max - 2, INT64.max - 1, INT64.max)  # fmt: skip
BEYOND = (2**63, 2**64, 2**70, -(2**63) - 1, -(2**70))
KINDS = (torch.float16, torch.int64)
PLAIN = Numerics(torch.float32, torch.float32)

Make = Callable[[], Call]


def one_slot_blocks() -> Call:
    """Blocks of one slot, where a column is a position: the sum of two may be anything."""
    call = gather_call(*KINDS, bits.generator(0), block_size=1, num_blocks=7, seq_lens=(3, 0, 2),
                       tables=((4, 0, 2), (-1, -1, -1), (1, 5, 3)))  # fmt: skip
    return {**call, "seq_offset": torch.tensor([0, 1, 1])}


def gathered(**how: Any) -> Make:
    return lambda: gather_call(*KINDS, bits.generator(0), **how)


def ragged(form: str) -> Make:
    batch = random_batch(form, 3, (1, 3, 0), (4, 0, 2), random.Random(0))
    axes = pmx_golden.DYNAMIC_AXES[0]
    return lambda: {**dynamic_call(batch, PLAIN, axes, bits.generator(0)), "num_repeat": 2, "cache_layout": 0}


def attended(form: str) -> Make:
    batch = random_batch(form, 3, (1, 3, 0), (4, 0, 2), random.Random(0))
    return lambda: attention_call(batch, PLAIN, bits.generator(0), decoding_batches=1)


def helper(**call: Any) -> Make:
    return lambda: {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}


def scatter(scenario: str) -> Make:
    rng = bits.generator(0)
    return {
        "1": lambda: nz_call((torch.float16, torch.float16), torch.int64, rng),
        "2": lambda: token_call(*KINDS, rng),
        "2 Nct": lambda: fused_call(*KINDS, rng),
        "3 Rope": lambda: plan_call(standard_plan("Rope"), 4, *KINDS, rng, scatter_mode="None"),
        "4": lambda: plan_call(standard_plan("Alibi"), 3, *KINDS, rng),
        "5 Rope": lambda: plan_call(standard_plan("Rope"), 3, *KINDS, rng),
        "5 Omni": lambda: plan_call(standard_plan("Omni"), 3, *KINDS, rng),
        "6": lambda: keys_only(token_call(*KINDS, rng)),
    }[scenario]


SLOTS, LENGTHS = torch.tensor([5, 3]), torch.tensor([2, 4])
TABLE = {"block_table": torch.tensor([[2, 0], [1, 3]]), "positions_start": torch.tensor([1, 0]),
         "lengths": torch.tensor([5, 8]), "block_size": 4}  # fmt: skip
RUNS = {"seq_lens": torch.tensor([5, 4]), "compress_lens": torch.tensor([[2, 1], [0, 3]])}
dynamic = pmx.dynamic_batching
OPERATORS: dict[str, tuple[Callable[..., Any], Make]] = {
    **{f"scatter {name}": (ascend.scatter_pa_kv_cache, scatter(name))
       for name in ("1", "2", "2 Nct", "3 Rope", "4", "5 Rope", "5 Omni", "6")},
    "gather": (ascend.gather_pa_kv_cache, one_slot_blocks),
    "gather cumulative": (ascend.gather_pa_kv_cache, gathered(cumulative=True)),
    "gather PA_NZ": (ascend.gather_pa_kv_cache, gathered(cache_mode="PA_NZ")),
    "slot_mapping": (ascend.slot_mapping, helper(**TABLE)),
    "plan_slots": (ascend.plan_slots, helper(lengths=LENGTHS, block_size=3, start=2)),
    "run_lengths Alibi": (ascend.run_lengths, helper(scatter_mode="Alibi", **RUNS)),
    "run_lengths Rope": (ascend.run_lengths, helper(
        scatter_mode="Rope", **RUNS, compress_seq_offset=torch.tensor([[1, -1], [0, 1]]))),
    "static": (pmx.key_value_cache, lambda: static_call(PLAIN, 0, 1, bits.generator(0))),
    **{f"dynamic {form}": (dynamic.key_value_cache, ragged(form)) for form in ("offset", "page", "token")},
    **{f"attention {form}": (dynamic.multi_head_cache_attention, attended(form))
       for form in ("offset", "page", "token")},
    "unfused": (dynamic.multi_head_attention,
                lambda: random_unfused_call(torch.float32, [1, 3], [4, 3], decoding_batches=1)),
}  # fmt: skip
RELATED = {
    "seq_lens": "seq_lens|compress_lens|key",
    "compress_lens": "compress_lens|compress_seq_offset",
    "compress_seq_offset": "compress_seq_offset|compress_lens",
    "start_pos": "start_pos|kvstarts",
    "kvstarts": "kvstarts|cachestarts",
    "seqstarts": "seqstarts|kvstarts",
    "strides": "strides and offsets|strides",
    "offsets": "strides and offsets|offsets",
    "lengths": "lengths|positions_start",
    "page_size": "page_size|cachestarts",
    "block_size": "block_size|block_table|lengths|positions_start|start",
    "start": "start|lengths",
    "num_layer": "num_layer|layer_idx",
    "head_dim": "head_dim|query",
    "num_heads": "num_heads|num_kv_heads|query",
    "num_kv_heads": "num_kv_heads|key|current_key",
}


def changes(call: Call) -> Iterator[tuple[str, str, Any]]:
    """Every integer of a call in turn replaced by every extreme: the argument, where, and its new value."""
    for name, x in call.items():
        if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32):
            ends = torch.iinfo(x.dtype)
            for place in range(x.numel()):
                for extreme in [n for n in EXTREMES if ends.min <= n <= ends.max]:
                    changed = x.clone()
                    changed.view(-1)[place] = extreme
                    yield name, f"{name}[{place}] = {extreme}", changed
        elif isinstance(x, int) and not isinstance(x, bool):
            for extreme in (*EXTREMES, *BEYOND):
                yield name, f"{name} = {extreme}", extreme
        elif isinstance(x, tuple):
            for place in range(len(x)):
                for extreme in (*EXTREMES, *BEYOND):
                    yield name, f"{name}[{place}] = {extreme}", (*x[:place], extreme, *x[place + 1 :])


def lengths_of_runs(
    scatter_mode: str, seq_lens: Tensor, compress_lens: Tensor, compress_seq_offset: Tensor | None = None
) -> list[int]:
    """The table of the document in integers without end; the golden would make a list of each run."""
    found = []
    offs = compress_lens if compress_seq_offset is None else compress_seq_offset
    for length, wins, heads in zip(seq_lens.tolist(), compress_lens.tolist(), offs.tolist(), strict=True):
        for win, off in zip(wins, heads, strict=True):
            if scatter_mode == "Alibi":
                found.append(win)
            else:
                found.append(length if off in (-1, length) or win == 0 else length - win + 1)
    return found


def expect_right(function: Callable[..., Any], call: Call, after: Call, result: Any) -> None:
    """What a call was not refused for has the effect that the document gives it."""
    match function.__name__:
        case "scatter_pa_kv_cache":
            averaged = ascend_golden.scatter_pa_kv_cache(**call)
            for name in ("key_cache", "value_cache"):
                if call[name] is not None:
                    settle(after[name], call[name], averaged)
        case "gather_pa_kv_cache":
            ascend_golden.gather_pa_kv_cache(**call)
        case "run_lengths":
            assert result.tolist() == lengths_of_runs(**call)
        case "slot_mapping":
            wanted = golden_slot_mapping(*call.values())
            assert [x if x >= 0 else "skipped" for x in result.tolist()] == [
                x if x >= 0 else "skipped" for x in wanted
            ]
        case "plan_slots":
            block_size, start = call["block_size"], call["start"]
            ends = [-(-start // block_size) * block_size]
            for length in call["lengths"].tolist():
                ends.append(ends[-1] + -(-length // block_size) * block_size)
            assert ([*result[0].tolist(), result[1]]) == ends
        case _:
            golden = "dynamic_key_value_cache" if "seqstarts" in call else function.__name__
            golden = golden if function.__name__ == "key_value_cache" else function.__name__
            wanted = getattr(pmx_golden, golden)(**call)
            stored = result if isinstance(result, tuple) else ()
            for mine, name in zip(stored, ("key", "value"), strict=False):
                bits.assert_same_bits(mine, getattr(wanted, name), name)
            if "cache" in call:
                call["cache"] = wanted.cache
    assert_same_memory(after, call)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_right_or_refused_by_name(name: str, dtype: torch.dtype) -> None:
    function, make = OPERATORS[name]
    good = {
        n: x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.int64 else x for n, x in make().items()
    }
    function(**fork(good))
    for argument, what, value in changes(good):
        call = fork(good) | {argument: value}
        after = fork(call)
        try:
            result = function(**after)
        except KVError as refused:
            assert re.search(rf"\b({RELATED.get(argument, argument)})\b", str(refused)), f"{what}: {refused}"
            assert_same_memory(after, call)
        except Exception as error:  # whatever it is, it is not what a caller can act on
            pytest.fail(f"{what} raises {type(error).__name__}: {error}")
        else:
            try:
                expect_right(function, call, after, result)
            except AssertionError as error:
                pytest.fail(f"{what} was taken and gives what it should not: {error}")
