"""Whatever an operator is given, it answers or refuses: no crash, no byte changed by a call that raises, and
none ever outside the tensors of the call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from campaign import times
from hostile.arguments import hostile
from hostile.calls import BARE, PUBLIC, Call
from hostile.dialect_calls import DIALECTS
from torch import Tensor

from kvloom.errors import KVError

NUM_CALLS = times(150)
GUARD = 256  # bytes before and behind each tensor


def guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A buffer of random bytes, and ``x`` in the middle of it."""
    extent = 1 + sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    buffer = torch.randint(0, 256, (extent * x.itemsize + 2 * GUARD,), dtype=torch.uint8)
    inside = buffer[GUARD:-GUARD].view(x.dtype).as_strided(x.shape, x.stride())
    if x.dtype == torch.bits2x4:
        inside.view(torch.uint8).copy_(x.view(torch.uint8))
        return buffer, inside
    return buffer, inside.copy_(x)


def spoil(rng: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    """One to three arguments changed."""
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    chosen = rng.sample(sorted(given), min(len(given), rng.choice((1, 1, 2, 3))))
    return given | {name: hostile(rng, given[name], tensors) for name in chosen}


def attack(make: Callable[[random.Random], Call], seed: int, refusals: tuple[type[Exception], ...]) -> bool:
    """Make one spoiled call; returns whether it was refused."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    function, given = make(rng)
    unique = {id(x): guarded(x) for x in given.values() if isinstance(x, Tensor)}
    buffers = [buffer for buffer, _ in unique.values()]
    spoiled = spoil(
        rng, {name: unique[id(x)][1] if isinstance(x, Tensor) else x for name, x in given.items()}
    )
    before = [buffer.clone() for buffer in buffers]
    try:
        function(**spoiled)
    except refusals:
        for now, then in zip(buffers, before, strict=True):
            assert torch.equal(now, then), "a refused call wrote something"
        return True
    for now, then in zip(buffers, before, strict=True):
        for edge in (slice(GUARD), slice(-GUARD, None)):
            assert torch.equal(now[edge], then[edge]), "a call wrote outside its tensors"
    return False


@pytest.mark.campaign
@pytest.mark.parametrize("make", BARE, ids=lambda make: make.__name__)
def test_bare_operators_stay_within_their_tensors(make: Callable[[random.Random], Call]) -> None:
    refused = sum(attack(make, seed, (Exception,)) for seed in range(NUM_CALLS))
    assert 0 < refused < NUM_CALLS


@pytest.mark.campaign
@pytest.mark.parametrize("make", (*PUBLIC, *DIALECTS), ids=lambda make: make.__name__)
def test_public_functions_refuse_in_our_words(make: Callable[[random.Random], Call]) -> None:
    refused = sum(attack(make, seed, (KVError,)) for seed in range(NUM_CALLS))
    assert 0 < refused < NUM_CALLS


@pytest.mark.parametrize("make", (*BARE, *PUBLIC, *DIALECTS), ids=lambda make: make.__name__)
def test_calls_are_good_before_they_are_spoiled(make: Callable[[random.Random], Call]) -> None:
    for seed in range(20):
        function, given = make(random.Random(seed))
        function(**given)
