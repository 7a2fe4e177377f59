"""``Attention`` of opsets 23 to 25: where ONNX's reference and ONNX Runtime differ, as docs/onnx.md says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime")
pytest.importorskip("safetensors")
import onnx
import onnxruntime
from conform.known_differences import (
    CAPPED,
    DIALECTS,
    FLAT,
    KNOWN,
    MASKED,
    NARROW,
    ONE_ROW,
    ORT,
    REFERENCE,
    known,
)
from torch import Tensor

from kvloom.conform.describe import Call, problems
from kvloom.conform.operators import OPERATORS
from kvloom.conform.outcomes import CallRefused
from kvloom.conform.running import run_one
from kvloom.conform.targets import open_target
from kvloom.conform.vectors import Vector, make

PAGE = Path(__file__).parents[2] / "docs" / "onnx.md"
REFUSED, NAN, INF = "refused", float("nan"), float("inf")
OPSETS = [(target, opset) for target in (REFERENCE, ORT) for opset in DIALECTS]


OTHERS = ("onnx.tensor_scatter", "microsoft.group_query_attention")


@pytest.mark.parametrize(
    ("target", "dialect"),
    [*((target, DIALECTS[opset]) for target, opset in OPSETS), *((ORT, dialect) for dialect in OTHERS)],
)
def test_random_legal_calls_differ_where_the_table_says_and_nowhere_else(target: str, dialect: str) -> None:
    for vector in make(dialect, seed=11, count=60):
        if vector.expected is None:
            continue
        assert not problems(OPERATORS[dialect], vector.call), vector.about
        outcome = run_one(open_target(target), vector, known=[])
        is_known = bool(known(target, dialect, vector.call))
        assert outcome.status != "failed" or is_known, f"{vector.about}: {outcome.message}"


def answer(target: str, opset: int, call: Call) -> Any:
    """Last row of the last output that ``call`` asks for, or ``REFUSED``."""
    operator = OPERATORS[DIALECTS[opset]]
    named = call.pop("without", ())
    operator = replace(operator, outputs={n: x for n, x in operator.outputs.items() if n not in named})
    vector = Vector("", operator.name, "", call, None)
    try:
        results = open_target(target)(operator, vector, dict(call))
    except CallRefused:
        return REFUSED
    last = results["qk_matmul_output" if "qk_matmul_output" in results else "Y"]
    return last[0, 0, -1].float()


def call(dtype: torch.dtype = torch.float32, **more: Any) -> Call:
    """Two queries of zeros over three keys, so that a row of ``Y`` has the weights of the keys."""
    found = {"Q": torch.zeros(1, 1, 2, 4), "K": torch.ones(1, 1, 3, 4), "V": torch.eye(3).view(1, 1, 3, 3)}
    return {**{name: x.to(dtype) for name, x in found.items()}, **more}


def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def past(**more: Any) -> Call:
    return call(past_key=torch.zeros(1, 1, 1, 4), past_value=torch.zeros(1, 1, 1, 3), **more)


def with_nan(name: str, **more: Any) -> Call:
    x = call()[name].clone()
    x[0, 0, 2] = NAN
    return call(**{name: x}, **more)


ONE, TWO, THREE = [1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1 / 3] * 3
TWO_OF_MASK = torch.tensor([[True, True, False]] * 2)
KEYS = torch.tensor([1.0, 3, 6]).half().view(1, 1, 3, 1).expand(1, 1, 3, 4)
HIGH = 2.0 * torch.ones(1, 1, 2, 4)
UNMASKED = torch.tensor([2.0, 6, 12]).softmax(-1).tolist()
LOWEST, LOW_HALF = torch.finfo(torch.float32).min, torch.finfo(torch.float16).min
ALL = (23, 24, 25)
LATER = (24, 25)
ROWS: dict[str, list[tuple[Call, tuple[int, ...], Any, Any, Any]]] = {
    # A call, its opsets, and what the reference, ONNX Runtime with 23 and 24, and it with 25 give.
    "query that sees no key": [
        (call(attn_mask=torch.zeros(2, 3, dtype=torch.bool)), ALL, [0.0] * 3, [0.0] * 3, [0.0] * 3),
        (call(attn_mask=torch.full((2, 3), -INF)), ALL, [0.0] * 3, [0.0] * 3, [0.0] * 3),
        (call(attn_mask=torch.zeros(2, 3, dtype=torch.bool), qk_matmul_output_mode=3), ALL, *[[0.0] * 3] * 3),
    ],
    "row of finfo.min": [
        (call(attn_mask=torch.full((2, 3), LOWEST)), ALL, THREE, [0.0] * 3, THREE),
        (call(torch.float16, Q=(HIGH / 2).half(), K=KEYS, attn_mask=torch.full((2, 3), LOW_HALF).half()), ALL,
         THREE, [0.0] * 3, UNMASKED),
    ],
    FLAT: [
        (call(attn_mask=TWO_OF_MASK[0]), ALL, TWO, REFUSED, TWO),
        (call(attn_mask=TWO_OF_MASK[0], is_causal=1), ALL, REFUSED, REFUSED, TWO),
    ],
    ONE_ROW: [
        (call(attn_mask=TWO_OF_MASK[:1]), ALL, TWO, REFUSED, TWO),
        (call(attn_mask=TWO_OF_MASK[:1], is_causal=1), ALL, ONE, REFUSED, TWO),
    ],
    NARROW: [(call(attn_mask=TWO_OF_MASK[:, :2]), LATER, TWO, REFUSED, TWO)],
    "mask wider than the keys": [
        (call(attn_mask=torch.tensor([[True, True, False, True]] * 2)), ALL, REFUSED, REFUSED, TWO),
    ],
    "mask of integers": [
        (call(attn_mask=torch.stack([ints(0, 0, 1)] * 2)), ALL, *[[0.2119, 0.2119, 0.5761]] * 3),
        (call(attn_mask=torch.stack([ints(1, 1, 1, dtype=torch.uint8)] * 2), is_causal=1), ALL, REFUSED,
         THREE, THREE),
    ],
    CAPPED: [
        (call(Q=HIGH, qk_matmul_output_mode=0, softcap=1.0), ALL, [0.9993] * 3, [4.0] * 3, [4.0] * 3),
        (call(Q=HIGH, qk_matmul_output_mode=1, softcap=1.0), ALL, *[[0.9993] * 3] * 3),
    ],
    MASKED: [
        (call(attn_mask=TWO_OF_MASK, qk_matmul_output_mode=2), ALL, [0.0, 0.0, -INF], [0.0, 0.0, LOWEST],
         [0.0, 0.0, -INF]),
    ],
    "past with nonpad_kv_seqlen": [(past(nonpad_kv_seqlen=ints(2)), LATER, REFUSED, REFUSED, REFUSED)],
    "past without present outputs": [
        (past(without=("present_key", "present_value")), ALL, [0.25] * 3, REFUSED, [0.25] * 3),
    ],
    "nonpad_kv_seqlen beyond the keys": [(call(nonpad_kv_seqlen=ints(5)), LATER, THREE, REFUSED, THREE)],
    "negative nonpad_kv_seqlen": [(call(nonpad_kv_seqlen=ints(-1)), LATER, [0.0] * 3, REFUSED, [0.0] * 3)],
    "hidden NaN": [
        (with_nan("V", attn_mask=TWO_OF_MASK), ALL, *[[NAN] * 3] * 3),
        (with_nan("V", nonpad_kv_seqlen=ints(2)), LATER, *[[NAN] * 3] * 3),
        (with_nan("K", attn_mask=TWO_OF_MASK), ALL, *[[NAN] * 3] * 3),
        (with_nan("K", nonpad_kv_seqlen=ints(2)), LATER, [NAN] * 3, TWO, [NAN] * 3),
    ],
    "scale of 0": [(call(Q=HIGH, scale=0.0), ALL, THREE, REFUSED, THREE)],
    "is_causal of 2": [(call(is_causal=2), ALL, TWO, THREE, THREE)],
    "window": [
        (call(left_window_size=0), (25,), [0.0, 0.5, 0.5], None, [0.0, 0.5, 0.5]),
        (call(left_window_size=1, right_window_size=0), (25,), TWO, None, TWO),
    ],
}  # fmt: skip


SAID_OF = ("1.23", "1.32")
"""Versions of onnx and of ONNX Runtime that the table is about."""


@pytest.mark.skipif(
    not all(x.__version__.startswith(f"{y}.") for x, y in zip((onnx, onnxruntime), SAID_OF, strict=True)),
    reason="the table is of onnx 1.23 and ONNX Runtime 1.32",
)
@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_what_the_runtimes_do(row: str) -> None:
    for given, opsets, *expected in ROWS[row]:
        for target, opset in OPSETS:
            wanted = expected[0 if target == REFERENCE else 1 if opset < 25 else 2]
            if opset not in opsets:
                continue
            got = answer(target, opset, dict(given))
            said = f"{target}, opset {opset}: {got}"
            if isinstance(got, str) or isinstance(wanted, str):
                assert isinstance(got, str) and got == wanted, said
            else:
                want = torch.tensor(wanted)
                torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-4, equal_nan=True, msg=said)


@pytest.mark.parametrize(("bits", "low", "high"), [(8, -128, 127), (4, -8, 7)])
def test_codes_of_what_has_none(bits: int, low: int, high: int) -> None:
    operator = OPERATORS["microsoft.group_query_attention"]
    row = torch.zeros(1, 1, 16)
    row[0, 0, :6] = torch.tensor([NAN, INF, -INF, 1e30, -1e30, -0.0])
    empty = torch.zeros(1, 1, 2, 16 if bits == 8 else 8, dtype=torch.int8 if bits == 8 else torch.uint8)
    given: Call = {
        "query": torch.zeros(1, 1, 16), "key": row, "value": row, "past_key": empty, "past_value": empty,
        "seqlens_k": ints(0, dtype=torch.int32), "total_sequence_length": torch.tensor(1, dtype=torch.int32),
        "k_scale": torch.tensor([0.3]), "v_scale": torch.tensor([0.3]), "num_heads": 1, "kv_num_heads": 1,
        "k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": bits,
    }  # fmt: skip
    expected = operator.oracle({**given, "query": torch.ones(1, 1, 16)})["present_key"][0, 0, 0]
    got = open_target(ORT)(operator, Vector("", operator.name, "", given, None), dict(given))["present_key"]
    assert torch.equal(got[0, 0, 0], expected)
    nibbles = torch.stack((expected & 15, expected >> 4), dim=-1).flatten().int() - 8
    codes = (expected if bits == 8 else nibbles)[:6].tolist()
    assert codes == [high, high, low, high, low, 0]


@pytest.mark.parametrize("index", [-1, -2])
@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_negative_write_indices_wrap_in_the_reference_and_are_refused_elsewhere(
    mode: str, index: int
) -> None:
    operator = OPERATORS["onnx.tensor_scatter"]
    cache, update = torch.zeros(1, 1, 5, 2), torch.ones(1, 1, 2, 2)
    given = {"past_cache": cache, "update": update, "write_indices": ints(index), "mode": mode}
    assert [name for name, _ in problems(operator, given)] == ["write_indices"]
    vector = Vector("", operator.name, "", given, None)
    found = open_target(REFERENCE)(operator, vector, dict(given))["present_cache"]
    written = sorted((index + i) % 5 for i in range(2))
    assert found[0, 0, :, 0].nonzero().flatten().tolist() == written
    with pytest.raises(CallRefused):
        open_target(ORT)(operator, vector, dict(given))


def test_the_table_has_these_rows() -> None:
    table = PAGE.read_text(encoding="utf-8").split("| what |")[1].split("\n\n")[0]
    assert re.findall(r"^\| ([^|]+?) \|", table, re.M) == [*ROWS, "negative write_indices"]
    assert {each.row for each in KNOWN} <= set(ROWS)
