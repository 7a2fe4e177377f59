"""A ``KVCache`` goes on after it was carried, and through a state of llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from carry.models import HAS_LATENTS, WINDOW, continued, prefilled, small, text
from transformers import GPTJConfig, GPTJForCausalLM

from kvloom import KVCache
from kvloom.carry import from_cache, geometry_of, llama_state, read_llama, to_cache
from kvloom.carry.carried import CarriedCache, CarriedLayer, CarriedSide
from kvloom.errors import ArgumentError, KVError, UnsupportedError

pytestmark = pytest.mark.model
NAMES = ["llama", "mistral", "qwen2", "gemma3", "gpt2", *(["deepseek"] if HAS_LATENTS else [])]
NEXT = text(6, seed=9)


@pytest.mark.parametrize("length", [WINDOW - 3, 3 * WINDOW + 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_goes_on_with_the_same_bits(name: str, length: int) -> None:
    model, tokens = small(name), text(length)
    cache = prefilled(model, tokens)
    carried = from_cache(cache, model, tokens[0].tolist())
    geometry = geometry_of(model)
    data = llama_state(carried, geometry, flash_attention=False)
    through = read_llama(data, geometry, tokens=tokens[0].tolist())
    assert llama_state(through, geometry, flash_attention=False) == data
    wanted = continued(model, cache, NEXT)
    assert torch.equal(continued(model, to_cache(carried, model), NEXT), wanted)  # of before those tokens
    assert torch.equal(continued(model, to_cache(through, model), NEXT), wanted)


@pytest.mark.parametrize("name", ["yarn", "phi"])
def test_scaled_and_partial_rope_need_no_more_than_their_pairs(name: str) -> None:
    model, tokens = small(name), text(90)
    cache = prefilled(model, tokens)
    geometry = geometry_of(model)
    assert geometry.layers[0].rotary == (16 if name == "phi" else 64)
    data = llama_state(from_cache(cache, model), geometry, pairs="adjacent")
    halves = llama_state(from_cache(cache, model), geometry, pairs="halves")
    assert data != halves
    through = to_cache(read_llama(data, geometry, pairs="adjacent"), model)
    assert torch.equal(continued(model, through, NEXT), continued(model, cache, NEXT))


@pytest.mark.parametrize("kv", ["float16", "bfloat16"])
def test_floats_keep_their_dtype(kv: str) -> None:
    model, tokens = small("llama"), text(20)
    cache = prefilled(model, tokens, kv)
    carried = from_cache(cache, model)
    assert carried.kinds == (kv,)
    again = to_cache(carried, model)
    assert [x.pages.storage.entry.key.kind for x in again.layers] == [kv, kv]
    assert torch.equal(continued(model, again, NEXT), continued(model, cache, NEXT))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_codes_stay_codes(name: str, rotated: bool) -> None:
    """Codes of the whole head fit q8_0, and come back in groups of its blocks."""
    model, tokens = small(name), text(40)
    cache = prefilled(model, tokens, f"int8:g64,rotate={'both' if rotated else 'none'},smooth=none")
    carried, geometry = from_cache(cache, model), geometry_of(model)
    assert carried.kinds == ("int8:g64",)
    data = llama_state(carried, geometry, rotated=rotated)
    through = read_llama(data, geometry, rotated=rotated)
    assert llama_state(through, geometry, rotated=rotated) == data
    again = to_cache(through, model)
    groups = {x.pages.storage.entry.key.group for x in again.layers}
    assert groups == {32 if name in ("qwen2", "gemma3") else 16}
    for ours, theirs in zip(again.to_legacy_cache(), cache.to_legacy_cache(), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_one_side_may_be_codes_alone() -> None:
    """Values of heads of 128 are rotated by llama.cpp in two parts, which no KVCache has."""
    model, tokens = small("wide"), text(40)
    geometry = geometry_of(model)
    exact = from_cache(prefilled(model, tokens), model)
    data = llama_state(exact, geometry, kind="q8_0", rotated=True, rounding=True)
    again = to_cache(read_llama(data, geometry, rotated=True), model)
    entry = again.layers[0].pages.storage.entry
    assert (entry.key.kind, entry.key.rotated, entry.value.kind) == ("int8:g16", True, "float32")
    carried = from_cache(again, model)
    assert carried.kinds == ("int8:g16", "float32")
    assert llama_state(carried, geometry, kind="q8_0", rotated=True, rounding=True) == data


def test_other_codes_are_dequantized_or_refused() -> None:
    model, tokens = small("llama"), text(40)
    geometry = geometry_of(model)
    for kv in ("int4", "int8,recent=8"):
        assert from_cache(prefilled(model, tokens, kv), model).kinds == ("float32",)
    halves = from_cache(prefilled(model, tokens, "int8:g32,smooth=none"), model)
    with pytest.raises(ArgumentError, match="of which 32 elements of adjacent pairs share a scale"):
        llama_state(halves, geometry, rotated=False)
    whole = from_cache(prefilled(model, tokens, "int8:g64,smooth=none"), model)
    with pytest.raises(ArgumentError, match="must hold codes rotated by none without rounding"):
        llama_state(whole, geometry, rotated=True)
    assert llama_state(halves, geometry, rotated=True, rounding=True)


def test_a_static_cache_is_carried_as_a_paged_one() -> None:
    model, tokens = small("gemma3"), text(40)
    static = prefilled(model, tokens, static=True, max_tokens=64)
    carried = from_cache(static, model)
    wanted = continued(model, static, NEXT)
    assert torch.equal(continued(model, to_cache(carried, model, static=True, max_tokens=64), NEXT), wanted)
    # A static cache attends in another order than a paged one.
    torch.testing.assert_close(continued(model, to_cache(carried, model), NEXT), wanted, rtol=1e-4, atol=1e-4)


def test_rounding_must_be_asked_for() -> None:
    model, tokens = small("llama"), text(20)
    carried = from_cache(prefilled(model, tokens), model)
    for kv in ("float16", "int8", "int4"):
        with pytest.raises(ArgumentError, match="must hold float32 without rounding"):
            to_cache(carried, model, kv)
        rounded = to_cache(carried, model, kv, rounding=True)
        assert rounded.get_seq_length() == 20
        torch.testing.assert_close(
            rounded.to_legacy_cache()[0][0], prefilled(model, tokens, kv).to_legacy_cache()[0][0]
        )


def refused(cache: Any, model: Any, **options: Any) -> str:
    with pytest.raises(KVError) as found:
        from_cache(cache, model, **options)
    return str(found.value)


def test_what_is_no_single_whole_sequence_is_refused() -> None:
    model = small("llama")
    two = prefilled(model, text(20).repeat(2, 1))
    assert "must be a KVCache of one row, cropped to its tokens, got 2 rows" in refused(two, model)
    assert "tokens must be the 20 of the cache, got 3" in refused(
        prefilled(model, text(20)), model, tokens=[1, 2, 3]
    )
    assert refused(prefilled(model, text(20)), model, tokens=7) == "tokens must be a list of integers, got 7"
    for tokens, named in (([1] * 19 + [2.5], "2.5"), ("x" * 20, "'x'"), (torch.zeros(20), "tensor(0.)")):
        message = f"tokens must be signed 64-bit integers, got {named}"
        assert refused(prefilled(model, text(20)), model, tokens=tokens) == message
    assert "got 0 rows" in refused(KVCache.for_model(model), model)
    side = CarriedSide.of(torch.zeros(5, 4, 32))
    with pytest.raises(ArgumentError, match="cache must have heads, key dim"):
        to_cache(CarriedCache((CarriedLayer(side, side),) * 2, 5), model)


def test_a_model_with_states_is_refused() -> None:
    import transformers

    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32)
    with pytest.raises(UnsupportedError, match=r"model must (keep|give) keys and values"):
        geometry_of(transformers.MambaForCausalLM(config))


def test_turned_elements_are_those_of_models_without_frequencies() -> None:
    config = GPTJConfig(n_embd=64, n_head=2, n_layer=2, n_positions=32, rotary_dim=8, vocab_size=9)
    assert {x.rotary for x in geometry_of(GPTJForCausalLM(config)).layers} == {8}
