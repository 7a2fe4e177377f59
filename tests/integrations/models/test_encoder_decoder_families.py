"""Families with an encoder and a decoder: both halves in pages give the texts of transformers' cache."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

from kvloom.errors import StateError
from kvloom.integrations.transformers import KVCache, disable, enable
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.supports import support_of
from kvloom.integrations.transformers.versions import IS_4

SMALL = {
    "vocab_size": 99, "src_vocab_size": 99, "tgt_vocab_size": 99, "decoder_vocab_size": 99, "d_model": 32,
    "hidden_size": 32, "d_ff": 48, "d_kv": 8, "ffn_dim": 48, "intermediate_size": 48, "head_dim": 8,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "conv_channels": 32, "num_layers": 2,
    "num_decoder_layers": 2, "num_hidden_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "speech_encoder_layers": 1,
    "t2u_encoder_layers": 1, "t2u_decoder_layers": 1, "num_encoder_layers": 2, "num_heads": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4,
    "decoder_num_key_value_heads": 4, "speech_encoder_attention_heads": 4,
    "cross_attention_hidden_size": 32, "cross_hidden_size": 32, "cross_num_attention_heads": 4,
    "cross_head_dim": 8, "cross_num_key_value_heads": 4, "num_experts": 2, "router_jitter_noise": 0.0,
    "attention_window": 8, "block_size": 8, "attention_type": "original_full", "num_global_tokens": 2,
    "max_source_positions": 100, "init_std": 0.3, "initializer_range": 0.3, "initializer_factor": 2.0,
    "dropout": 0.0, "dropout_rate": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "hidden_dropout": 0.0, "attention_probs_dropout_prob": 0.0, "encoder_layerdrop": 0.0,
    "hidden_dropout_prob": 0.0, "decoder_layerdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "num_mel_bins": 80,
}  # fmt: skip


def _each(shapes: dict[str, tuple[int, ...]], names: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the inputs of models; none for those that read tokens."""
    return dict.fromkeys(names.split(), shapes)


FAMILIES: dict[str, dict[str, tuple[int, ...]]] = {
    **_each({}, """
        BartForConditionalGeneration BigBirdPegasusForConditionalGeneration BlenderbotForConditionalGeneration
        BlenderbotSmallForConditionalGeneration FSMTForConditionalGeneration Florence2ForConditionalGeneration
        LEDForConditionalGeneration LongT5ForConditionalGeneration M2M100ForConditionalGeneration
        MBartForConditionalGeneration MT5ForConditionalGeneration MarianMTModel MvpForConditionalGeneration
        NllbMoeForConditionalGeneration PLBartForConditionalGeneration PegasusForConditionalGeneration
        PegasusXForConditionalGeneration
        ProphetNetForConditionalGeneration SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText
        SwitchTransformersForConditionalGeneration T5ForConditionalGeneration T5Gemma2ForConditionalGeneration
        T5GemmaForConditionalGeneration UMT5ForConditionalGeneration
    """),
    **_each({"input_features": (2, 120, 80)}, """
        CanaryForConditionalGeneration CohereAsrForConditionalGeneration Pop2PianoForConditionalGeneration
        Speech2TextForConditionalGeneration
    """),
    "WhisperForConditionalGeneration": {"input_features": (2, 80, 200)},
    "MoonshineForConditionalGeneration": {"input_values": (2, 8000)},
    "SpeechT5ForSpeechToText": {"input_values": (2, 8000)},
    "VisionEncoderDecoderModel": {"pixel_values": (2, 3, 32, 32)},
    "EncoderDecoderModel": {},
    "Pix2StructForConditionalGeneration": {"flattened_patches": (2, 30, 770)},
}  # fmt: skip
TAKE_NONE = {"MoonshineForConditionalGeneration", "EncoderDecoderModel"} if IS_4 else set()
"""Models whose `generate` raises an IndexError with a cache that is given, also with transformers' own."""
NAMES = [name for name in FAMILIES if hasattr(transformers, name)]


def small(config: Any) -> Any:
    """A configuration with small sizes, in all of its parts."""
    for part in [x for x in vars(config).values() if isinstance(x, PretrainedConfig)]:
        small(part)
    names = SMALL.keys() & {*dir(config)}
    if "num_decoder_layers" in names:  # then that of both halves may not be set
        names -= {"num_hidden_layers"}
    for name in names:
        if not isinstance(getattr(config, name), list | tuple):
            setattr(config, name, SMALL[name])
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0], config.layer_types[-1]]
    return config


def joined(name: str) -> Any:
    """A model of two others: of a ViT and TrOCR's decoder, or of two BERTs."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    if name == "VisionEncoderDecoderModel":
        encoder: Any = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
        decoder: Any = small(transformers.TrOCRConfig())
    else:
        encoder = transformers.BertConfig(**sizes, vocab_size=99)
        decoder = transformers.BertConfig(**sizes, vocab_size=99, is_decoder=True, add_cross_attention=True)
    form: Any = getattr(transformers, name)
    return form(form.config_class.from_encoder_decoder_configs(encoder, decoder)).eval()


def family(name: str) -> Any:
    torch.manual_seed(0)
    if name.endswith("EncoderDecoderModel"):
        return prepared(joined(name))
    form: type[PreTrainedModel] = getattr(transformers, name)
    return prepared(form(small(form.config_class())).eval())


def prepared(model: Any) -> Any:
    """The model, which generates as many tokens as it is asked for."""
    generation = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = generation.forced_bos_token_id = None
    generation.pad_token_id, generation.bos_token_id, generation.decoder_start_token_id = 0, 1, 1
    generation.use_cache = True  # which Pix2Struct's says it does not
    return model


def inputs(name: str) -> dict[str, Any]:
    torch.manual_seed(1)
    found: dict[str, Any] = {key: torch.rand(*shape) for key, shape in FAMILIES[name].items()}
    if not found:
        found = {
            "input_ids": torch.randint(5, 90, (2, 20)),
            "attention_mask": torch.ones(2, 20, dtype=torch.long),
        }
        found["attention_mask"][1, 14:] = 0
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_family_keeps_both_halves_in_pages(name: str) -> None:
    model, given = family(name), inputs(name)

    def generated(**options: Any) -> Tensor:  # without Whisper's own, which cuts long audio
        options |= {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 3}
        tokens: Tensor = GenerationMixin.generate(model, **given, **options)
        return tokens

    expected = generated()
    cache = KVCache.for_model(model)
    assert isinstance(cache, EncoderDecoderCache)
    assert support_of(model).answers()["KVCache"] == ("yes", "")
    if name not in TAKE_NONE:
        theirs = EncoderDecoderCache(DynamicCache(), DynamicCache())
        expected_of_given = generated(**{CACHE_ARGUMENT: theirs})
        assert torch.equal(generated(**{CACHE_ARGUMENT: cache}), expected_of_given)
        encoder = cache.cross_attention_cache
        assert (encoder.num_rows, cache.num_rows) == (len(expected) * 3,) * 2
        assert encoder.get_seq_length() > 0
        assert all(cache.is_updated.values())
        assert len(cache.is_updated) == len(cache.layers)
    enable(model)
    assert torch.equal(generated(), expected)
    disable(model)


DECODERS: dict[str, dict[str, Any]] = {
    "BartForCausalLM": {}, "BertLMHeadModel": {"is_decoder": True}, "MarianForCausalLM": {},
    "GPT2LMHeadModel": {"n_embd": 32, "n_head": 4, "n_layer": 2}, "RobertaForCausalLM": {"is_decoder": True},
    "TrOCRForCausalLM": {}, "XGLMForCausalLM": {},
}  # fmt: skip
"""Decoders to which the caller gives what an encoder made; many take a lone cache for that of both halves."""


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_keeps_what_it_is_given_of_an_encoder(name: str) -> None:
    form: Any = getattr(transformers, name)
    config = small(form.config_class(**DECODERS[name]))
    config.add_cross_attention = True
    torch.manual_seed(0)
    model = form(config).eval()
    states, others = torch.randn(2, 2, 7, 32).unbind(0)
    ids = torch.randint(5, 90, (2, 7))

    def logits(cache: Any, states: Tensor) -> Tensor:
        given = {"encoder_hidden_states": states, "use_cache": True}
        parts = ids.split([4, 1, 2], dim=1)
        with torch.no_grad():
            found = [model(x, **given, **{CACHE_ARGUMENT: cache}).logits for x in parts]
        return torch.cat(found, dim=1)

    for attention in (None, "kvloom"):
        expected = logits(EncoderDecoderCache(DynamicCache(), DynamicCache()), states)
        if attention is not None:
            model.set_attn_implementation(attention)
        cache: Any = KVCache.for_model(model)
        # Logits are sums of 32 products of numbers of size 30.
        torch.testing.assert_close(logits(cache, states), expected, rtol=1e-3, atol=1e-3)
        assert (cache.get_seq_length(), cache.cross_attention_cache.get_seq_length()) == (7, 7)
        with pytest.raises(StateError, match=r"^encoder_hidden_states must be what the cache has"):
            logits(cache, others)
        enable(model)
        with torch.no_grad():
            made = model(ids, encoder_hidden_states=states, use_cache=True)
        torch.testing.assert_close(made.logits, expected, rtol=1e-3, atol=1e-3)
        assert made.past_key_values.cross_attention_cache.get_seq_length() == 7
        disable(model)


def test_blip_puts_every_cache_into_a_pair() -> None:
    """So only its tokens are in pages, and this is what is said of it."""
    config = small(transformers.BlipTextConfig(encoder_hidden_size=32, is_decoder=True))
    model = BlipTextLMHeadModel(config).eval()
    cache = KVCache.for_model(model)
    given = {"encoder_hidden_states": torch.randn(1, 7, 32), "use_cache": True, CACHE_ARGUMENT: cache}
    with torch.no_grad():
        made = model(torch.randint(5, 90, (1, 4)), **given).past_key_values
    assert made.self_attention_cache is cache
    assert type(made.cross_attention_cache) is DynamicCache
    answer, why = support_of(model).answers()["KVCache"]
    assert answer == "half"
    assert why.startswith("keys and values of the encoder stay in transformers' storage")


def test_a_decoder_with_both_halves_reads_text_alone() -> None:
    model = transformers.BartForCausalLM(small(transformers.BartConfig())).eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids, options = torch.randint(5, 90, (2, 7)), {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **options)
    cache = KVCache.for_model(model)
    assert torch.equal(model.generate(ids, **options, **{CACHE_ARGUMENT: cache}), expected)
    assert cache.get_seq_length() == 11
    enable(model)
    assert torch.equal(model.generate(ids, **options, num_beams=2), disabled(model, ids, options))


def disabled(model: Any, ids: Tensor, options: dict[str, Any]) -> Tensor:
    disable(model)
    tokens: Tensor = model.generate(ids, **options, num_beams=2)
    return tokens
