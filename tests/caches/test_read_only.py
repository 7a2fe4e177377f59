"""Tensors that were gathered from a cache: they compute as any other and refuse every write."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvloom.caches.layers.read_only import ReadOnly
from kvloom.errors import UnsupportedError

WRITES: dict[str, Callable[[Tensor], object]] = {
    "method": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.ones(2, 3)),
    "item": lambda x: x.__setitem__((0, 0), 1),
    "view": lambda x: x[0].fill_(1),
    "view of a view": lambda x: x.transpose(0, 1)[1:].add_(1),
    "reshape": lambda x: x.reshape(-1).mul_(2),
    "detach": lambda x: x.detach().zero_(),
    "data": lambda x: x.data.zero_(),
    "data is assigned": lambda x: setattr(x, "data", torch.ones(2, 3)),
    "augmented": lambda x: x.__iadd__(1),
    "out": lambda x: torch.add(x, 1, out=x),
    "function": torch.relu_,
    "inplace": lambda x: torch.nn.functional.relu(x, inplace=True),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "same dtype": lambda x: x.float().zero_(),
    "unbind": lambda x: x.unbind()[0].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_raises_and_changes_nothing(write: Callable[[Tensor], object]) -> None:
    source = torch.arange(6.0).view(2, 3)
    x = ReadOnly.of(source)
    with pytest.raises(UnsupportedError, match="cannot be changed in place"):
        write(x)
    assert torch.equal(source, torch.arange(6.0).view(2, 3))


def test_numpy_is_read_only() -> None:
    x = ReadOnly.of(torch.zeros(3))
    for array in (x.numpy(), np.asarray(x)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_what_is_computed_is_a_tensor_as_any_other() -> None:
    x = ReadOnly.of(torch.ones(2, 3))
    for made in (x + 1, torch.cat([x, x]), x.clone(), x.half(), x @ x.mT, copy.deepcopy(x)):
        assert type(made) is Tensor
        made.zero_()
    assert type(pickle.loads(pickle.dumps(x))) is Tensor  # noqa: S301 (our own)
    other = torch.zeros(2, 3)
    other.copy_(x)
    other += x
    torch.add(x, x, out=other)
    assert torch.equal(x, torch.ones(2, 3))
    assert torch.equal(other, torch.full((2, 3), 2.0))
    assert "1." in repr(x)
