"""Comparison of results with expected ones: the first difference, with coordinates by axis names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvloom.conform.describe import Operator, Results, Vector, describe_tensor

_WORD: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOLERANCE: Final = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Tolerance of ``close`` and ``rounded``, relative to the larger of 1 and the expected values."""


@dataclass(frozen=True, slots=True)
class Difference:
    """First element that differs.

    Attributes:
        result: Name of the result.
        message: One sentence.
        at: Coordinates of the element, (axis, index).
        got: Its value and bits.
        expected: Expected value and bits.
        count: Number of elements that differ, of ``total``.
        total: Number of elements of the result.
    """

    result: str
    message: str
    at: tuple[tuple[str, int], ...] = ()
    got: str = ""
    expected: str = ""
    count: int = 0
    total: int = 0


def differing(expected: Tensor, got: Tensor, how: str, padding: Tensor | None = None) -> Tensor:
    """Mask of elements that differ, in tensors of one shape; those of ``padding`` may also be 0."""
    if how in ("bits", "padded"):
        wrong = words(expected) != words(got)
    elif how == "values":
        wrong = (words(expected) != words(got)) & ~(nan(expected) & nan(got))
    else:
        limit = _TOLERANCE.get(got.dtype, 2e-5) * expected.abs().double().clamp(min=1.0)
        near = (expected.double() - got.double()).abs() <= limit
        wrong = ~torch.where(expected.isfinite(), near, (expected == got) | (nan(expected) & nan(got)))
    return wrong if padding is None else wrong & ~(padding & (words(got) == 0))


def words(x: Tensor) -> Tensor:
    """View of ``x`` as integers of its width."""
    return x.contiguous().view(_WORD[x.itemsize]) if x.dtype != torch.bool else x


def nan(x: Tensor) -> Tensor:
    """Mask of elements that are NaN."""
    return x.isnan() if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


def agrees(operator: Operator, expected: Results, got: Mapping[str, Tensor]) -> bool:
    """Whether every result is as expected."""
    return all(
        name in got and _fits(operator.how(name), x, got[name])
        and not differing(x, got[name], operator.how(name), expected.get(f"{name}@padding")).any()
        for name, x in expected.items()
        if "@" not in name
    )  # fmt: skip


def _fits(how: str, expected: Tensor, got: Tensor) -> bool:
    return expected.shape == got.shape and (how == "close" or expected.dtype == got.dtype)


def first_difference(operator: Operator, vector: Vector, got: Mapping[str, Tensor]) -> Difference | None:
    """First difference in the results of a legal call; ``None`` if there is none."""
    for name, expected in (vector.expected or {}).items():
        if "@" in name:
            continue
        if name not in got:
            return Difference(name, f"{name} is missing")
        x, how = got[name], operator.how(name)
        if not _fits(how, expected, x):
            return Difference(name, f"{name} must be {describe_tensor(expected)}, got {describe_tensor(x)}")
        wrong = differing(expected, x, how, (vector.expected or {}).get(f"{name}@padding"))
        if wrong.any():
            message = f"{name} differs at {int(wrong.sum())} of {x.numel()} elements"
            return _at_first(wrong, name, message, _axes(operator, name, vector, x.ndim), x, expected)
    return None


def changed_argument(operator: Operator, vector: Vector, after: Mapping[str, Tensor]) -> Difference | None:
    """First wrongly changed argument: any argument of a refused call, else one that is not updated."""
    from kvloom.conform.judging import named

    updated = operator.updated if vector.expected is not None else ()
    for name, before in named(vector.call).items():
        if not isinstance(before, Tensor) or name.split(".")[0] in updated or name not in after:
            continue
        wrong = differing(before, after[name], "bits")
        if wrong.any():
            message = f"{name} was changed, which this call must not do"
            axes = _axes(operator, name, vector, before.ndim)
            return _at_first(wrong, name, message, axes, after[name], before)
    return None


def _at_first(
    wrong: Tensor, name: str, message: str, axes: list[str], got: Tensor, expected: Tensor
) -> Difference:
    """Difference at the first of the wrong elements."""
    at = tuple(wrong.nonzero()[0].tolist())
    return Difference(
        name,
        message,
        tuple(zip(axes, at, strict=True)),
        shown(got[at]),
        shown(expected[at]),
        int(wrong.sum()),
        got.numel(),
    )


def shown(x: Tensor) -> str:
    """Format a value and its bits."""
    bits = int(words(x.reshape(1)).item()) & ((1 << 8 * x.itemsize) - 1)
    return f"{x.item():.9g} (0x{bits:0{2 * x.itemsize}x})"


def _axes(operator: Operator, name: str, vector: Vector, rank: int) -> list[str]:
    name = name.split(".")[0]
    shape = operator.axes.get(name)
    for argument in operator.arguments:
        if argument.name == name and shape is None:
            shape = argument.shape  # type: ignore[assignment]
            if isinstance(shape, Mapping):
                shape = shape.get(operator.complete(vector.call).get(argument.shape_of))
    forms = [form.split() for form in (shape or "").split("|")]
    return next((form for form in forms if len(form) == rank), [str(i) for i in range(rank)])
