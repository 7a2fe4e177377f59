"""Pages are found by everything that decides keys and values, and unchanged models still find theirs."""

from __future__ import annotations

import copy
import pickle
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.pool.test_pool import ask, generate, text
from oracles.changes import (
    ADAPTERS,
    CHANGES,
    UNDONE,
    HalvedLlama,
    adapted_model,
    peft_model,
    set_near_attention,
)
from oracles.language_models import make_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool
from kvloom.store import KVStore

TEXT, OTHER = text(22), text(22, seed=9)
NEW = 3


def pool_of(model: Any, kv: str = "auto", store: Any = None) -> KVPool:
    return KVPool.for_model(model, kv=kv, page_size=4, max_tokens=400, store=store)


def alone(model: Any, tokens: Tensor) -> Tensor:
    """The answer of a cache that shares nothing."""
    return generate(model, tokens, KVCache.for_model(model, page_size=4), NEW)


def expect_right(pool: KVPool, model: Any, found: int, tokens: Tensor = TEXT) -> None:
    """Ask, and compare with the answer of a cache that shares nothing."""
    expected = alone(model, tokens)
    cache = pool.begin(tokens)
    assert cache.get_seq_length() == found
    answer = generate(model, tokens, cache, NEW)
    pool.commit(cache, answer)
    pool.check()
    assert torch.equal(answer, expected)


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_changed_model_finds_nothing_of_before(name: str) -> None:
    model = make_model()
    pool = pool_of(model)
    expect_right(pool, model, 0)
    expect_right(pool, model, 20)
    before = alone(model, TEXT)
    with CHANGES[name](model):
        assert not torch.equal(alone(model, TEXT), before)  # or the change tests nothing
        expect_right(pool, model, 0)
        expect_right(pool, model, 20)
    if name in UNDONE:
        expect_right(pool, model, 20)


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_another_adapter_finds_nothing_of_the_first(name: str) -> None:
    model = adapted_model()
    pool = pool_of(model)
    expect_right(pool, model, 0)
    before = alone(model, TEXT)
    with ADAPTERS[name](model):
        assert not torch.equal(alone(model, TEXT), before)
        expect_right(pool, model, 0)
    if name != "merged":
        expect_right(pool, model, 20)


def test_a_peft_model_finds_its_adapter_alone() -> None:
    model = peft_model()
    pool = pool_of(model)
    expect_right(pool, model, 0)
    with model.disable_adapter():
        expect_right(pool, model, 0)
    expect_right(pool, model, 20)
    model.merge_adapter()
    assert pool.begin(TEXT).get_seq_length() == 0
    model.unmerge_adapter()
    assert pool.begin(TEXT).get_seq_length() == 0  # its weights were rounded twice


def test_half_precision_finds_nothing_of_before() -> None:
    model = make_model()
    pool = pool_of(model)
    expect_right(pool, model, 0)
    model.half()
    assert pool.begin(TEXT).get_seq_length() == 0


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_between_begin_and_commit_is_not_published(name: str) -> None:
    model = make_model()
    pool = pool_of(model)
    cache = pool.begin(TEXT)
    with torch.no_grad():
        model(TEXT, past_key_values=cache)
    with CHANGES[name](model):
        pool.commit(cache, TEXT)
        assert pool.begin(TEXT).get_seq_length() == 0
    assert pool.begin(TEXT).get_seq_length() == 0


def test_a_change_within_a_cache_is_not_published_even_if_it_is_undone() -> None:
    model = adapted_model()
    pool = pool_of(model)
    cache = pool.begin(TEXT)
    with torch.no_grad():
        model(TEXT[:, :8], past_key_values=cache)
        with ADAPTERS["disabled"](model):
            model(TEXT[:, 8:], past_key_values=cache)
    pool.commit(cache, TEXT)
    assert pool.begin(TEXT).get_seq_length() == 0


def test_weights_written_within_a_cache_are_seen() -> None:
    model = make_model()
    pool = pool_of(model)
    cache = pool.begin(TEXT)
    with torch.no_grad():
        weight = model.model.layers[1].mlp.up_proj.weight  # 112 rows of 64, whose last rows no sample has
        before = weight[-1].clone()
        model(TEXT[:, :8], past_key_values=cache)
        weight[-1] *= 2
        model(TEXT[:, 8:], past_key_values=cache)
        weight[-1] = before
    pool.commit(cache, TEXT)
    assert pool.begin(TEXT).get_seq_length() == 0


def test_a_change_after_tokens_were_found_is_an_error() -> None:
    model = adapted_model()
    pool = pool_of(model)
    ask(pool, model, TEXT)
    cache = pool.begin(TEXT)
    with ADAPTERS["switched"](model), pytest.raises(StateError, match="the model must be unchanged since 20"):
        generate(model, TEXT, cache)
    assert torch.equal(generate(model, TEXT, cache, NEW), alone(model, TEXT))
    cache = pool.begin(TEXT)
    cache.crop(-2 if cache.get_seq_length() == 20 else 0)
    with ADAPTERS["switched"](model), pytest.raises(StateError, match="the model must be unchanged since 18"):
        generate(model, TEXT, cache)


def test_what_is_computed_in_training_mode_is_not_published() -> None:
    model = make_model()
    pool = pool_of(model)
    model.train()
    cache = pool.begin(TEXT)
    with torch.no_grad():
        model(TEXT, past_key_values=cache)
    pool.commit(cache, TEXT)
    for is_training in (True, False):
        model.train(is_training)
        assert pool.begin(TEXT).get_seq_length() == 0


def test_a_cache_remembers_its_salt() -> None:
    model = make_model()
    pool = pool_of(model)
    cache = pool.begin(TEXT, "b")
    output = generate(model, TEXT, cache)
    with pytest.raises(ArgumentError, match="salt must be that with which the cache began, 'b', got ''"):
        pool.commit(cache, output, "")
    fork = copy.deepcopy(cache)
    pool.commit(fork, output)
    assert [pool.begin(TEXT, salt).get_seq_length() for salt in ("", "a", "b")] == [0, 0, 20]


@pytest.mark.parametrize("salt", ["\0", "a\0c1:b", "a\0", "a\0\0c1:b"])
def test_a_salt_cannot_be_made_to_look_like_content(salt: str) -> None:
    model = make_model()
    pool = pool_of(model)
    for other, content in (("a", "b"), ("a\0", "b"), ("", "b")):
        cache = pool.begin(TEXT, other, content)
        pool.commit(cache, generate(model, TEXT, cache))
    assert pool.begin(TEXT, salt).get_seq_length() == 0


def opened(tmp_path: Path) -> KVStore:
    return KVStore(f"file://{tmp_path}", read="always")


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_store_gives_and_takes_only_what_the_model_computes(name: str, tmp_path: Path) -> None:
    """A process with the original weights, one that changes its own, and again the first."""
    original, changed = make_model(), make_model()
    with opened(tmp_path) as store, pool_of(original, store=store) as pool:
        expect_right(pool, original, 0)
    with opened(tmp_path) as store, pool_of(changed, store=store) as pool:
        expect_right(pool, changed, 20)
        with CHANGES[name](changed):
            expect_right(pool, changed, 0)
            expect_right(pool, changed, 0, OTHER)
    with opened(tmp_path) as store, pool_of(original, store=store) as pool:
        expect_right(pool, original, 20)
        expect_right(pool, original, 0, OTHER)


@pytest.mark.parametrize("name", [x for x in CHANGES if x != "state_dict"])
def test_a_model_changed_before_it_met_the_store_finds_nothing(name: str, tmp_path: Path) -> None:
    original, changed = make_model(), make_model()
    with opened(tmp_path) as store, pool_of(original, store=store) as pool:
        expect_right(pool, original, 0)
    change: AbstractContextManager[None] = CHANGES[name](changed)
    with change, opened(tmp_path) as store, pool_of(changed, store=store) as pool:
        expect_right(pool, changed, 0)


def steered(strength: float) -> Any:
    """A Llama with a hook that changes the tokens after the probe's."""
    model, vector = make_model(), torch.full((64,), strength)

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        return torch.cat((output[:, :8], output[:, 8:] + vector), dim=1)

    model.model.layers[0].register_forward_hook(hook)
    return model


def near(name: str) -> Any:
    """A Llama whose attention differs after the tokens of the probe."""
    model = make_model()
    set_near_attention(model, name)
    return model


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (partial(steered, 1.0), partial(steered, 2.0)),
        (make_model, partial(near, "sdpa_near")),
        (make_model, partial(near, "near")),
    ],
    ids=["the vector of a hook", "an attention", "an attention of another name"],
)
def test_a_difference_after_the_tokens_of_the_probe_finds_nothing(
    make: Any, other: Any, tmp_path: Path
) -> None:
    for model, found in ((make(), 0), (other(), 0), (make(), 20)):
        with opened(tmp_path) as store, pool_of(model, store=store) as pool:
            expect_right(pool, model, found)
            saved = pickle.dumps(pool)
    with pytest.raises(ArgumentError, match=r"^model must be the one whose pages were saved"):
        pickle.loads(saved).bind(other())  # noqa: S301
    pool = pickle.loads(saved).bind(make())  # noqa: S301
    assert pool.begin(TEXT).get_seq_length() == 20


def test_a_loaded_pool_is_not_bound_to_other_frequencies() -> None:
    model = make_model()
    pool = pool_of(model)
    ask(pool, model, TEXT)
    saved, other = pickle.dumps(pool), make_model()
    other.model.rotary_emb.inv_freq[-1] *= 2
    with pytest.raises(ArgumentError, match=r"^model must be the one whose pages were saved"):
        pickle.loads(saved).bind(other)  # noqa: S301


def test_a_subclass_with_another_forward_finds_nothing(tmp_path: Path) -> None:
    original = make_model()
    other = HalvedLlama(original.config).eval()
    other.load_state_dict(original.state_dict())
    for model, found in ((original, 0), (other, 0), (original, 20)):
        with opened(tmp_path) as store, pool_of(model, store=store) as pool:
            expect_right(pool, model, found)


def test_a_residual_window_is_part_of_what_a_store_is_asked_for(tmp_path: Path) -> None:
    model = make_model("kvloom")
    for kv, found in (("int4:g16", 0), ("int4:g16,recent=0", 0), ("int4:g16", 20)):
        with opened(tmp_path) as store, pool_of(model, kv, store) as pool:
            assert ask(pool, model, TEXT)[1] == found


@pytest.mark.parametrize("name", ["bert", "bert-generation", "xlm"])
def test_a_model_that_sees_later_tokens_is_refused(name: str) -> None:
    """Its configuration does not say so, and each page would hold what another text ended with."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    tokens = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(name, **sizes, **tokens)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedError, match=r"^model must attend to earlier tokens alone, .* differ by"):
        pool_of(model)
    if name != "xlm":
        config.is_decoder = True
        pool_of(AutoModelForCausalLM.from_config(config).eval())
