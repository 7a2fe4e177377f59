"""Crops of recurrent states that cannot be: they are refused before anything changes."""

from __future__ import annotations

import pytest
import torch
from integrations.models.test_families import family
from integrations.states.test_rollback import MIXERS, are_same, content, feed, model_of, needs, text
from oracles.pairs import in_turn

from kvloom import KVCache
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers.states.mixers import is_mixer

pytestmark = needs


@pytest.mark.parametrize(("name", "rows"), in_turn(MIXERS, [2, 1]))
def test_more_than_is_kept_is_refused_before_anything_changes(name: str, rows: int) -> None:
    model, ids = model_of(name), text(100, rows)
    cache = KVCache.for_model(model, rollback=4)
    feed(model, cache, ids, [20, *[1] * 30])
    before = content(cache)
    with pytest.raises(StateError, match=r"at least 4\d tokens must stay, before which no recurrent states"):
        cache.crop(-20)
    assert all(map(torch.equal, before, content(cache)))
    assert cache.get_seq_length() == 50
    cache.crop(-4)
    twin = KVCache.for_model(model)
    feed(model, twin, ids, [20, *[1] * 26])
    assert are_same(cache, twin)


@pytest.mark.parametrize("name", MIXERS)
def test_without_rollback_a_crop_is_refused_before_anything_changes(name: str) -> None:
    model, ids = model_of(name), text(30)
    cache = KVCache.for_model(model)
    feed(model, cache, ids, [20, 3])
    before = content(cache)
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(UnsupportedError, match="has a recurrent state, which cannot go back"):
        cache.crop(-1)
    assert all(map(torch.equal, before, content(cache)))
    cache.rollback = 2
    with pytest.raises(StateError, match="at least 23 tokens must stay"):
        cache.crop(-1)
    feed(model, cache, ids[:, 23:], [2])
    assert cache.is_croppable
    cache.crop(-2)
    assert all(map(torch.equal, before, content(cache)))
    cache.rollback = 0
    assert cache.rollback == cache.nbytes_rollback == 0


def test_rollback_is_a_number_and_nothing_where_there_are_no_states() -> None:
    with pytest.raises(ArgumentError, match="rollback must be at least 0, got -1"):
        KVCache.for_model(model_of("qwen3_next"), rollback=-1)
    cache = KVCache.for_model(family("Mistral"), rollback=16)
    assert cache.rollback == 0
    assert cache.is_croppable


def test_a_state_that_is_changed_by_nobody_known_cannot_go_back() -> None:
    model, ids = model_of("qwen3_next"), text(40)
    cache = KVCache.for_model(model, rollback=16)
    feed(model, cache, ids, [20, 2])
    cache.update_recurrent_state(cache.get_recurrent_state(0) * 2, 0)
    assert not cache.is_croppable
    before = content(cache)
    with pytest.raises(UnsupportedError, match="state 0 of layer 0 was changed by no mixer that is known"):
        cache.crop(-1)
    with pytest.raises(UnsupportedError, match="changed by no mixer that is known"):
        cache.fork().crop(-1)
    assert all(map(torch.equal, before, content(cache)))
    cache.reset()
    feed(model, cache, ids, [20, 2])
    cache.crop(-1)


@pytest.mark.compile
def test_a_compiled_step_cannot_be_taken_back() -> None:
    model, ids = model_of("lfm2"), text(40)
    cache = KVCache.for_model(model, rollback=16)
    feed(model, cache, ids, [20])
    feed(torch.compile(model, backend="eager"), cache, ids, [1])
    with pytest.raises(UnsupportedError, match="changed by no mixer that is known"):
        cache.crop(-1)


def test_an_argument_that_cannot_be_cut_is_named() -> None:
    model, ids = model_of("lfm2"), text(40)
    cache = KVCache.for_model(model, rollback=16)
    feed(model, cache, ids, [20])
    feed(model, cache, ids, [4], cu_seq_lens_q=torch.tensor([0, 4]))
    before = content(cache)
    with pytest.raises(UnsupportedError, match=r"Conv was given cu_seq_lens_q \[2\], which cannot be cut"):
        cache.crop(-2)
    assert all(map(torch.equal, before, content(cache)))
    cache.crop(-4)


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_that_changed_since_does_not_compute_what_another_did(name: str) -> None:
    model, ids = model_of(name), text(40)
    cache = KVCache.for_model(model, rollback=16)
    feed(model, cache, ids, [20, 3])
    mixer = next(x for x in model.modules() if is_mixer(type(x)))
    mixer.train()
    before = content(cache)
    with pytest.raises(UnsupportedError, match=f"hooks or attributes of {type(mixer).__name__} are others"):
        cache.crop(-1)
    mixer.eval()  # as it was
    cache.fork().crop(-1)
    next(mixer.parameters()).data.mul_(2)
    with pytest.raises(UnsupportedError, match=f"hooks or attributes of {type(mixer).__name__} are others"):
        cache.crop(-1)
    assert all(map(torch.equal, before, content(cache)))
    cache.crop(-3)  # computes nothing
    feed(model, cache, ids, [5])
    cache.crop(-2)
