"""Replays of texts with recurrent states beside a real pool that is asked for the same texts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from integrations.pool.test_pool_states import FAMILIES, GRID, asked, pool_of, text
from oracles.stateful_models import stateful_model
from torch import Tensor

from kvloom.integrations.transformers.models.layer_specs import StatefulLayer
from kvloom.simulation.below import SimulatedStore
from kvloom.simulation.states import StatefulPool
from kvloom.store import KVStore

pytestmark = pytest.mark.skipif(
    StatefulLayer is type(None), reason="this transformers has no recurrent states in its caches"
)
PAGE = 8


def texts(seed: int, count: int, longest: int) -> list[Tensor]:
    """Texts that begin like earlier ones, up to any token, and go on as none before; some end on the grid."""
    draw, made = random.Random(seed), [text(3 * GRID, seed)]
    while len(made) < count:
        begin = draw.choice(made[-9:])
        kept = begin[:, : draw.randrange(1, begin.shape[1] + 1)]
        new = text(draw.randrange(0, 2 * GRID), draw.randrange(1 << 30))
        made.append(torch.cat([kept, new], 1)[:, :longest])
        if draw.random() < 0.4:
            made[-1] = made[-1][:, : max(made[-1].shape[1] // GRID, 1) * GRID]
    return made


def pages_of(ids: Tensor, numbers: dict[tuple[int, ...], int]) -> list[int]:
    """A number for each page, the same for the same tokens up to its end."""
    tokens = ids[0].tolist()
    ends = range(PAGE, len(tokens) + PAGE, PAGE)
    return [numbers.setdefault(tuple(tokens[:end]), len(numbers)) for end in ends]


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize(
    ("num_pages", "num_states", "interval", "policy"),
    [
        (400, 400, GRID, "lru"), (400, 3, GRID, "ours"), (32, 400, GRID, "ours"), (24, 5, GRID, "lru"),
        (30, 1, GRID, "lru"), (30, 6, 2 * PAGE, "lru"),
    ],
)  # fmt: skip
def test_a_replay_finds_and_keeps_what_a_pool_does(
    num_pages: int, num_states: int, interval: int, policy: str, has_store: bool
) -> None:
    """With a store that has room for all, too; what memory lacks is read from there."""
    model: Any = stateful_model("lfm2" if "lfm2" in FAMILIES else FAMILIES[0])
    nbytes = pool_of(model).report()["states"]["nbytes"]
    room: dict[str, Any] = {"max_tokens": num_pages * PAGE, "max_state_bytes": num_states * nbytes}
    if has_store:
        url = f"memory://replayed-{num_pages}-{num_states}-{interval}"
        room["store"] = KVStore(url, read="always")
    pool = pool_of(model, page_size=PAGE, state_interval=interval, policy=policy, **room)
    below = SimulatedStore(10**9, PAGE, 1) if has_store else None
    replayed = StatefulPool(num_pages, num_states, PAGE, interval, policy, below)
    numbers: dict[tuple[int, ...], int] = {}
    for ids in texts(num_pages + num_states, 25, 5 * GRID):
        found, _ = asked(model, pool, ids)
        assert pool.flush()
        assert replayed.ask(pages_of(ids, numbers), ids.shape[1]) * PAGE == found
        states = pool.report()["states"]
        assert replayed.num_kept == states["evictable"] and states["active"] == 0
    assert (replayed.num_written > replayed.num_kept) == (num_states < 400)
    assert (replayed.num_read > 0) == (has_store and min(num_pages, num_states) < 400)
    pool.close()


def test_states_that_a_text_has_are_not_evicted_for_those_of_a_longer_prefix_below() -> None:
    """Room for the states of one prefix, which is in memory; the store has those of a longer one."""
    model: Any = stateful_model("lfm2" if "lfm2" in FAMILIES else FAMILIES[0])
    nbytes = pool_of(model).report()["states"]["nbytes"]
    pool = pool_of(model, store=KVStore("memory://one-prefix", read="always"), max_state_bytes=nbytes)
    replayed = StatefulPool(2000 // PAGE, 1, PAGE, GRID, "lru", SimulatedStore(10**9, PAGE, 1))
    numbers: dict[tuple[int, ...], int] = {}
    ids, found = text(3 * GRID + 1), list[int]()
    for asked_for in (ids, ids[:, : GRID + 1], ids):
        found.append(asked(model, pool, asked_for)[0])
        assert pool.flush()
        assert replayed.ask(pages_of(asked_for, numbers), asked_for.shape[1]) * PAGE == found[-1]
    assert found == [0, 0, GRID]
    pool.close()
