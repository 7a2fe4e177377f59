"""A carried cache in a ``KVPool`` and its store: found by its tokens, and never where it would be wrong."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from carry.models import HAS_ROPE_PARAMETERS, WINDOW, continued, prefilled, small, text

from kvloom import KVPool
from kvloom.carry import (
    CarriedCache,
    from_cache,
    from_pool,
    geometry_of,
    llama_state,
    read_llama,
    to_cache,
    to_pool,
)
from kvloom.errors import ArgumentError, KVError, StateError, UnsupportedError
from kvloom.store import KVStore

pytestmark = pytest.mark.model
PAGE, NEXT = 16, text(6, seed=9)
TOKENS = text(40)


def pool_of(model: Any, kv: str = "auto", **options: Any) -> KVPool:
    return KVPool.for_model(model, kv, PAGE, max_tokens=400, **options)


def carried(name: str, kv: str = "auto") -> CarriedCache:
    """Through a state of llama.cpp."""
    model, ids = small(name), TOKENS[0].tolist()
    found, geometry = from_cache(prefilled(model, TOKENS, kv), model, ids), geometry_of(model)
    return read_llama(llama_state(found, geometry, rotated=False if kv != "auto" else None), geometry,
                      rotated=False if kv != "auto" else None, tokens=ids)  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_pool_and_the_next_one_find_it(name: str, tmp_path: Path) -> None:
    """Of 40 tokens the two whole pages, with the bits of what was computed, in a pool and through a store."""
    model, cache = small(name), carried(name)
    wanted = continued(model, prefilled(model, TOKENS[:, : 2 * PAGE]), NEXT)
    with pool_of(model, store=KVStore(f"file://{tmp_path}", read="always")) as pool:
        assert to_pool(cache, pool, salt="a") == 2 * PAGE
        assert pool.begin(TOKENS).get_seq_length() == 0, "found without its salt"
        found = pool.begin(TOKENS, "a")
        assert found.get_seq_length() == 2 * PAGE
        assert torch.equal(continued(model, found, NEXT), wanted)
        assert pool.flush()
    with pool_of(model, store=KVStore(f"file://{tmp_path}", read="always")) as other:
        again = from_pool(other, TOKENS[0].tolist(), "a")
        assert again.tokens == tuple(TOKENS[0, : 2 * PAGE].tolist())
        assert torch.equal(continued(model, to_cache(again, model), NEXT), wanted)
        with pytest.raises(ArgumentError, match="pool must have the first page of the text"):
            from_pool(other, text(40, seed=8)[0].tolist(), "a")


def test_codes_stay_codes_in_a_pool() -> None:
    model, cache = small("qwen2"), carried("qwen2", "int8:g64,rotate=none,smooth=none")
    with pool_of(model, "int8:g32,rotate=none,smooth=none", batch_invariant=False) as pool:
        to_pool(cache, pool)
        again = from_pool(pool, TOKENS[0].tolist())
        assert again.kinds == ("int8:g32",)
        for ours, theirs in zip(again.layers, cache.layers, strict=True):
            for (_, x), (_, y) in zip(ours.sides, theirs.sides, strict=True):
                assert torch.equal(x.load().codes, y.load().codes[: 2 * PAGE])
    with pool_of(model, "int4", batch_invariant=False) as pool:
        with pytest.raises(ArgumentError, match="pool must hold q8_0 without rounding, has int4"):
            to_pool(cache, pool)
        assert to_pool(cache, pool, rounding=True) == 2 * PAGE


def test_nothing_is_found_of_what_is_refused() -> None:
    """Other tokens, another text, another model's weights, and where bits are promised."""
    model, cache = small("llama"), carried("llama")
    ids = [*(cache.tokens or ())]
    other = replace(cache, tokens=(*ids[:3], 7, *ids[4:]))
    with pool_of(model) as pool:
        refused: list[tuple[CarriedCache, type[KVError], str]] = [
            (replace(cache, tokens=None), ArgumentError, "cache must have the ids of its 40 tokens"),
            (other, ArgumentError, "1 of 40 tokens are others, at 3"),
            (carried("qwen2"), ArgumentError, "both keys and values are others"),
        ]
        for wrong, error, message in refused:
            with pytest.raises(error, match=message):
                to_pool(wrong, pool)
        short = from_cache(prefilled(model, TOKENS[:, :9]), model, ids[:9])
        with pytest.raises(ArgumentError, match="at least the 16 tokens of a page, got 9"):
            to_pool(short, pool)
        for tokens in (TOKENS, torch.tensor([other.tokens])):
            assert pool.begin(tokens).get_seq_length() == 0
    other_model = copy.deepcopy(model)
    other_model.set_attn_implementation("kvloom")
    with pool_of(other_model, batch_invariant=True) as pool:
        with pytest.raises(UnsupportedError, match="pool must be without batch invariance"):
            to_pool(cache, pool)


@pytest.mark.skipif(not HAS_ROPE_PARAMETERS, reason="transformers 5 has rope_parameters")
def test_a_text_with_frequencies_of_its_own_is_not_shared() -> None:
    """Keys of more tokens than a dynamic RoPE was trained for are not those of a shorter text's."""
    model = small("dynamic")
    cache = from_cache(prefilled(model, TOKENS), model, TOKENS[0].tolist())
    with pool_of(model) as pool:
        with pytest.raises(StateError, match="each length of more than 31 tokens has its own RoPE"):
            to_pool(cache, pool)
        assert pool.begin(TOKENS[:, :20]).get_seq_length() == 0


def test_a_window_lacks_what_a_shorter_prefix_would_see() -> None:
    model = small("gemma3")
    tokens = text(3 * WINDOW)
    cache = from_cache(prefilled(model, tokens), model, tokens[0].tolist())
    with pool_of(model) as pool:
        with pytest.raises(UnsupportedError, match="got layers with a window"):
            to_pool(cache, pool)
        found = pool.begin(tokens)
        with torch.no_grad():
            model(tokens, past_key_values=found)
        pool.commit(found, tokens)
        again = from_pool(pool, tokens[0].tolist())
        wanted = continued(model, prefilled(model, tokens), NEXT)
        assert torch.equal(continued(model, to_cache(again, model), NEXT), wanted)
