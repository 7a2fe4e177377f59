"""Snapshots of caches with recurrent states, which are restored, and caches that are frozen."""

from __future__ import annotations

import pytest
import torch
from integrations.states.test_rollback import KINDS, MIXERS, are_same, content, feed, model_of, needs, text
from oracles.pairs import in_turn

from kvloom import KVCache
from kvloom.errors import ArgumentError, StateError

pytestmark = needs


@pytest.mark.parametrize(("name", "kv"), in_turn(MIXERS, KINDS))
def test_a_snapshot_is_restored_any_number_of_times(name: str, kv: str) -> None:
    model, ids = model_of(name), text(60, 2)
    cache = KVCache.for_model(model, kv, rollback=8)
    feed(model, cache, ids, [20, 1])
    snapshot, before = cache.snapshot(), content(cache)
    pages = cache.num_pages_held
    for turn in range(3):
        feed(model, cache, text(20, 2, turn), [1, 5, 2])
        cache.restore(snapshot)
        assert all(map(torch.equal, before, content(cache)))
        assert cache.get_seq_length() == 21
        assert cache.num_pages_held == pages
        assert not cache.is_frozen
    cache.crop(-1)
    feed(model, cache, ids[:, 20:], [1])
    assert are_same(cache, snapshot)
    with pytest.raises(ArgumentError, match="snapshot must be one of this cache, got another KVCache"):
        cache.restore(KVCache.for_model(model, kv))
    with pytest.raises(StateError, match="frozen"):
        snapshot.restore(snapshot)


def test_states_of_a_frozen_cache_stay() -> None:
    model, ids = model_of("granitemoehybrid"), text(30)  # which writes to the states that it is given
    cache = KVCache.for_model(model, rollback=8)
    feed(model, cache, ids, [20])
    frozen = cache.snapshot()
    with pytest.raises(StateError, match="frozen"):
        feed(model, frozen, ids, [1])
    assert are_same(cache, frozen)
    cache.restore(frozen)
    feed(model, cache, ids, [1])
    cache.crop(-1)
    assert are_same(cache, frozen)
