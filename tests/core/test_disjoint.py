"""Whether two tensors share memory, to the element."""

from __future__ import annotations

import pytest
import torch

from kvloom.core.memory import expect_disjoint
from kvloom.errors import ShapeError


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((4,), (1,)), ((2, 3), (3, 1)), ((2, 3), (1, 2)), ((3,), (2,))], ids=str
)
def test_one_shared_element_is_refused_and_a_neighbor_is_not(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> None:
    memory = torch.zeros(24, dtype=dtype)
    first = 8
    last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    x = memory.as_strided(shape, strides, first)
    for shared in (memory[: first + 1], memory[last:]):
        for a, b in ((x, shared), (shared, x)):
            with pytest.raises(ShapeError, match=r"^key must not overlap kv"):
                expect_disjoint("key", a, "kv", b)
    for neighbor in (memory[:first], memory[last + 1 :], memory[first:first], torch.zeros(24, dtype=dtype)):
        expect_disjoint("key", x, "kv", neighbor)
        expect_disjoint("key", neighbor, "kv", x)
