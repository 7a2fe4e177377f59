"""Encoder-decoder models that are enabled: texts, generated and given, are those of the stock attention."""

from __future__ import annotations

import copy
import gc
import logging
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import padded_prompts
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, disable, enable
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT

SIZES = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "dropout": 0.0,
}  # fmt: skip
HALF = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "initializer_range": 0.3,
    "layer_types": ["sliding_attention", "full_attention"], "attention_dropout": 0.0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bart": ("BartConfig", SIZES),
    # Of these, which know no sdpa, no layer says whether it is causal.
    "NLLB-MoE": ("NllbMoeConfig", SIZES | {"num_experts": 2, "router_jitter_noise": 0.0}),
    "Pegasus X": ("PegasusXConfig", SIZES | {"num_global_tokens": 2, "block_size": 8}),
    # The encoder adds its mask to scores of its own.
    "BigBird-Pegasus": ("BigBirdPegasusConfig", SIZES | {"attention_type": "original_full"}),
    # Windows are of the decoder's own text, and not of the encoder's.
    "T5Gemma": ("T5GemmaConfig", {"encoder": HALF, "decoder": HALF | {"cross_attention_hidden_size": 32}}),
}
NAMES = [name for name, (config, _) in FAMILIES.items() if hasattr(transformers, config)]


def family(name: str, sizes: dict[str, Any] | None = None) -> Any:
    config, usual = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(getattr(transformers, config)(**(sizes or usual))).eval()
    generation = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = generation.forced_bos_token_id = None
    generation.pad_token_id, generation.decoder_start_token_id = 0, 1
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_text_is_continued(name: str, use_cache: bool) -> None:
    model, prompt = family(name), padded_prompts()
    prompt |= {"decoder_input_ids": torch.tensor([[1, 5, 6, 7], [1, 8, 9, 10]])}
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": use_cache}
    expected = model.generate(**prompt, **options)
    enable(model)
    assert torch.equal(model.generate(**prompt, **options), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_given_text_has_its_logits(name: str) -> None:
    model, prompt = family(name), padded_prompts()
    prompt |= {"decoder_input_ids": torch.tensor([[1, 5, 6, 7], [1, 8, 9, 10]])}
    logits = []
    for change in (disable, enable):
        change(model)
        with torch.no_grad():
            logits += [model(**prompt, use_cache=use_cache).logits for use_cache in (True, False)]
    for each in logits[1:]:
        torch.testing.assert_close(each, logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_without_an_encoder_is_refused_in_the_first_forward(name: str) -> None:
    """Models take it for that of the encoder's keys as well, or forget what it holds in each forward."""
    model, ids = family(name), torch.tensor([[5, 6, 7]])
    watch = ModelWatch(model)
    cache = KVCache.for_model(model)
    assert watch.state() == ""
    inputs = {"input_ids": ids, "decoder_input_ids": ids, "use_cache": True}
    encoder = cache.cross_attention_cache
    for half in (encoder, encoder.fork(), copy.deepcopy(encoder)):
        with pytest.raises(
            UnsupportedError, match=r"^cache must be KVCache\.for_model\(model\) for .* alone$"
        ):
            model(**inputs, **{CACHE_ARGUMENT: half})
        assert half.get_seq_length() == 0
    del cache, encoder, half
    gc.collect()
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_made_by_hand_keeps_working(name: str) -> None:
    model, ids = family(name), torch.tensor([[5, 6, 7]])
    inputs = {"input_ids": ids, "decoder_input_ids": ids, "use_cache": True}
    with torch.no_grad():
        expected = model(**inputs).logits
        cache = KVCache.for_model(model)
        pair = EncoderDecoderCache(cache, DynamicCache())
        torch.testing.assert_close(model(**inputs, **{CACHE_ARGUMENT: pair}).logits, expected)
    assert cache.get_seq_length() == 3
    assert cache.cross_attention_cache.nbytes == 0


@pytest.mark.parametrize("make", [KVCache.for_model, partial(KVPool.for_model, max_tokens=64), enable])
def test_a_model_that_takes_no_cache_is_refused(make: Any) -> None:
    config = transformers.OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=99)
    with pytest.raises(UnsupportedError, match="OpenAIGPTLMHeadModel"):
        make(transformers.OpenAIGPTLMHeadModel(config))


def test_attention_that_was_replaced_is_not_said_to_stay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvloom"):
        enable(family("Bart"))
    assert caplog.messages == []
