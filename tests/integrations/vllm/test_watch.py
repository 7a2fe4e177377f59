"""Which changes of a model's weights are seen, and which are none; without vLLM."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

pytest.importorskip("xxhash")

from kvloom.errors import UnsupportedError
from kvloom.integrations.vllm.storing.watch import WeightWatch, model_of


class Layer(nn.Module):
    """With a fused weight, one that is empty since a function has it packed, and a table."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.attend = nn.Identity()
        self.qkv = nn.Linear(64, 96, bias=False, dtype=dtype)
        self.packed = nn.Linear(64, 64, dtype=dtype)
        held = self.packed.weight.detach().clone()
        self.packed.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        self.packed.multiply = lambda x: x @ held.T
        self.register_buffer("table", torch.randn(512, 64, dtype=dtype), persistent=False)
        self.register_buffer("alike", torch.ones(1, 1).expand(64, 64), persistent=False)
        self.register_parameter("none", None)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(128, 64, dtype=dtype), Layer(dtype), Layer(dtype)).requires_grad_(False)


def packed_again(x: nn.Module) -> None:
    x[2].packed.multiply = lambda x: x


def without_packed(x: nn.Module) -> None:
    del x[2].packed.multiply


def another(x: nn.Module) -> None:
    x[1].qkv.weight = nn.Parameter(x[1].qkv.weight.clone())


def elsewhere(x: nn.Module) -> None:
    x[1].qkv.weight.data = x[1].qkv.weight.data.clone()


def more(x: nn.Module) -> None:
    x[1].register_buffer("other", torch.zeros(1))


def nothing(x: nn.Module) -> None:
    x[0].weight = None


def another_layer(x: nn.Module) -> None:
    x[1].packed = nn.Linear(64, 64)


CHANGES: list[Callable[[nn.Module], object]] = [
    lambda x: x[1].qkv.weight.mul_(1.5),
    lambda x: x[1].qkv.weight.data.mul_(1.5),
    lambda x: x[1].qkv.weight.data[64:80].add_(0.01),
    lambda x: x[2].table.copy_(torch.randn(512, 64)),
    lambda x: x[2].table.data.neg_(),
    lambda x: x[2].packed.bias.data.fill_(float("nan")),
    packed_again,
    without_packed,
    another,
    elsewhere,
    more,
    nothing,
    another_layer,
    lambda x: x.append(nn.Linear(2, 2)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_stays(change: Callable[[nn.Module], object], dtype: torch.dtype) -> None:
    watched = model(dtype)
    watch = WeightWatch(watched)
    assert not watch.is_changed() and not watch.is_changed(exactly=True)
    change(watched)
    assert watch.is_changed() and watch.is_changed(exactly=True)


def test_what_a_forward_does_is_none() -> None:
    watched = model()
    watched[0].weight.data[3].fill_(float("nan"))
    watch = WeightWatch(watched)
    watched[1].qkv(watched[0](torch.arange(9)))
    watched.eval()
    watched[1].count = 3
    assert not watch.is_changed(exactly=True)


def test_one_element_is_seen_exactly() -> None:
    for at in range(0, 128 * 64, 97):
        watched = model()
        watch = WeightWatch(watched)
        watched[0].weight.data.view(-1)[at] += 1
        assert watch.is_changed(exactly=True), at


def test_a_change_that_is_taken_back_stays() -> None:
    watched = model()
    watch = WeightWatch(watched)
    watched[0].weight.data.neg_()
    assert watch.is_changed()
    watched[0].weight.data.neg_()
    assert watch.is_changed(exactly=True)


def test_a_tensor_that_was_replaced_is_not_kept() -> None:
    watched = model()
    watch = WeightWatch(watched)
    old = weakref.ref(watched[0].weight.untyped_storage())
    assert old() is not None
    watched[0].weight = nn.Parameter(torch.zeros(128, 64))
    gc.collect()
    assert old() is None and watch.is_changed()


def test_the_model_of_a_layer_is_found() -> None:
    first, second = nn.ModuleDict({"model": model()}), nn.ModuleDict({"model": model()})
    assert model_of(first["model"][1].attend) is first
    assert model_of(second["model"][2].attend) is second
    with pytest.raises(
        UnsupportedError, match="layers must be modules of a model for a store, got one that is in no model"
    ):
        model_of(nn.Identity())
