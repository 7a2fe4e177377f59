"""``ops.rotate``: backends leave the bits of the reference; bad arguments are refused by name."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from oracles.bits import FLOATS, generator

from kvloom import ops
from kvloom.errors import ArgumentError, ShapeError, UnsupportedError
from kvloom.ops import schemas
from kvloom.quant.rotation import block_of

DIMS = (1, 2, 6, 8, 16, 24, 48, 64, 80, 128, 256, 512, 1024, 2048)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", DIMS)
def test_every_backend_has_the_bits_of_the_reference(dim: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 5, dim, generator=generator(dim)) * 10).to(dtype)
    for block in {1 << i for i in range(block_of(dim).bit_length())}:
        expected = ops.rotate(x, block, backend="reference")
        assert torch.equal(ops.rotate(x, block), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_are_those_of_the_reference(dtype: torch.dtype) -> None:
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    special = torch.tensor([0.0, -0.0, tiny, tiny / 2, largest, -largest, 1.0, -3.0], dtype=dtype)
    picked = torch.randint(8, (40, 2, 64), generator=generator(1))
    x = special[picked]
    x[7, 1, 3], x[8, 0, 60], x[9, 1, 0] = float("nan"), float("inf"), float("-inf")
    for block in (4, 16, 64):
        found, expected = ops.rotate(x, block), ops.rotate(x, block, backend="reference")
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_strides_and_numbers_of_threads_change_no_bit() -> None:
    x = torch.randn(2, 700, 3, 64, generator=generator(2))
    expected = ops.rotate(x, 64, backend="reference")
    moved = x.transpose(1, 2)
    assert torch.equal(ops.rotate(moved, 64), expected.transpose(1, 2))
    assert ops.rotate(moved, 64).stride() == moved.stride()  # or it would be stored several times slower
    assert torch.equal(ops.rotate(x[:, ::2], 64), expected[:, ::2])
    assert torch.equal(ops.rotate(x[:, 1:300], 64), expected[:, 1:300])  # sequences apart
    assert torch.equal(ops.rotate(x.mT.contiguous().mT, 64), expected)
    assert torch.equal(ops.rotate(x[0, :1, :1].expand(4, 3, 64), 64), expected[0, :1, :1].expand(4, 3, 64))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.rotate(x, 64), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(0, 2, 64), (2, 0, 3, 64), (3, 2, 0)])
def test_nothing_is_rotated_to_nothing(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert ops.rotate(x, 1 if shape[-1] == 0 else 64).shape == x.shape


@pytest.mark.parametrize("shape", [(0, 3, 16), (2, 0, 16), (2, 0, 3, 16), (2, 3, 0, 16)])
def test_strides_of_nothing_do_not_matter(shape: tuple[int, ...]) -> None:
    every_second = torch.ones([2 * n for n in shape])[tuple(slice(None, None, 2) for _ in shape)]
    assert every_second.stride(-1) == 2
    assert ops.rotate(every_second, 8).shape == shape


def test_the_result_has_no_gradient_and_is_new() -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    before = x.detach().clone()
    assert not ops.rotate(x, 8).requires_grad
    assert torch.equal(x, before)


def test_opcheck() -> None:
    for x in (torch.randn(2, 3, 16), torch.randn(2, 3, 4, 16).transpose(1, 2), torch.empty(0, 2, 16)):
        torch.library.opcheck(schemas.rotate, (x, 8))


@pytest.mark.compile
def test_it_compiles() -> None:
    x = torch.randn(2, 3, 16)
    compiled = torch.compile(lambda x: ops.rotate(x, 16) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), ops.rotate(x, 16) + 1)


@pytest.mark.parametrize(
    ("x", "block", "error", "message"),
    [
        (None, 8, ShapeError, r"^x must be \[T, H, D\] or \[B, H, N, D\] of one of .*, got NoneType$"),
        (torch.ones(2, 8), 8, ShapeError, r"^x must be .*, got \[2, 8\] torch.float32$"),
        (torch.ones(1, 2, 8).double(), 8, ShapeError, r"^x must be .*, got \[1, 2, 8\] torch.float64$"),
        (torch.ones(1, 2, 8), 0, ArgumentError, r"^block must be"),
        (torch.ones(1, 2, 8), 2048, ArgumentError, r"^block must be"),
        (torch.ones(1, 2, 12), 8, ArgumentError, r"^block must be a power of two .* head dim 12, got 8$"),
        (torch.ones(1, 2, 12), 3, ArgumentError, r"^block must be a power of two .* head dim 12, got 3$"),
    ],
)
def test_bad_arguments_are_refused(x: Any, block: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.rotate(x, block)


@pytest.mark.skipif(torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="it runs")
def test_triton_says_why_it_cannot_rotate() -> None:
    with pytest.raises(UnsupportedError, match="backend 'triton' needs"):
        ops.rotate(torch.ones(1, 2, 8), 8, backend="triton")


@pytest.mark.parametrize(
    ("x", "block"),
    [(torch.ones(8), 8), (torch.ones(1, 2, 8).int(), 8), (torch.ones(1, 2, 12), 8), (torch.ones(1, 2, 8), 0)],
)
@pytest.mark.skipif(ops.cpu_kernels() is None, reason="there are no compiled kernels")
def test_the_kernel_itself_refuses_what_it_would_read_wrong(x: torch.Tensor, block: int) -> None:
    with pytest.raises(IndexError, match=r"ArgumentError: (x|block) must"):
        schemas.rotate(x, block)
