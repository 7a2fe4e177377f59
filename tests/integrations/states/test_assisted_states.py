"""Drafts in models with recurrent states: an enabled model lets them pass, and takes back what was wrong."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from integrations.models.test_families import family
from oracles.pairs import pairs_in_turn
from oracles.stateful_models import WRONG, mixers, stateful_model
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvloom import KVCache, KVPool, disable, enable
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.cache.trial import why_wrong_in_pieces
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT

pytestmark = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="mixers of this transformers change states unseen"
)
FAMILIES = [x for x in mixers() if x != "inkling2"]  # which gives attention sinks of each query
STATEFUL = [x for x in FAMILIES if not x.startswith("lfm")]
NEW = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 8}
REFUSED = "assisted generation is not supported with stateful models"


@cache
def assistant(kind: str) -> Any:
    model = family("Llama") if kind == "llama" else stateful_model("qwen3_next", initializer_range=0.2)
    enable(model)
    return model


def drafts_of(kind: str) -> dict[str, Any]:
    return LOOKUP if kind == "lookup" else {"assistant_model": assistant(kind)}


def prompt() -> Tensor:
    return torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(0)).repeat(1, 3)


@pytest.mark.parametrize(
    ("name", "kv", "attention", "drafts"),
    pairs_in_turn(FAMILIES, ["float32", "int8"], ["kvloom", "stock"], ["lookup", "llama", "hybrid"]),
)
def test_drafts_leave_the_greedy_tokens(
    name: str, kv: str, attention: str, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stateful_model(name)
    stock = model.config._attn_implementation
    enable(model, kv=kv)
    if attention == "stock":
        model.set_attn_implementation(stock)
    wanted, removed = model.generate(prompt(), **NEW), []
    crop = KVCache.crop
    monkeypatch.setattr(KVCache, "crop", lambda self, n: (removed.append(int(n)), crop(self, n))[1])
    assert torch.equal(model.generate(prompt(), **NEW, **drafts_of(drafts)), wanted)
    assert min(removed) < 0  # a draft was wrong
    assert "_is_stateful" not in vars(model)
    disable(model)
    if name in STATEFUL:
        with pytest.raises(ValueError, match=REFUSED):
            model.generate(prompt(), **NEW, **LOOKUP)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_drafts_after_a_long_prompt(name: str, kv: str) -> None:
    model = stateful_model(name)
    enable(model, kv=kv)
    ids = torch.randint(3, 90, (1, 300), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    cache = KVCache.for_model(model, kv)
    found = model.generate(ids, **NEW, **LOOKUP, **{CACHE_ARGUMENT: cache})
    assert torch.equal(found, model.generate(ids, **NEW))
    assert cache.recording is not None
    assert cache.recording.cuts_steps


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_a_stock_cache_is_refused_as_before(name: str) -> None:
    model = stateful_model(name)
    stock = {CACHE_ARGUMENT: DynamicCache(config=model.config)}
    for options in ({}, stock):
        with pytest.raises(ValueError, match=REFUSED):
            model.generate(prompt(), **NEW, **LOOKUP, **options)
    KVCache.for_model(model, rollback=16)  # leaves the model as it was
    with pytest.raises(ValueError, match=REFUSED):
        model.generate(prompt(), **NEW, **LOOKUP, **{CACHE_ARGUMENT: KVCache.for_model(model, rollback=16)})
    enable(model)
    for options in (stock, {"cache_implementation": "static"}):
        with pytest.raises(ValueError, match=REFUSED):
            model.generate(prompt(), **NEW, **LOOKUP, **options)
    assert stock[CACHE_ARGUMENT].get_seq_length() == 0


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_is_wrong_with_several_tokens_is_refused(name: str) -> None:
    model = stateful_model(name)
    enable(model)
    with pytest.raises(UnsupportedError, match=r"drafts cannot be checked: .* it is wrong, with every cache"):
        model.generate(prompt(), **NEW, **LOOKUP)
    assert model.generate(prompt(), **NEW).shape[1] == 78
    cache = KVCache.for_model(model, rollback=16)  # single steps are right
    assert cache.recording is not None
    assert not cache.recording.cuts_steps


def test_nothing_is_left_behind_after_an_exception() -> None:
    model = stateful_model("qwen3_next")
    enable(model)
    why_wrong_in_pieces(model)
    before = set(vars(model))

    def fail(*args: Any) -> None:
        raise RuntimeError("broken")

    handle = model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        model.generate(prompt(), **NEW, **LOOKUP)
    handle.remove()
    assert set(vars(model)) == before
    assert model._is_stateful
    twin = copy.deepcopy(model)  # enabled on its own
    disable(model)
    assert torch.equal(twin.generate(prompt(), **NEW, **LOOKUP), model.generate(prompt(), **NEW))


def test_a_cache_of_a_pool_takes_drafts() -> None:
    model, ids = stateful_model("granitemoehybrid"), torch.cat([prompt(), prompt()[:, :6]], 1)
    enable(model)
    wanted = model.generate(ids, **NEW)
    pool = KVPool.for_model(model, page_size=8, max_tokens=600, state_interval=16)
    cache = pool.begin(ids)
    tokens = model.generate(ids, **NEW, **LOOKUP, **{CACHE_ARGUMENT: cache})
    assert torch.equal(tokens, wanted)
    assert cache.recording is not None
    assert not cache.recording.cuts_steps  # pieces are those of the pool
    pool.commit(cache, tokens)
    pool.check()
    cache = pool.begin(ids)
    assert cache.get_seq_length() == 64
    assert torch.equal(model.generate(ids, **NEW, **{CACHE_ARGUMENT: cache}), wanted)
