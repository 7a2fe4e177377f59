"""After something went wrong a cache is as it was, says that it is not whole, or can be taken back."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from integrations.models.test_families import FAMILIES, family
from oracles.interrupts import interrupted
from oracles.language_models import make_model
from torch import Tensor
from transformers.cache_utils import Cache

from kvloom.caches import CacheFormat, PagedLayer, Sequences
from kvloom.caches.tensors.storage import Storage
from kvloom.core.specs import KVSpec
from kvloom.errors import ArgumentError, OutOfPages, ShapeError, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool
from kvloom.integrations.transformers.states.rollback import Rollback


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def text(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


@contextmanager
def broken_layer(model: Any) -> Iterator[None]:
    """A forward raises when it comes to the second layer."""
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        yield
    hook.remove()


def lengths(cache: KVCache) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers]


@pytest.mark.parametrize(("name", "new"), [("Llama", 5), ("Gemma2", 5), ("Mistral", 5), ("Mistral", 90)])
def test_a_forward_that_broke_off_is_noticed_and_can_be_taken_back(name: str, new: int) -> None:
    model = family(name, "eager", num_hidden_layers=4)
    cache = KVCache.for_model(model, page_size=4)
    model(text(20), past_key_values=cache)
    expected = model(text(3, 2), past_key_values=cache.fork()).logits
    with broken_layer(model):
        model(text(new, 1), past_key_values=cache)
    with pytest.raises(StateError, match=r"layers must have one length, got \[20, \d+\]"):
        model(text(3, 2), past_key_values=cache)
    cache.crop(-new)
    assert lengths(cache) == [20] * 4
    assert torch.equal(model(text(3, 2), past_key_values=cache).logits, expected)


@pytest.mark.parametrize("count", [6, 40])
def test_a_full_cache_of_several_windows_stays_as_it_was(count: int) -> None:
    model = family("Gemma2", "eager")
    cache = KVCache.for_model(model, page_size=4, max_tokens=64)
    model(text(60), past_key_values=cache)
    expected = model(text(2, 2), past_key_values=cache.fork()).logits
    with pytest.raises(OutOfPages, match=f"max_tokens must be at least .* to hold {count} more tokens"):
        model(text(count, 1), past_key_values=cache)
    assert lengths(cache) == [60] * 4
    assert torch.equal(model(text(2, 2), past_key_values=cache).logits, expected)


def test_a_first_prompt_that_does_not_fit_leaves_an_empty_cache() -> None:
    model = family("Gemma2", "eager")
    cache = KVCache.for_model(model, page_size=4, max_tokens=64)
    with pytest.raises(OutOfPages):
        model(text(70, rows=2), past_key_values=cache)
    assert (lengths(cache), cache.num_rows) == ([0] * 4, 0)
    model(text(10), past_key_values=cache)


@pytest.mark.parametrize("name", [x for x in ("Qwen3-Next", "Falcon-H1") if x in FAMILIES])
def test_a_frozen_cache_keeps_its_recurrent_states(name: str) -> None:
    model = family(name)
    cache = KVCache.for_model(model)
    model(text(9), past_key_values=cache, use_cache=True)
    cache.freeze()
    before = model(text(3, 1), past_key_values=cache.fork(), use_cache=True).logits
    with pytest.raises(StateError, match="frozen"):
        model(text(3, 2), past_key_values=cache, use_cache=True)
    after = model(text(3, 1), past_key_values=cache.fork(), use_cache=True).logits
    assert torch.equal(after, before)


@pytest.mark.parametrize("rollback", [0, 8])
@pytest.mark.skipif("Qwen3-Next" not in FAMILIES, reason="this transformers has no Qwen3-Next")
@pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="states of this transformers change unseen")
def test_states_that_are_a_step_ahead_of_the_keys_are_noticed(rollback: int) -> None:
    """The first layer has a recurrent state and no keys, so that all keys have one length."""
    model = family("Qwen3-Next")
    cache = KVCache.for_model(model, rollback=rollback)
    model(text(20), past_key_values=cache, use_cache=True)
    fork, snapshot = cache.fork(), cache.snapshot()
    expected = model(text(3, 2), past_key_values=cache.fork(), use_cache=True).logits
    with broken_layer(model):
        model(text(1, 1), past_key_values=cache, use_cache=True)
    for broken in (cache, cache.fork()):
        with pytest.raises(StateError, match=r"recurrent states of layers \[0\] that are a step ahead"):
            model(text(3, 2), past_key_values=broken, use_cache=True)
    assert torch.equal(model(text(3, 2), past_key_values=fork, use_cache=True).logits, expected)
    other = cache.fork()
    other.reset()
    model(text(20), past_key_values=other, use_cache=True)
    if rollback:
        cache.crop(-1)
    else:
        cache.restore(snapshot)
    for mended in (cache, other):
        assert torch.equal(model(text(3, 2), past_key_values=mended, use_cache=True).logits, expected)


@pytest.mark.parametrize("module", ["kvloom.caches.tensors.storage", "kvloom.paging.pool"])
def test_ctrl_c_while_a_cache_grows_leaves_it_and_its_forks_whole(module: str) -> None:
    model = make_model("sdpa", num_layers=2)

    def start() -> tuple[KVCache, KVCache]:
        cache = KVCache.for_model(model, page_size=4)
        model(text(20), past_key_values=cache)
        return cache, cache.fork()

    def interrupt() -> None:
        raise KeyboardInterrupt  # at once, also where Ctrl-C waits

    def step(cache: KVCache, at: int) -> int:
        grow = partial(model, text(1, 1), past_key_values=cache)
        return interrupted(at, grow, interrupt, module, ("grow", "_reallocate"))

    expected = model(text(3, 2), past_key_values=start()[0]).logits
    num_lines = step(start()[0], 0)
    assert num_lines > 10
    for at in range(1, num_lines + 1):
        cache, fork = start()
        assert step(cache, at) == at
        if max(lengths(cache)) > 20:
            cache.crop(-1)
        for whole in (cache, fork):
            assert torch.equal(model(text(3, 2), past_key_values=whole).logits, expected), at


@pytest.mark.skipif("Qwen3-Next" not in FAMILIES, reason="this transformers has no Qwen3-Next")
def test_ctrl_c_while_tokens_are_removed_leaves_keys_and_states_alike(monkeypatch: Any) -> None:
    model = family("Qwen3-Next")
    cache = KVCache.for_model(model, rollback=8, page_size=4)
    for count in (20, 3):
        model(text(count, count), past_key_values=cache, use_cache=True)
    fork = cache.fork()
    fork.crop(-2)
    expected = model(text(3, 2), past_key_values=fork, use_cache=True).logits
    return_to = Rollback.return_to

    def interrupted_return(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        return_to(*args)

    monkeypatch.setattr(Rollback, "return_to", interrupted_return)
    with pytest.raises(KeyboardInterrupt):
        cache.crop(-2)
    assert cache.get_seq_length() == 21
    assert torch.equal(model(text(3, 2), past_key_values=cache, use_cache=True).logits, expected)


def test_reset_leaves_a_fork_without_tokens_usable() -> None:
    model = make_model()
    cache = KVCache.for_model(model)
    model(text(9), past_key_values=cache)
    fork = cache.fork()
    fork.crop(-9)
    cache.reset()
    model(text(4), past_key_values=fork)
    assert fork.get_seq_length() == 4


def test_reset_forgets_that_windows_were_recorded() -> None:
    model = family("Mistral")
    cache = KVCache.for_model(model, page_size=4)
    cache.sequences[0].is_recording = True
    model(text(200), past_key_values=cache)
    cache.reset()
    model(text(200), past_key_values=cache)
    assert cache.num_pages_held < 15


def test_no_tokens_after_a_prompt_beyond_the_window() -> None:
    layer = PagedLayer(CacheFormat(page_size=4), Sequences(CacheFormat(page_size=4), window=10))
    x = torch.randn(2, 2, 100, 8)
    layer.append(x, x)
    keys, _ = layer.append(x[:, :, :0], x[:, :, :0]).gather(torch.float32)
    assert torch.equal(keys, x[:, :, -9:])


def test_layers_of_one_batch_may_be_on_different_devices() -> None:
    sequences = Sequences(CacheFormat(page_size=4))
    spec = KVSpec(1, 2, 8)
    sequences.reserve(1, 3)
    for device in (torch.device("cpu"), torch.device("meta"), torch.device("cpu")):
        assert sequences.place(0, 3, Storage(spec, spec, 4, device)).lengths.device == device


def test_an_integer_mask_is_refused() -> None:
    model = make_model("kvloom")
    mask = torch.ones(6, 6, dtype=torch.int64).tril()[None, None]
    with pytest.raises(ShapeError, match="mask must be"):
        model(text(6), attention_mask=mask, use_cache=False)


def test_a_mask_wider_than_a_window_fits_until_the_window_has_evicted_a_token() -> None:
    model = family("Mistral", "kvloom")
    cache = KVCache.for_model(model)
    wide = torch.zeros(1, 1, 5, 9).masked_fill(torch.ones(5, 9, dtype=torch.bool).triu(1), float("-inf"))
    with torch.no_grad():
        logits = model(text(5), attention_mask=wide, past_key_values=cache).logits
        torch.testing.assert_close(logits, model(text(5), use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_a_mask_of_all_tokens_does_not_fit_a_window() -> None:
    model = family("Mistral", "kvloom")
    cache = KVCache.for_model(model)
    model(text(20), past_key_values=cache)
    with pytest.raises(ArgumentError, match="attention_mask must have 4 axes and 8 columns"):
        model(text(1), attention_mask=torch.zeros(1, 1, 1, 21), past_key_values=cache)


# --- pools --------------------------------------------------------------------------------------------------


def committed(model: Any, pool: KVPool, tokens: Tensor) -> KVCache:
    cache = pool.begin(tokens)
    model(tokens, past_key_values=cache)
    pool.commit(cache, tokens)
    return cache


def test_pages_that_only_some_rows_know_are_let_go() -> None:
    model = make_model()
    pool = KVPool.for_model(model, page_size=4, max_tokens=200)
    committed(model, pool, text(18))
    gc.collect()
    pool.begin(torch.cat([text(18), text(18, 5)]))
    pool.check()
    assert pool.report()["active"] == 0


@pytest.mark.parametrize("name", ["Llama", *(x for x in ("Falcon-H1",) if x in FAMILIES)])
def test_ctrl_c_while_a_pool_is_used_loses_no_page(name: str) -> None:
    model = make_model(num_layers=2) if name == "Llama" else family(name, num_hidden_layers=2)
    options: dict[str, Any] = {} if name == "Llama" else {"state_interval": 8}
    texts = [text(30, 1), torch.cat([text(30, 1)[:, :17], text(20, 2)], 1), text(38, 3)]
    expected = [model(x, use_cache=False).logits[0, -1] for x in texts]

    def computed(pool: KVPool, tokens: Tensor, at: tuple[int, int] = (0, 0)) -> list[int]:
        found: list[KVCache] = []
        counts = [interrupted(at[0], lambda: found.append(pool.begin(tokens)))]
        for cache in found:
            new = tokens[:, int(cache.get_seq_length()) :]
            logits = model(new, past_key_values=cache, use_cache=True).logits[0, -1]
            wanted = expected[[x is tokens for x in texts].index(True)]
            torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
            counts.append(interrupted(at[1], lambda: pool.commit(cache, tokens)))  # noqa: B023
        return counts

    def full() -> KVPool:
        """A pool in which more of others evicts what two texts left."""
        pool = KVPool.for_model(model, page_size=4, max_tokens=72, **options)
        computed(pool, texts[0])
        computed(pool, texts[2])
        return pool

    begin, commit = computed(full(), texts[1])
    step = 331 if options else 61
    for at in [(x, 0) for x in range(1, begin, step)] + [(0, x) for x in range(1, commit, step)]:
        pool = full()
        computed(pool, texts[1], at)
        gc.collect()
        pool.check()
        states = pool.report()["states"] or {"active": 0}
        assert pool.report()["active"] == states["active"] == 0, at
        for tokens in texts:
            computed(pool, tokens)
        gc.collect()
        pool.check()


def test_a_sealed_page_is_copied_also_when_the_pool_is_full() -> None:
    model = make_model()
    pool = KVPool.for_model(model, page_size=4, max_tokens=24)
    cache = committed(model, pool, text(12))
    committed(model, pool, text(12, 3))  # nobody holds these pages, and no other is free
    gc.collect()
    cache.crop(-2)
    assert cache.layers[0].keys.shape[2] == 10
    model(text(2, 9), past_key_values=cache)
    alone = KVCache.for_model(model)
    model(text(12), past_key_values=alone)
    found = pool.begin(torch.cat([text(12), text(1)], dim=1))
    assert found.get_seq_length() == 12
    torch.testing.assert_close(found.layers[2].keys, alone.layers[2].keys, rtol=1e-4, atol=1e-4)
    pool.check()


def test_a_forward_that_broke_off_is_not_shared() -> None:
    model = make_model()
    pool = KVPool.for_model(model, page_size=4, max_tokens=200)
    cache = pool.begin(text(12))
    with broken_layer(model):
        model(text(12), past_key_values=cache)
    with pytest.raises(StateError, match="layers must have one length"):
        pool.commit(cache, text(12))
    assert pool.begin(text(13)).get_seq_length() == 0


def test_a_static_cache_belongs_to_no_pool() -> None:
    model = make_model()
    pool = KVPool.for_model(model, max_tokens=64)
    cache = KVCache.for_model(model, static=True, max_tokens=64)
    model(text(9), past_key_values=cache)
    with pytest.raises(ArgumentError, match="cache must be one that this pool began"):
        pool.commit(cache, text(9))


def test_a_static_cache_takes_another_batch_after_reset() -> None:
    model = make_model()
    cache = KVCache.for_model(model, static=True, max_tokens=32)
    model(text(5, rows=2), past_key_values=cache)
    cache.reset()
    model(text(5), past_key_values=cache)
    assert (cache.num_rows, int(cache.get_seq_length())) == (1, 5)
    assert cache.to_legacy_cache()[0][0].shape == (1, 2, 5, 16)


def test_the_legacy_format_needs_keys_in_every_layer() -> None:
    model = family("Gemma3n")
    if len(KVCache.for_model(model).layers) == 3:
        pytest.skip("this version has no layers without keys")
    cache = KVCache.for_model(model)
    model(text(5), past_key_values=cache)
    with pytest.raises(UnsupportedError, match="the legacy format"):
        cache.to_legacy_cache()
