"""Inputs that share memory with the cache, carry gradients, or are empty or odd where that has no meaning."""

from __future__ import annotations

import pytest
import torch
from oracles import bits

from kvloom.dialects import pmx
from kvloom.errors import KVError, ShapeError

dynamic = pmx.dynamic_batching


def filled_cache() -> torch.Tensor:
    """B 1, L 1, S 4, H 1, D 8, every element different."""
    return torch.arange(64.0).reshape(1, 1, 2, 4, 1, 8).clone()


@pytest.mark.parametrize("side", ["current_key", "current_value"])
def test_new_tokens_inside_the_cache_are_refused(side: str) -> None:
    cache = filled_cache()
    before = cache.clone()
    new = {"current_key": torch.ones(1, 3, 1, 8), "current_value": torch.ones(1, 3, 1, 8)}
    new[side] = cache[:, 0, 1, 0:3]
    with pytest.raises(ShapeError, match=f"{side} must not overlap cache"):
        pmx.key_value_cache(**new, start_pos=1, cache=cache)
    bits.assert_same_bits(cache, before, "cache")


def test_ragged_new_tokens_inside_the_cache_are_refused() -> None:
    cache = torch.arange(64.0).reshape(4, 1, 2, 1, 8).clone()
    index = [torch.tensor(x) for x in ([0, 3], [0, 4], [0], [1])]
    with pytest.raises(ShapeError, match="current_key must not overlap cache"):
        dynamic.key_value_cache(cache[0:3, 0, 0], torch.ones(3, 1, 8), *index, 3, 4, cache)


def test_new_tokens_elsewhere_in_the_same_memory_are_stored() -> None:
    pool = torch.arange(128.0)
    cache, new = pool[:64].view(1, 1, 2, 4, 1, 8), pool[64:88].view(1, 3, 1, 8)
    expected = new.clone()
    key, value = pmx.key_value_cache(new, new, 0, cache)
    bits.assert_same_bits(key, expected, "key")
    bits.assert_same_bits(value, expected, "value")


def test_storing_tokens_with_a_gradient_leaves_the_cache_without_one() -> None:
    new, cache = torch.ones(1, 3, 1, 8, requires_grad=True), filled_cache()
    key, _ = pmx.key_value_cache(new, new, 0, cache)
    assert not cache.requires_grad
    assert not key.requires_grad
    assert torch.equal(cache[0, 0, 0, :3, 0], torch.ones(3, 8))


@pytest.mark.parametrize("shape", [(1, 1, 0, 8), (1, 1, 2, 0)])
def test_no_heads_or_no_elements_are_refused(shape: tuple[int, ...]) -> None:
    new, cache = torch.ones(shape), torch.zeros(1, 1, 2, 2, *shape[2:])
    with pytest.raises(ShapeError, match="current_key must have heads and elements"):
        pmx.key_value_cache(new, new, 0, cache)


@pytest.mark.parametrize("name", ["is_causal", "is_alibi"])
@pytest.mark.parametrize("value", ["no", None, 2, torch.tensor(True)])
def test_flags_are_flags(name: str, value: object) -> None:
    x, starts = torch.ones(2, 1, 8), torch.tensor([0, 2])
    flags = {"is_causal": True, "is_alibi": False, name: value}
    with pytest.raises(KVError, match=f"{name} must be a bool"):
        dynamic.multi_head_attention(x, x, x, starts, starts, 0, 2, 2, num_heads=1, head_dim=8, **flags)


def test_flags_may_be_the_integers_of_a_graph_attribute() -> None:
    x, starts = torch.randn(2, 1, 8), torch.tensor([0, 2])
    a, b = (
        dynamic.multi_head_attention(
            x, x, x, starts, starts, 0, 2, 2, num_heads=1, head_dim=8, is_causal=flag
        )
        for flag in (1, True)
    )
    assert torch.equal(a, b)
