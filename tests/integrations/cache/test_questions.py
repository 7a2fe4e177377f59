"""What transformers asks of caches and of their layers, and what follows from the answers, by class.

Masks ask for ``get_mask_sizes``, ``get_query_offset``, ``is_sliding``, ``is_linear``, ``is_dummy``,
``is_compileable``; generation for ``get_seq_length``, ``get_max_length``, ``is_compileable``, ``crop``,
``is_croppable``, ``activate_past_recording`` and ``record_past`` of layers; models for ``is_initialized``,
``is_recording_past``, ``has_previous_state``, and ``keys`` and ``values`` of layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrations.attention import test_latents
from integrations.attention.test_indexed import INDEXED
from integrations.cache.test_cross_layers import mllama
from integrations.models.test_families import FAMILIES, family
from torch import Tensor
from transformers import cache_utils

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import KVCache
from kvloom.integrations.transformers.models import layer_specs
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT

CUTS = (9, 1, 1, 4, 1)
STATIC: dict[str, Any] = {"static": True, "max_tokens": 64}
"""Many free slots, which change a step that sees them."""
MODELS: dict[str, Callable[[], Any]] = {
    "full": lambda: family("Llama"),
    "sliding": lambda: family("Gemma3"),
    "chunked": lambda: family("Llama4"),
    "shared": lambda: family("Gemma3n"),
    "across": mllama,
    "indexed": lambda: test_latents.family(INDEXED[0], index_topk=64),
    "linear": lambda: family("Qwen3-Next"),
    "hybrid": lambda: family("Falcon-H1"),
}
HERE = [
    name
    for name in MODELS
    if (name not in ("linear", "hybrid") or "Falcon-H1" in FAMILIES) and (name != "indexed" or INDEXED)
]
CASES = [
    (name, options) for name in HERE for options in ({}, STATIC) if (name, options) != ("hybrid", STATIC)
]
each_case = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{name}-{'static' if more else 'paged'}" for name, more in CASES]
)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def text(count: int = sum(CUTS)) -> Tensor:
    return torch.randint(3, 98, (2, count), generator=torch.Generator().manual_seed(2))


def fed(model: Any, cache: KVCache) -> Iterator[tuple[int, Tensor]]:
    """Positions of the first token of each forward, and its logits."""
    start, tokens = 0, text()
    for count in CUTS:
        where = torch.arange(start, start + count)
        more = {} if hasattr(cache, "get_query_offset") else {"cache_position": where}
        yield (
            start,
            model(
                tokens[:, start : start + count],
                position_ids=where.expand(2, -1),
                use_cache=True,
                **{CACHE_ARGUMENT: cache},
                **more,
            ).logits,
        )
        start += count


@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
@each_case
def test_a_step_sees_the_text_before_it_and_nothing_else(
    name: str, options: dict[str, Any], attention: str
) -> None:
    model = MODELS[name]()
    whole = model(text(), **{CACHE_ARGUMENT: transformers.DynamicCache(config=model.config)}).logits
    model.set_attn_implementation(attention)
    for start, logits in fed(model, KVCache.for_model(model, **options)):
        expected = whole[:, start : start + logits.shape[1]]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@each_case
def test_answers_are_true_of_what_update_returns(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: dict[int, int] = {}
    update = KVCache.update

    def watched(self: KVCache, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        told[layer_idx] = self.layers[layer_idx].get_mask_sizes(key.shape[2])[0]
        found = update(self, key, value, layer_idx, *args, **kwargs)
        returned[layer_idx] = found[0].shape[2]
        return found

    monkeypatch.setattr(KVCache, "update", watched)
    model = MODELS[name]()
    cache, told = KVCache.for_model(model, **options), dict[int, int]()
    stock = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
    assert [*cache.is_sliding] == ([False] * len(cache) if options else [*stock.is_sliding][: len(cache)])
    for question in ("is_linear", "is_dummy"):
        if hasattr(stock, question):
            assert getattr(cache, question) == getattr(stock, question)[: len(cache)]
    for start, logits in fed(model, cache):
        end = start + logits.shape[1]
        assert told == returned
        has_free_slots = any(count > end for count in returned.values())
        assert cache.is_compileable == has_free_slots == bool(options)
        assert int(cache.get_seq_length()) == end
        if hasattr(cache, "get_query_offset"):
            assert {int(cache.get_query_offset(i)) for i in returned} == {end}
        for i in returned:
            held = cache.layers[i]
            assert held.is_initialized
            assert held.keys.shape[2] in (returned[i], held.get_mask_sizes(0)[0])
    if hasattr(cache, "get_max_length"):
        bounds = {cache.get_max_length(i) for i, x in enumerate(cache.is_sliding) if not x and i in returned}
        assert bounds == ({STATIC["max_tokens"]} if options else {-1})
    cache.reset()
    assert not any(cache.layers[i].is_initialized for i in returned)
    again = [logits for _, logits in fed(model, cache)]
    fresh = [logits for _, logits in fed(model, KVCache.for_model(model, **options))]
    assert all(torch.equal(a, b) for a, b in zip(again, fresh, strict=True))


@pytest.mark.skipif(not hasattr(cache_utils.Cache, "is_croppable"), reason="this version does not ask")
@each_case
def test_what_says_that_it_can_be_cropped_can(name: str, options: dict[str, Any]) -> None:
    model = MODELS[name]()
    cache = KVCache.for_model(model, rollback=4, **options)
    steps = [logits for _, logits in fed(model, cache)]
    assert cache.is_croppable
    cache.crop(-1)
    last = model(
        text()[:, -1:], position_ids=torch.full((2, 1), sum(CUTS) - 1), **{CACHE_ARGUMENT: cache}
    ).logits
    torch.testing.assert_close(last, steps[-1], rtol=1e-3, atol=1e-3)


def test_fixed_storage_beside_layers_that_grow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing(cache_utils.DynamicLayer):
        pass

    model = family("Llama")
    stock = transformers.DynamicCache(config=model.config)
    stock.layers[1] = Growing()
    monkeypatch.setattr(layer_specs, "DynamicCache", lambda config: stock)
    with pytest.raises(UnsupportedError, match=r"static must be False for .*layers \(Growing\) grow"):
        KVCache.for_model(model, **STATIC)


def test_a_cache_has_whatever_masks_and_generation_ask_for() -> None:
    of_others = {
        "self_attention_cache",
        "cross_attention_cache",
        "is_updated",
        "set_previous_accepted_tokens",
    }
    cache, root = KVCache.for_model(family("Llama")), Path(transformers.__path__[0])
    found = set[str]()
    for file in ("masking_utils.py", "generation/utils.py", "generation/candidate_generator.py"):
        text = (root / file).read_text()
        found |= {*re.findall(r"\b(?:self\.)?(?:past_key_values|cache|decoder_cache)\.([a-z]\w*)", text)}
    assert "get_seq_length" in found
    assert not {name for name in found - of_others if not hasattr(cache, name)}
