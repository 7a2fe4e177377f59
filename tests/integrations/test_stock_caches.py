"""Caches of transformers' own that the caller of an enabled model names: each name that it lists."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from oracles.language_models import make_model, make_prompts
from transformers import DynamicCache, EncoderDecoderCache
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from kvloom import KVCache, KVPool
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import enable, stock_caches
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT

OFFLOADED = [name for name in ALL_CACHE_IMPLEMENTATIONS if "offload" in name]
INPUTS = make_prompts([9, 5])


def generate(model: Any, **options: Any) -> Any:
    steps = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    return model.generate(**INPUTS, **(steps | options))


def outcome(model: Any, **options: Any) -> Any:
    """Tokens, or the kind of the error."""
    try:
        return generate(model, disable_compile=True, **options).sequences.tolist()
    except Exception as error:  # of a package that is not installed, or a mistake of this transformers
        return type(error)


class Stream:
    """A stream of a device on which everything is done at once."""

    def wait_stream(self, other: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device to which transformers' caches bring layers."""
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(stock_caches, "can_offload", lambda model: True)


@pytest.mark.usefixtures("offloading")
@pytest.mark.parametrize("name", ALL_CACHE_IMPLEMENTATIONS)
def test_every_name_gives_the_tokens_of_the_model_without_kvloom(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    expected = outcome(model, cache_implementation=name)
    enable(model, batch_invariant=False)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvloom"):
        assert [outcome(model, cache_implementation=name) for _ in range(2)] == [expected] * 2
    said = [x.getMessage() for x in caplog.records if x.name == "kvloom"]
    if isinstance(expected, list):
        cache = getattr(generate(model, cache_implementation=name, disable_compile=True), CACHE_ARGUMENT)
        assert bool(said) != isinstance(cache, KVCache)
    assert len(said) <= 1 and all(f"cache_implementation={name!r}" in x for x in said)


@pytest.mark.parametrize("name", OFFLOADED)
def test_names_of_host_memory_are_refused_before_something_is_computed(name: str) -> None:
    model = make_model()
    enable(model)
    model.register_forward_pre_hook(lambda *args: pytest.fail("computed"))
    with pytest.raises(UnsupportedError, match=f"{name}.* CUDA device, got one on cpu.*memory://pages"):
        generate(model, cache_implementation=name)
    model.generation_config.cache_implementation = name
    with pytest.raises(UnsupportedError, match=name):
        generate(model)


@pytest.mark.parametrize("name", OFFLOADED)
def test_caches_of_kvloom_are_no_place_for_names(name: str) -> None:
    model = make_model()
    enable(model)
    pool = KVPool.for_model(model, max_tokens=400)
    for cache in (KVCache.for_model(model), pool.begin(INPUTS["input_ids"][:1])):
        with pytest.raises(ValueError, match="cache_implementation"):
            generate(model, cache_implementation=name, **{CACHE_ARGUMENT: cache})
        assert cache.get_seq_length() == 0


@pytest.mark.usefixtures("offloading")
def test_a_cache_that_offloads_is_used_on_a_device_and_refused_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    expected = outcome(model)
    enable(model, batch_invariant=False)
    named = getattr(transformers, "OffloadedCache", None)  # of transformers 4
    for make in [lambda: DynamicCache(offloading=True)] + [named] * (named is not None):
        assert outcome(model, **{CACHE_ARGUMENT: make()}) == expected
        for cache in (make(), EncoderDecoderCache(make(), DynamicCache())):
            with monkeypatch.context() as patch:
                patch.setattr(stock_caches, "can_offload", lambda model: False)
                with pytest.raises(UnsupportedError, match=r"offloading=True\) needs a model on a CUDA"):
                    generate(model, **{CACHE_ARGUMENT: cache})
