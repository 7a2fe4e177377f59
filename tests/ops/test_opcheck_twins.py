"""Operators that are wrong on purpose: the check that all others pass must refuse each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing._internal.optests import OpCheckError

LIB = torch.library.Library("kvloom_test", "DEF")


def write(key: Tensor, slots: Tensor, cache: Tensor) -> None:
    cache[slots] = key


def read(slots: Tensor, cache: Tensor) -> Tensor:
    return cache[slots].float()


def fake_read(slots: Tensor, cache: Tensor) -> Tensor:
    return cache.new_empty((slots.shape[0], *cache.shape[1:]), dtype=torch.float32)


def define(schema: str, real: Callable[..., object], fake: Callable[..., object]) -> None:
    name = schema.split("(")[0]
    LIB.define(schema)
    LIB.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvloom_test::{name}", fake, lib=LIB)


STORE = "(Tensor key, Tensor slots, Tensor(a!) cache) -> ()"
LOAD = "(Tensor slots, Tensor cache) -> Tensor"
define(f"good_store{STORE}", write, lambda key, slots, cache: None)
define(f"good_load{LOAD}", read, fake_read)
define("hidden_write(Tensor key, Tensor slots, Tensor cache) -> ()", write, lambda key, slots, cache: None)
define(f"fake_shape{LOAD}", read, lambda slots, cache: fake_read(slots, cache)[:, :1])
define(f"fake_rank{LOAD}", read, lambda slots, cache: fake_read(slots, cache)[0])
define(f"fake_dtype{LOAD}", read, lambda slots, cache: fake_read(slots, cache).half())
define(
    f"fake_strides{LOAD}", read, lambda slots, cache: fake_read(slots, cache).transpose(1, 2).contiguous().mT
)
define(f"alias{LOAD}", lambda slots, cache: cache[:2], lambda slots, cache: torch.empty_like(cache[:2]))
define(
    "alias_of_input(Tensor key, Tensor slots, Tensor(a!) cache) -> Tensor",
    lambda key, slots, cache: (write(key, slots, cache), key)[1],
    lambda key, slots, cache: torch.empty_like(key),
)


def arguments(name: str) -> tuple[Tensor, ...]:
    """New tensors, the cache full of values that no case writes."""
    slots, cache = torch.tensor([2, 0]), torch.full((4, 3, 8), -777.0)
    is_store = "key" in str(getattr(torch.ops.kvloom_test, name).default._schema)
    return (torch.randn(2, 3, 8), slots, cache) if is_store else (slots, cache)


@pytest.mark.parametrize("name", ["good_store", "good_load"])
def test_a_right_operator_passes(name: str) -> None:
    results = torch.library.opcheck(getattr(torch.ops.kvloom_test, name).default, arguments(name))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hidden_write", "not defined as mutable but was mutated"),
        ("fake_shape", "[Ss]hape"),
        ("fake_rank", "[Ss]hape|dim"),
        ("fake_dtype", "[Dd]type"),
        ("fake_strides", "[Ss]tride"),
        ("alias", "alias"),
        ("alias_of_input", "alias"),
    ],
)
def test_a_wrong_operator_is_refused(name: str, reason: str) -> None:
    with pytest.raises(OpCheckError, match=reason):
        torch.library.opcheck(getattr(torch.ops.kvloom_test, name).default, arguments(name))


def test_a_hidden_write_of_equal_values_goes_unseen() -> None:
    """Why every case has a cache of its own: the check compares before and after."""
    key, slots, cache = arguments("hidden_write")
    cache[slots] = key
    results = torch.library.opcheck(torch.ops.kvloom_test.hidden_write.default, (key, slots, cache))
    assert set(results.values()) == {"SUCCESS"}
