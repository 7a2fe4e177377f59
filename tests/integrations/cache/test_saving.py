"""A saved ``KVCache`` continues with the same logits; forks that were saved together share their pages."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from integrations.models.test_families import FAMILIES, family
from oracles.language_models import make_model
from oracles.round_trips import every_way
from torch import Tensor

from kvloom.caches import PagedLayer, Sequences
from kvloom.errors import ArgumentError, StateError
from kvloom.integrations.transformers import KVCache, KVPool


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def text(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


@every_way
@pytest.mark.parametrize("attention", [None, "kvloom"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", *(x for x in ("Falcon-H1",) if x in FAMILIES)])
def test_a_saved_cache_continues_with_the_same_logits(
    name: str, attention: str | None, again: Callable[[Any], Any]
) -> None:
    model = family(name, attention)
    cache = KVCache.for_model(model, page_size=4)
    model(text(50, rows=2), past_key_values=cache, use_cache=True)
    loaded = again(cache)
    for count in (1, 3):
        logits = [model(text(count, 1, 2), past_key_values=c, use_cache=True).logits for c in (cache, loaded)]
        assert torch.equal(*logits)


@every_way
@pytest.mark.parametrize(
    "options",
    [
        {"kv": "int8:g8"},
        {"kv": "int4:g8"},
        {"kv": "int4:g8,rotate=both"},
        {"kv": "int4:g8,recent=9", "values": "int2:g8"},
        {"static": True, "max_tokens": 80},
        {"static": True, "max_tokens": 80, "kv": "int2:g8"},
    ],
    ids=str,
)
def test_any_kind_of_cache_can_be_saved(options: dict[str, Any], again: Callable[[Any], Any]) -> None:
    model = family("Gemma2", "eager")
    cache = KVCache.for_model(model, **options)
    empty = again(cache)
    for c in (cache, empty):
        model(text(50), past_key_values=c)
    loaded = again(cache)
    logits = [model(text(2, 1), past_key_values=c).logits for c in (cache, loaded, empty)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@every_way
def test_forks_in_one_list_share_their_pages(again: Callable[[Any], Any]) -> None:
    model = make_model()
    cache = KVCache.for_model(model, page_size=4)
    model(text(40), past_key_values=cache)
    forks = [cache, cache.fork()]
    model(text(3, 1), past_key_values=forks[1])
    other = cache.fork()
    model(text(90, 2), past_key_values=other)  # takes pages, and is not saved
    loaded = again(forks)
    assert loaded[0].num_pages_held == loaded[1].num_pages_held == 10 + 1
    expected = [model(text(2, 3), past_key_values=c).logits for c in forks]
    actual = [model(text(2, 3), past_key_values=c).logits for c in loaded]
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    again_expected = [model(text(1, 4), past_key_values=c).logits for c in forks]
    again_actual = [model(text(1, 4), past_key_values=c).logits for c in loaded]
    assert all(torch.equal(a, b) for a, b in zip(again_expected, again_actual, strict=True))


def test_free_pages_and_those_of_others_are_not_written() -> None:
    model = make_model()
    cache = KVCache.for_model(model, page_size=4)
    model(text(400), past_key_values=cache)
    fork = cache.fork()
    fork.crop(-390)
    cache.crop(-1)
    few, many = (len(pickle.dumps(c)) for c in (fork, cache))
    tokens = cache.nbytes_per_token
    assert many - few == pytest.approx(388 * tokens, rel=0.02)


@every_way
def test_a_frozen_cache_stays_frozen(again: Callable[[Any], Any]) -> None:
    model = make_model()
    cache = KVCache.for_model(model)
    model(text(9), past_key_values=cache)
    loaded = again(cache.freeze())
    with pytest.raises(RuntimeError, match="frozen"):
        model(text(1), past_key_values=loaded)
    fork = loaded.fork()
    assert torch.equal(
        model(text(1), past_key_values=fork).logits, model(text(1), past_key_values=cache.fork()).logits
    )


@every_way
def test_a_pool_finds_its_prefixes_again(again: Callable[[Any], Any]) -> None:
    model = make_model()
    pool = KVPool.for_model(model, page_size=4, max_tokens=200)
    cache = pool.begin(text(22))
    model(text(22), past_key_values=cache)
    pool.commit(cache, text(22), "")
    loaded, held = again((pool, cache))
    with pytest.raises(StateError, match=r"pool\.bind\(model\)"):
        loaded.begin(text(22))
    other = make_model()
    other.model.norm.weight.data[0] += 1
    with pytest.raises(ArgumentError, match="model must be the one whose pages were saved"):
        loaded.bind(other)
    bound = make_model()
    loaded.bind(bound).check()
    with pytest.raises(StateError, match="a pool has one model"):
        loaded.bind(other)
    assert loaded.report() == pool.report()
    assert held.num_pages_held == cache.num_pages_held
    found = loaded.begin(text(22))
    assert (found.get_seq_length(), loaded.begin(text(22), "other").get_seq_length()) == (20, 0)
    expected = model(text(22)[:, 20:], past_key_values=pool.begin(text(22))).logits
    assert torch.equal(bound(text(22)[:, 20:], past_key_values=found).logits, expected)
    assert len(pickle.dumps(pool)) < 100_000  # the model is not in it


def test_a_cache_that_an_earlier_release_saved_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of what a model remembers. A residual window is in the sequences of the codes, with one
    number for all rows.
    """
    model = make_model("kvloom")
    cache: Any = KVCache.for_model(model, "int4:g8,recent=24")
    model(text(50, rows=2), past_key_values=cache)
    fork = cache.fork()
    for name in ("remembered", "pair_guard"):
        vars(cache).pop(name)
    for row in cache.sequences[1].rows:
        row.stale = 7
    reduce = Sequences.__reduce__

    def reduced_before(self: Sequences) -> Any:
        load, (made_of, (*attributes, _, is_exact, stale, is_padded), *saved) = reduce(self)
        beside = cache.sequences[1] if self is cache.sequences[0] else None
        return load, (made_of, (*attributes, beside, is_exact, stale[0], is_padded), *saved)

    def state_before(self: PagedLayer) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "residual"}

    monkeypatch.setattr(Sequences, "__reduce__", reduced_before)
    monkeypatch.setattr(PagedLayer, "__getstate__", state_before, raising=False)
    loaded = pickle.loads(pickle.dumps(cache))  # noqa: S301 (our own)
    assert len(loaded.sequences) == 2
    assert len({layer.pages.residual for layer in loaded.layers}) == 1
    assert torch.equal(loaded.fork().layers[0].keys, fork.layers[0].keys)
    more = text(9, 1, 2)
    assert torch.equal(*[model(more, past_key_values=c).logits for c in (loaded, fork)])
