"""The check of the first layer finds what was read wrongly, and says what is right."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from carry.models import HAS_LATENTS, prefilled, small, text

from kvloom.carry import (
    CarriedCache,
    check_first_layer,
    expect_first_layer,
    from_cache,
    geometry_of,
    llama_state,
    read_llama,
)
from kvloom.carry.carried import CarriedLayer, CarriedSide, floats_of
from kvloom.errors import ArgumentError

pytestmark = pytest.mark.model
TOKENS = text(40)
IDS = TOKENS[0].tolist()


def carried(name: str, kv: str = "auto") -> CarriedCache:
    return from_cache(prefilled(small(name), TOKENS, kv), small(name), IDS)


def changed(cache: CarriedCache, keys: Any = None, values: Any = None) -> CarriedCache:
    """The cache with other vectors in its first layer."""
    first = cache.layers[0]
    sides = []
    for side, change in ((first.keys, keys), (first.values, values)):
        x = floats_of(side.load())
        sides.append(CarriedSide.of((change(x) if change else x).contiguous()))
    layer = CarriedLayer(sides[0], sides[1], first.window, first.has_latents)
    return replace(cache, layers=(layer, *cache.layers[1:]))


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "gemma3", "gpt2", "phi", *(["deepseek"] if HAS_LATENTS else [])]
)
def test_what_a_model_computed_passes(name: str) -> None:
    report = expect_first_layer(carried(name), small(name))
    assert max(report.worst_key, report.worst_value) <= 1e-6
    assert report.bound == 1e-4


@pytest.mark.parametrize(
    ("kv", "bound"), [("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 2e-2), ("int4,recent=0", 0.25)]
)
def test_rounding_passes_and_no_more(kv: str, bound: float) -> None:
    report = expect_first_layer(carried("llama", kv), small("llama"))
    assert report.bound == bound
    assert report.worst_key > bound / 50


def test_misreadings_are_named() -> None:
    model, geometry, cache = small("llama"), geometry_of(small("llama")), carried("llama")
    data = llama_state(cache, geometry)
    codes = llama_state(cache, geometry, kind="q8_0", rotated=True, rounding=True)
    said = {}
    for name, wrong in {
        "pairs": read_llama(data, geometry, pairs="halves", tokens=IDS),
        "rotation": read_llama(codes, geometry, rotated=False, tokens=IDS),
        "both": read_llama(codes, geometry, rotated=False, pairs="halves", tokens=IDS),
        "other": replace(cache, tokens=(*IDS[:7], IDS[7] - 1, *IDS[8:])),
        "text": replace(cache, tokens=tuple(text(40, seed=99)[0].tolist())),
    }.items():
        with pytest.raises(ArgumentError) as found:
            expect_first_layer(wrong, model)
        said[name] = str(found.value).partition(": ")[2]
    assert said == {
        "pairs": "it is with other pairs",
        "rotation": "it is with other rotation",
        "both": "it is with other pairs and other rotation",
        "other": "1 of 40 tokens are others, at 7",
        "text": "both keys and values are others: of another text or of other weights",
    }


def test_shifts_and_other_ropes_are_named() -> None:
    model, cache = small("llama"), carried("llama")
    with torch.no_grad():
        late = prefilled(model, torch.cat((TOKENS[:, :1], TOKENS), 1))
    keys, values = (x[0].transpose(0, 1)[1:] for x in late.to_legacy_cache()[0])
    shifted = changed(cache, lambda _: keys, lambda _: values)
    assert check_first_layer(shifted, model).why == "it is with positions from 1"
    longer = from_cache(late, model, [IDS[0], *IDS])
    assert check_first_layer(longer, model, [*IDS, 3]).why == "it has a token before the first of the text"
    shorter = from_cache(prefilled(model, TOKENS[:, 1:]), model)
    assert check_first_layer(shorter, model, IDS[:-1]).why.startswith("its first token is missing")
    config = copy.deepcopy(model.config)
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        config.rope_theta = 10100.0
    else:
        config.rope_parameters = {**rope, "rope_theta": 10100.0}
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    assert check_first_layer(cache, other).why == "values are right, and keys are of another RoPE"


def test_tokens_must_be_known() -> None:
    cache = replace(carried("llama"), tokens=None)
    with pytest.raises(ArgumentError, match="tokens must be the 40 of the cache, got none"):
        check_first_layer(cache, small("llama"))
    with pytest.raises(ArgumentError, match="tokens must be the 40 of the cache, got 3"):
        check_first_layer(cache, small("llama"), [1, 2, 3])
