"""Random schedules of pools of models with recurrent states: a found prefix goes on as it does cold."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import is_whole, times
from integrations.pool.test_pool_states import (
    FAMILIES,
    GRID,
    KINDS,
    asked,
    logits_of,
    pool_of,
    pytestmark,
    text,
)
from oracles.pairs import pairwise
from oracles.stateful_models import CACHES_SEE_STATES, mixers, small_model
from torch import Tensor

from kvloom import KVPool
from kvloom.store import KVStore

__all__ = ["pytestmark"]
SCHEDULES = times(1)
ROOMS = ["all", "pages", "states"]
SCHEDULED = (
    pairwise(FAMILIES, KINDS, ROOMS)
    if is_whole()
    else [*zip(mixers(), itertools.cycle(KINDS), itertools.cycle(ROOMS[::-1] + ROOMS[:1]), strict=False)]
)
LONGEST = 16
"""Tokens that a cache can go back by."""
GOES_BACK = CACHES_SEE_STATES


@functools.cache
def pool_that_stays_empty(name: str, kv: str, dtype: torch.dtype) -> tuple[Any, KVPool]:
    """A model that nobody changes, and a pool in which nothing is ever committed."""
    model = small_model(name).to(dtype)
    return model, pool_of(model, kv)


def fed(model: Any, cache: Any, ids: Tensor, draw: random.Random) -> Tensor:
    """The text of a cache after some steps, which are not on the grid, some of them taken back."""
    for _ in range(draw.choice([0, 0, 1, 2])):
        new = text(draw.choice([1, 1, 5, GRID]), draw.randrange(1 << 30))
        ids = torch.cat([ids, new], 1)
        logits_of(model, cache, ids)
    return ids


@pytest.mark.campaign
@torch.no_grad()
@pytest.mark.parametrize("seed", range(SCHEDULES))
@pytest.mark.parametrize(("name", "kv", "room"), SCHEDULED)
def test_random_schedules_have_the_bits_that_they_have_cold(
    name: str, kv: str, room: str, seed: int, tmp_path: Path
) -> None:
    """Texts begin with others, go on and back, are forked, committed, saved, loaded, read from a store."""
    draw = random.Random(f"{name} {kv} {room} {seed}")
    is_half = name != "inkling2" and draw.random() < 0.1  # which computes in float32 alone
    dtype = torch.bfloat16 if is_half else torch.float32
    model, empty = pool_that_stays_empty(name, kv, dtype)
    store = f"file://{tmp_path}" if draw.random() < 0.5 else None
    state_bytes = empty.report()["states"]["nbytes"]
    options: dict[str, Any] = {"max_tokens": 560 if room == "pages" else 4000}
    options["max_state_bytes"] = state_bytes * (2 if room == "states" else 100)
    stores = [] if store is None else [KVStore(store, read="always")]
    pool = pool_of(model, kv, store=stores[0] if stores else None, **options)
    texts, live = [text(5 * GRID, seed)], list[Any]()
    for _ in range(6):
        ids = draw.choice(texts)[:, : draw.randrange(1, 5 * GRID + 1)]
        if draw.random() < 0.6:
            ids = torch.cat([ids, text(draw.randrange(1, 2 * GRID), draw.randrange(1 << 30))], 1)
        salt = draw.choice(["", "", "other"])
        wanted, cache = logits_of(model, empty.begin(ids), ids), pool.begin(ids, salt)
        found = int(cache.get_seq_length())
        assert found % GRID == 0
        if is_back := GOES_BACK and draw.random() < 0.3:
            cache.rollback = LONGEST
        assert torch.equal(logits_of(model, cache, ids), wanted[:, found:])
        ids = fed(model, cache, ids, draw)
        if is_back:
            num_removed = draw.randrange(min(LONGEST, ids.shape[1] - found))
            cache.crop(-num_removed)
            ids = fed(model, cache, ids[:, : ids.shape[1] - num_removed], draw)
        if draw.random() < 0.2:
            logits_of(model, cache.fork(), torch.cat([ids, text(GRID)], 1))
        if draw.random() < 0.2:
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([1]))
        if draw.random() < 0.8:
            pool.commit(cache, ids)
            pool.check()
        if draw.random() < 0.1:
            if stores:
                pool.flush()
                stores.append(KVStore(str(store), read="always"))
                pool = pool_of(model, kv, store=stores[-1], **options)
            else:
                pool = pickle.loads(pickle.dumps(pool)).bind(model)  # noqa: S301 (our own)
        texts.append(ids)
        live[:] = [cache] if ids.shape[1] <= 100 else []  # which holds its pages
        del cache
    last = text(2 * GRID + 1, 1 << 31)
    assert [asked(model, pool, last)[0] for _ in range(2)] == [0, 2 * GRID]
    for opened in stores:
        opened.close()
