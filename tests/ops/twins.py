"""A backend beside the reference: pools with the same bytes, special values, refusals."""

from __future__ import annotations

import pytest
import torch
from ops.pools import Kind, Pool, as_integers, make_pool
from oracles.bits import assert_same_bits

from kvloom import ops
from kvloom.errors import ArgumentError

SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 5e-39, 1.2e-38, 6e-8, 6.1e-5, 1e-5, 7e-5, 0.5, 1.0, -127.5, 65504.0,
           65520.0, -7e4, 3.38e38, 3.4028e38, float("inf"), -float("inf"), float("nan")]  # fmt: skip


def twins(axes: str, kind: Kind, **sizes: int) -> tuple[Pool, Pool]:
    """Two pools with the same bytes."""
    return make_pool(axes, kind, strided=True, **sizes), make_pool(axes, kind, strided=True, **sizes)


def assert_twins(a: Pool, b: Pool, *, any_nan: bool = False) -> None:
    """Every byte of both pools, gaps included; ``any_nan`` where values were cast."""
    for name in a.bases:
        if any_nan and not a.kind.bits:
            assert_same_bits(a.bases[name], b.bases[name], name, any_nan=True)
        else:
            assert_same_bits(as_integers(a.bases[name]), as_integers(b.bases[name]), name)


def assert_refuses_as_the_reference(backend: str, index: torch.dtype) -> None:
    """Slots outside the cache, in the reference's words, and nothing is written."""
    pool = make_pool("B S H D", Kind(torch.float32))
    x = torch.zeros(3, 2, 8)
    bad, good = torch.tensor([3, 12, 99], dtype=index), torch.tensor([0, 1, 2], dtype=index)
    negative = torch.tensor([1, -4, 2], dtype=index)
    kv = pool.view()
    calls = [
        lambda b: ops.store(x, x, bad, kv, backend=b),
        lambda b: ops.load(bad, kv, backend=b),
        lambda b: ops.load(negative, kv, backend=b),
        lambda b: ops.copy(kv, bad, kv, good, backend=b),
        lambda b: ops.copy(kv, good, kv, negative, backend=b),
    ]
    for call in calls:
        messages = []
        for name in (backend, "reference"):
            with pytest.raises(ArgumentError) as raised:
                call(name)
            assert type(raised.value) is ArgumentError
            messages.append(str(raised.value))
        assert messages[0] == messages[1]
    pool.check()
