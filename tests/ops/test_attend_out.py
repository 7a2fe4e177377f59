"""Attention into a tensor that the caller gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ops.attention import Case, make_case
from ops.cases import waves
from ops.pools import INT8, PLAIN, Kind
from oracles.bits import assert_same_bits
from torch import Tensor

from kvloom import ops
from kvloom.errors import ArgumentError, KVError, ShapeError
from kvloom.ops import PositionalBias, Scores

BACKENDS = ["auto", "reference"]


def buffer_of(case: Case, more: int = 0) -> Tensor:
    """``[Tq + more, Hq, Dv]`` of sevens."""
    rows, heads, _ = case.query.shape
    shape = (rows + more, heads, case.kv.value.head_dim)  # type: ignore[union-attr]
    return torch.full(shape, 7.0, dtype=case.query.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [PLAIN, INT8], ids=str)
@pytest.mark.parametrize("new", [[1, 1], [3, 1], [40, 2]], ids=str)
def test_given_tensor_gets_the_bits_of_a_new_one(
    backend: str, dtype: torch.dtype, kind: Kind, new: list[int]
) -> None:
    """It may be part of a larger one, of which nothing else is written."""
    case = make_case(new, [70, 9], kind=kind, dtype=dtype, head_dim=32)
    expected = ops.attend(case.query, case.kv, case.batch(), backend=backend)
    whole = buffer_of(case, more=2)
    out = whole[1:-1]
    assert ops.attend(case.query, case.kv, case.batch(), out=out, backend=backend) is out
    assert_same_bits(out, expected, "given")
    assert bool((whole[0] == 7).all() and (whole[-1] == 7).all())
    scores = Scores(positional_bias=waves(sum(new), 4, 2))
    expected = ops.attend(case.query, case.kv, case.batch(), scores, backend=backend)
    ops.attend(case.query, case.kv, case.batch(), scores, out=out, backend=backend)
    assert_same_bits(out, expected, "given with a positional bias")


def strided(case: Case) -> Tensor:
    return buffer_of(case).transpose(0, 1).contiguous().transpose(0, 1)


def with_gradient(case: Case) -> Tensor:
    return buffer_of(case).requires_grad_()


BAD: dict[str, tuple[Callable[[Case], Tensor], type[KVError], str]] = {
    "shape": (lambda case: buffer_of(case, more=1), ShapeError, r"out must .*got \[5"),
    "dtype": (lambda case: buffer_of(case).double(), ShapeError, "out must .*float64"),
    "strides": (strided, ShapeError, "out must be contiguous"),
    "gradient": (with_gradient, ArgumentError, "out must not require a gradient"),
    "query": (lambda case: case.query, ShapeError, "out must not overlap query"),
    "cache": (
        lambda case: case.kv.key.cache.flatten()[: case.query.numel()].view(case.query.shape),
        ShapeError,
        "out must not overlap key.cache",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BAD)
def test_tensor_that_cannot_be_written_is_refused(name: str, backend: str) -> None:
    make, error, message = BAD[name]
    case = make_case([3, 1], [9, 4], axes="B S H D", head_dim=32)
    out = make(case)
    before = out.detach().clone()
    with pytest.raises(error, match=message):
        ops.attend(case.query, case.kv, case.batch(), out=out, backend=backend)
    assert_same_bits(out.detach(), before, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_is_not_written(backend: str) -> None:
    case = make_case([2, 2], [4, 4], head_dim=8)
    rows, heads, dim = case.query.shape
    memory = torch.zeros(rows * heads * dim)
    mask = memory[: rows * 8].view(rows, 8)
    with pytest.raises(ShapeError, match="out must not overlap mask"):
        ops.attend(
            case.query, case.kv, case.batch(), Scores(mask=mask),
            out=memory.view(rows, heads, dim), backend=backend,
        )  # fmt: skip
    assert not memory.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_coefficients_are_not_written(backend: str) -> None:
    case = make_case([1, 3], [5, 6])
    out = torch.zeros_like(case.query)
    bias = PositionalBias(out, torch.ones(2, case.query.shape[2] // 2))
    with pytest.raises(ShapeError, match=r"out must not overlap positional_bias\.coefficients"):
        ops.attend(case.query, case.kv, case.batch(), Scores(positional_bias=bias), out=out, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_beside_it_may_require_no_gradient(backend: str) -> None:
    case = make_case([3, 1], [9, 4], head_dim=32)
    out, query = buffer_of(case), case.query.clone().requires_grad_()
    with pytest.raises(ArgumentError, match="query must not require a gradient"):
        ops.attend(query, case.kv, case.batch(), out=out, backend=backend)
    assert bool((out == 7).all())
    with torch.no_grad():
        ops.attend(query, case.kv, case.batch(), out=out, backend=backend)
    assert not bool((out == 7).any())


@pytest.mark.parametrize("backend", BACKENDS)
def test_call_that_is_refused_writes_nothing(backend: str) -> None:
    case = make_case([3, 1], [9, 4], head_dim=32)
    out, batch = buffer_of(case), case.batch()
    outside = replace(batch, kvstarts=batch.kvstarts + torch.tensor([0, 0, 10_000]))
    with pytest.raises(KVError):
        ops.attend(case.query, case.kv, outside, out=out, backend=backend)
    assert bool((out == 7).all())


@pytest.mark.compile
def test_compiled_call_writes_it() -> None:
    case = make_case([3, 1], [9, 4], head_dim=32)
    batch = case.batch()

    def attend(query: Tensor, out: Tensor) -> Tensor:
        return ops.attend(query, case.kv, batch, out=out) + 1

    torch._dynamo.reset()
    out = buffer_of(case)
    result = torch.compile(attend, backend="aot_eager", fullgraph=True)(case.query, out)
    expected = ops.attend(case.query, case.kv, batch)
    torch._dynamo.reset()
    assert_same_bits(out, expected, "compiled")
    assert_same_bits(result, expected + 1, "result")
