"""``arrange``: the bits of the reference in any strides and order of pairs, and what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.bits import FLOATS, generator
from torch import Tensor

from kvloom import ops
from kvloom.core.pairs import ADJACENT, HALVES
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops import schemas
from kvloom.ops.arrangement import arrange

AXES = ((0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 1, 0), (0, 2, 1))
"""Orders of tokens, heads and elements in memory."""


def lying(x: Tensor, axes: tuple[int, ...], extra: int = 0) -> Tensor:
    """A copy in memory of the order ``axes``, with ``extra`` unused elements behind each row."""
    shape = [x.shape[i] for i in axes]
    room = torch.full((*shape[:2], shape[2] + extra), 77, dtype=x.dtype)[..., : shape[2]]
    view = room.permute([axes.index(i) for i in range(3)])
    return view.copy_(x)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int32])
@pytest.mark.parametrize("order", [ADJACENT, HALVES])
def test_every_backend_has_the_bits_of_the_reference(dtype: torch.dtype, order: str) -> None:
    """Tiles and rows that are whole and that are not, between all orders of axes."""
    for shape, rotary in (((37, 3, 64), 64), ((33, 2, 40), 24), ((5, 1, 7), 6), ((70, 2, 33), 0)):
        numbers = torch.randint(-99, 99, shape, generator=generator(1))
        x = numbers.to(dtype)
        expected = torch.empty_like(x)
        assert arrange(x, expected, rotary, order, backend="reference")
        again = torch.empty_like(x)
        assert arrange(expected, again, rotary, HALVES if order == ADJACENT else ADJACENT)
        assert torch.equal(again, x)
        for i, source in enumerate(AXES):
            for target in AXES:
                out = lying(torch.zeros_like(x), target, extra=i % 2)
                assert arrange(lying(x, source, extra=i % 3), out, rotary, order)
                assert torch.equal(out, expected)
                assert out.untyped_storage().nbytes() == out.nbytes or (
                    out.as_strided((), (), shape[target[2]]).item() == 77
                )


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_number_that_is_not_finite_is_found_anywhere(dtype: torch.dtype, backend: str) -> None:
    """In each element of a vector and in tokens of whole and partial tiles; the largest is finite."""
    x = torch.full((35, 2, 12), torch.finfo(dtype).max, dtype=dtype)
    for axes in ((0, 1, 2), (1, 2, 0)):
        out = lying(x, axes)
        assert arrange(-x, out, 8, HALVES, backend=backend)
        for token, element in ((0, 0), (7, 3), (31, 11), (34, 5), (33, 8)):
            for wrong in (torch.nan, -torch.nan, torch.inf, -torch.inf):
                y = x.clone()
                y[token, 1, element] = wrong
                for rotary in (0, 8):
                    assert not arrange(y, out, rotary, backend=backend)
                    assert int((~out.isfinite()).sum()) == 1


def test_nothing_is_arranged_to_nothing() -> None:
    for shape in ((0, 2, 8), (3, 0, 8), (3, 2, 0)):
        assert arrange(torch.empty(shape), torch.empty(shape))


X = torch.ones(3, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X[0], X[0]), ShapeError, r"^x must be \[T, H, D\] of 1, 2 or 4 bytes, got \[2, 8\]"),
        ((X.double(), X.double()), ShapeError, "^x must be .*float64"),
        ((X, X[:2]), ShapeError, r"^out must be \[3, 2, 8\] torch.float32, got \[2, 2, 8\]"),
        ((X, X.half()), ShapeError, "^out must be .*float32, got .*float16"),
        ((X, torch.empty_like(X), 10), ArgumentError, "^rotary must be in "),
        ((X, torch.empty_like(X), 3), ArgumentError, "^rotary must be even, got 3$"),
        (
            (X, torch.empty_like(X), 2, "none"),
            ArgumentError,
            "^order must be .*, got 'none'$",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        arrange(*arguments)


@pytest.mark.skipif(ops.cpu_kernels() is None, reason="there are no compiled kernels")
def test_the_kernel_itself_refuses_what_it_would_read_wrong() -> None:
    room = torch.zeros(4, 2, 8)
    for x, rotary, out in (
        (X, 10, torch.empty_like(X)),
        (X, -2, torch.empty_like(X)),
        (X, 0, torch.empty(2, 2, 8)),
        (X[0], 0, X[1]),
        (room[:3], 0, room[1:]),
        (X.double(), 0, X.double().clone()),
    ):
        with pytest.raises(IndexError, match=r"ArgumentError: (x|out|rotary|x and out) must"):
            schemas.arrange(x, rotary, True, out)
    with pytest.raises(ArgumentError, match=r"^out must lie before or after x$"):
        arrange(room[:3], room[1:])
