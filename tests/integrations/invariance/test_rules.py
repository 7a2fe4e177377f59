"""Rules of rows are found by trying, and hold for every row at every place; activations are whole vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.pairs import pairwise
from oracles.threads import num_threads
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kvloom.integrations.transformers.invariance.elementwise import elementwise
from kvloom.integrations.transformers.invariance.packing import packed_linear, why_not_packable
from kvloom.integrations.transformers.invariance.rules import RowRule, find_rule, linear, matmul, rule_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 31, 64)
OUTPUTS = (1, 4, 16, 48, 99, 256)
INPUTS = (8, 32, 77, 96, 256)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("prepare", [linear, matmul, packed_linear])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rule_holds_for_every_shape_number_and_place(
    dtype: torch.dtype, prepare: Callable[..., Callable[[Tensor], Tensor]], threads: int
) -> None:
    if prepare is packed_linear and (why_not := why_not_packable(torch.empty(8, 8, dtype=dtype))):
        assert dtype_is_named(why_not, dtype)
        return
    with num_threads(threads):
        for outputs, inputs, has_bias in pairwise(OUTPUTS, INPUTS, (False, True)):
            weight, rows = torch.randn(outputs, inputs).to(dtype), torch.randn(64, inputs).to(dtype)
            bias = torch.randn(outputs).to(dtype) if has_bias else None
            rule, product = rule_of(weight, bias, prepare), prepare(weight, bias)
            alone = torch.cat([rule.apply(product, row[None]) for row in rows])
            for count in COUNTS:
                chosen = torch.randperm(64)[:count]
                assert torch.equal(rule.apply(product, rows[chosen]), alone[chosen])


def dtype_is_named(sentence: str, dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in sentence or "CPU" in sentence


@pytest.mark.parametrize(
    ("quantum", "expected"),
    [(1, RowRule(2)), (2, RowRule(4, 4)), (8, RowRule(8, 8)), (32, RowRule(32, 32))],
)
def test_the_cheapest_rule_that_holds_is_found(quantum: int, expected: RowRule) -> None:
    """Of a product whose rows have other bits at other remainders of their number."""

    def product(rows: Tensor) -> Tensor:
        return rows + rows.shape[0] % quantum + (rows.shape[0] == 2 and quantum > 1)

    assert find_rule(product, torch.ones(1, 4), counts=range(1, 80)) == expected


def test_rows_one_tile_at_a_time_are_the_last_resort() -> None:
    def product(rows: Tensor) -> Tensor:
        return rows * 2 + (rows.shape[0] != 32)

    rule = find_rule(product, torch.ones(1, 4), counts=range(1, 80))
    assert rule == RowRule(32, 32, tile=True) and str(rule) == "32 rows at a time"
    assert torch.equal(rule.apply(product, torch.ones(70, 4)), torch.full((70, 4), 2.0))


def test_one_row_at_a_time_holds_where_nothing_else_does() -> None:
    def product(rows: Tensor) -> Tensor:
        return rows * 2 + torch.arange(rows.shape[0])[:, None]

    rule = find_rule(product, torch.ones(1, 4), counts=range(1, 80))
    assert str(rule) == "one row at a time"
    assert torch.equal(rule.apply(product, torch.ones(7, 4)), torch.full((7, 4), 2.0))


def test_a_rule_is_found_by_functions_of_torch_alone() -> None:
    """Not by those that stand in for them where a layer is called: another of its shape may have none."""
    stood_in = list[Any]()

    class StandIns(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.mm:
                stood_in.append(function)
            return function(*args, **(kwargs or {}))

    def prepare(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return lambda rows: torch.mm(rows, weight.t())

    with StandIns():
        prepare(torch.randn(11, 40), None)(torch.randn(3, 40))
        assert len(stood_in) == 1
        assert rule_of(torch.randn(11, 40), None, prepare) == rule_of(torch.randn(11, 40), None, matmul)
    assert len(stood_in) == 1


def test_no_rows_are_no_rows() -> None:
    weight = torch.randn(5, 8)
    assert RowRule(4, 4).apply(linear(weight, None), torch.empty(0, 8)).shape == (0, 5)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "function", [F.silu, F.gelu, torch.sigmoid, F.softplus, F.mish, lambda x: F.gelu(x, approximate="tanh")]
)
def test_an_element_has_the_same_bits_in_every_tensor(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, threads: int
) -> None:
    values = (torch.randn(150_001) * 3).to(dtype)
    with num_threads(threads):
        whole = elementwise(function, values)
        for begin, end in ((0, 1), (5, 12), (100, 163), (7, 40_000), (3, 65_539), (1, 99_999)):
            assert torch.equal(elementwise(function, values[begin:end]), whole[begin:end])
        table = values[:150_000].view(250, 600)
        assert torch.equal(elementwise(function, table[:, :300]), whole[:150_000].view(250, 600)[:, :300])
    assert torch.equal(elementwise(function, values[:64]), function(values[:64]))
