"""Which channels turn together is seen from the keys of the same tokens at two places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvloom.integrations.transformers.smoothing.rotations import Rotation, rotation_of

SHIFT = 300
FREQUENCIES = 1e4 ** -(torch.arange(16, dtype=torch.float64) / 16)
OTHERS = 5e5 ** -(torch.arange(16, dtype=torch.float64) / 16)


def keys_of(channels: Tensor, head_dim: int) -> Tensor:
    """``[2, 2, 64, D]``, of which the second turned by FREQUENCIES."""
    torch.manual_seed(0)
    first = torch.randn(2, 64, head_dim)
    rotation = Rotation(channels, FREQUENCIES)
    second = first.clone()
    second[..., channels] = rotation.turned(rotation.pairs(first), torch.full((64,), SHIFT))
    return torch.stack((first, second))


@pytest.mark.parametrize("head_dim", [32, 48])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("are_neighbors", [False, True])
def test_pairs_and_frequencies_are_those_that_explain_the_keys(
    head_dim: int, is_last: bool, are_neighbors: bool
) -> None:
    channels = torch.arange(32) + (head_dim - 32 if is_last else 0)
    pairs = channels.view(16, 2) if are_neighbors else channels.view(2, 16).T
    found = rotation_of(keys_of(pairs, head_dim), [OTHERS, FREQUENCIES], SHIFT)
    assert found is not None
    rotation, turning = found
    assert turning.all()
    assert torch.equal(rotation.channels[:16], pairs) and torch.equal(rotation.frequencies[:16], FREQUENCIES)
    assert sorted(rotation.channels.flatten().tolist()) == list(range(head_dim))
    assert not rotation.frequencies[16:].any()


def test_a_pair_that_turns_otherwise_is_left_out() -> None:
    keys = keys_of(torch.arange(32).view(16, 2), 64)
    keys[1, 1, :, 10] *= -1
    found = rotation_of(keys, [FREQUENCIES], SHIFT)
    assert found is not None
    expected = torch.ones(2, 32, dtype=torch.bool)
    expected[1, 5] = False
    assert torch.equal(found[1], expected)


def test_keys_of_few_tokens_may_differ() -> None:
    keys = keys_of(torch.arange(32).view(16, 2), 64)
    keys[1, :, 7:12] = 3.0
    found = rotation_of(keys, [FREQUENCIES], SHIFT)
    assert found is not None and found[1].all()


def test_keys_that_nothing_explains_have_no_rotation() -> None:
    keys = keys_of(torch.arange(32).view(16, 2), 32)
    assert rotation_of(keys, [OTHERS], SHIFT) is None
