"""Batch invariance of matrix products: rules for padding rows, found by trying products.

A matrix with few rows is multiplied by another kernel than one with many, which adds in another order. Which
numbers of rows share an order depends on the library behind torch, the processor, the dtype and the number
of threads. So products are tried, and the cheapest rule that holds is taken.

Shapes: M rows, K inputs, N outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

Product = Callable[[Tensor], Tensor]
"""``[M, K]`` to ``[M, N]``."""

_COUNTS: Final = (*range(1, 18), 24, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 255, 256, 257, 512, 700)
"""Numbers of rows with which a small layer is tried."""
_FEW: Final = 37
"""Largest number of rows with which a large layer is tried, so that it takes milliseconds."""
_SMALL_OUTPUTS, _SMALL_INPUTS = 128, 512
_SMALL: Final = _SMALL_OUTPUTS * _SMALL_INPUTS
"""Largest number of weights of a small layer, which is tried with all numbers of rows."""
_MOST_OUTPUTS: Final = 512
"""Largest number of outputs that are tried; more are computed by the same kernels."""


@dataclass(frozen=True)
class RowRule:
    """Numbers of rows at which a product gives every row the same bits.

    Attributes:
        least: The fewest rows.
        multiple: Rows must be a multiple of this.
        tile: Whether rows are computed ``least`` at a time.
    """

    least: int
    multiple: int = 1
    tile: bool = False

    def padded(self, count: int) -> int:
        """Number of rows to compute for ``count`` rows; ``count`` must be at least 1."""
        return max(self.least, -(-count // self.multiple) * self.multiple)

    def apply(self, product: Product, rows: Tensor) -> Tensor:
        """The product ``[M, N]`` of rows ``[M, K]``, which are padded with copies of themselves."""
        count = rows.shape[0]
        if not count:
            return product(rows)
        target = self.padded(count)
        if target != count:
            rows = pad_rows(rows, target)
        if self.tile and target > self.least:
            out = torch.cat([product(tile) for tile in rows.split(self.least)])
        else:
            out = product(rows)
        return out if target == count else out[:count]

    def __str__(self) -> str:
        if self.tile:
            return f"{self.least} rows at a time" if self.least > 1 else "one row at a time"
        parts = [f"at least {self.least} rows"] if self.multiple == 1 or self.least > self.multiple else []
        return " and ".join(parts + [f"multiples of {self.multiple} rows"] * (self.multiple > 1))


NONE: Final = RowRule(1)
"""Rule that pads nothing."""
_RULES: Final = (
    RowRule(2),
    RowRule(4),
    RowRule(4, 4),
    RowRule(8, 8),
    RowRule(16, 16),
    RowRule(32, 32),
    RowRule(32, 32, tile=True),
    RowRule(1, tile=True),
)
"""All rules, the cheapest first; the last one, one row at a time, always holds."""


def pad_rows(rows: Tensor, target: int) -> Tensor:
    """``[M, K]`` followed by copies of its first rows up to ``target`` rows; M must be at least 1."""
    count = rows.shape[0]
    if target <= 2 * count:
        return torch.cat((rows, rows[: target - count]))
    return torch.cat([rows] * -(-target // count))[:target]


def find_rule(product: Product, row: Tensor, counts: Sequence[int] = _COUNTS) -> RowRule:
    """The cheapest rule with which a product gives a row ``[1, K]`` the same bits at every place.

    Args:
        product: The product, whose results must differ if the order of adding differs.
        row: A row; matrices of copies of it are tried, since rows are independent.
        counts: Numbers of rows to try.
    """
    trial = _Trial(product, row)
    return next(rule for rule in _RULES if trial.holds(rule, counts))


def linear(weight: Tensor, bias: Tensor | None) -> Product:
    """``F.linear`` by ``weight`` ``[N, K]`` and ``bias`` ``[N]``."""
    return partial(F.linear, weight=weight, bias=bias)


def matmul(weight: Tensor, bias: Tensor | None) -> Product:
    """As ``linear``, by ``torch.mm`` and ``torch.addmm``; ``weight`` is a transposed matrix."""
    matrix = weight.t()
    if bias is None:
        return partial(torch.mm, mat2=matrix)
    return partial(torch.addmm, bias, mat2=matrix)


def rule_of(
    weight: Tensor, bias: Tensor | None, prepare: Callable[[Tensor, Tensor | None], Product] = linear
) -> RowRule:
    """The rule of a layer, found once for each shape, dtype and number of threads.

    Args:
        weight: ``[N, K]``.
        bias: ``[N]``, or ``None``.
        prepare: Function that makes the product of a weight and a bias; called with some rows of both.
    """
    threads = torch.get_num_threads()
    key = (prepare, weight.shape, weight.stride(), weight.dtype, bias is not None, threads)
    if key not in _FOUND:
        # Not by functions that stand in for torch's own where the layer is called: others have the same key.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            _FOUND[key] = _search(weight, bias, prepare)
    return _FOUND[key]


_FOUND: Final[dict[tuple[object, ...], RowRule]] = {}


def _search(
    weight: Tensor, bias: Tensor | None, prepare: Callable[[Tensor, Tensor | None], Product]
) -> RowRule:
    outputs, inputs = min(weight.shape[0], _MOST_OUTPUTS), weight.shape[1]
    like, row = _cancelling(outputs, inputs, weight.dtype)
    if weight.stride(-1) != 1:
        like = like.t().contiguous().t()
    product = prepare(like, None if bias is None else bias.new_zeros(outputs))
    if outputs * inputs <= _SMALL:
        return find_rule(product, row)
    # The rule of a small layer is found first, so that the large one is tried with few numbers of rows.
    usual = rule_of(weight[:_SMALL_OUTPUTS, :_SMALL_INPUTS], bias, prepare)
    trial = _Trial(product, row)
    return next(rule for rule in _RULES[_RULES.index(usual) :] if trial.holds(rule, _few(rule)))


def _few(rule: RowRule) -> tuple[int, ...]:
    """Numbers of rows that show whether the rule of a small layer also holds for a large one."""
    return rule.least, rule.least + (rule.multiple if rule.multiple > 1 else 3), _FEW


def _cancelling(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight ``[N, K]`` and a row ``[1, K]`` whose products sum to zero.

    The computed sum consists of rounding errors alone. So another order of adding, or another rounding of
    products, has another result in every dtype. Sums of other weights would mostly be rounded to the same
    bits.
    """
    generator = torch.Generator().manual_seed(0)
    half, distinct = inputs // 2, min(outputs, 32)
    spread = 6 if dtype == torch.float16 else 10  # range of exponents, wide enough that sums are rounded
    values = torch.randn(distinct, half, generator=generator)
    values *= torch.randint(-spread, spread + 1, values.shape, generator=generator).exp2()
    values = values.to(dtype)
    factors = torch.randn(1, half, generator=generator).to(dtype)
    order, odd = torch.randperm(inputs, generator=generator), inputs - 2 * half
    rows = torch.cat((values, -values, values.new_zeros(distinct, odd)), dim=1)[:, order]
    row = torch.cat((factors, factors, factors.new_ones(1, odd)), dim=1)[:, order]
    return rows.repeat(-(-outputs // distinct), 1)[:outputs].contiguous(), row


class _Trial:
    """Results of a product for matrices of copies of one row, computed once for each number of rows."""

    def __init__(self, product: Product, row: Tensor) -> None:
        self._product, self._row = product, row
        self._results: dict[int, Tensor | None] = {}

    def holds(self, rule: RowRule, counts: Sequence[int]) -> bool:
        """Whether a rule gives one result for all numbers of rows and all places."""
        if rule.least == 1:
            return True
        sizes = {rule.least} if rule.tile else {rule.padded(count) for count in counts}
        first = self._result(rule.least)
        results = (self._result(size) for size in sorted(sizes))
        return first is not None and all(x is not None and torch.equal(first, x) for x in results)

    def _result(self, count: int) -> Tensor | None:
        """The result ``[N]`` of every row; ``None`` if rows differ."""
        if count not in self._results:
            rows = self._product(self._row.repeat(count, 1))
            self._results[count] = rows[0] if bool((rows == rows[:1]).all()) else None
        return self._results[count]
