"""Model families: the stock tokens, whatever mixture of layers a model has."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from oracles.pairs import pairwise
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    cache_utils,
)

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import KVCache, KVCacheLayer, KVPool, enable
from kvloom.integrations.transformers.models import layer_specs

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # so that greedy tokens do not repeat
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"head_dim": 8, "sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FOUR = {"num_hidden_layers": 4}
"""Where layers differ, so that of each kind there are two with another between them."""
# Name: config class, what differs from SMALL, how many layers kvloom keeps: all, and those with a window.
FAMILIES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "Llama": ("LlamaConfig", {}, 2, 0),
    "Qwen2": ("Qwen2Config", {}, 2, 0),
    "Qwen3": ("Qwen3Config", {"head_dim": 8}, 2, 0),
    "Phi": ("PhiConfig", {}, 2, 0),
    "GPT-2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, 2, 0),
    "Mistral": ("MistralConfig", {"sliding_window": 8}, 2, 2),
    "Gemma2": ("Gemma2Config", WINDOW | FOUR, 4, 2),
    "Gemma3": ("Gemma3TextConfig", WINDOW | FOUR | {"sliding_window_pattern": 2}, 4, 2),
    "gpt-oss": ("GptOssConfig", WINDOW | EXPERTS | FOUR | {"num_local_experts": 4}, 4, 2),
    "Llama4": (
        "Llama4TextConfig",
        FOUR
        | {"head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
        4,
        3,
    ),
    "Gemma3n": (
        "Gemma3nTextConfig",
        WINDOW
        | FOUR
        | {
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 99,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": None,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
        3,
        2,
    ),
    "Gemma4": (  # whose full layers have other heads
        "Gemma4TextConfig",
        WINDOW
        | FOUR
        | {
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 99,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        3,
        2,
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        LINEAR
        | FOUR
        | {
            "head_dim": 8,
            "num_experts": 0,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        2,
        0,
    ),
    "Falcon-H1": (
        "FalconH1Config",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,  # else 256, and each text is padded to that
        },
        2,
        0,
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        LATENT
        | EXPERTS
        | {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "num_key_value_heads": 4,
        },
        2,
        0,
    ),
    # Windows have other heads, and values another head dim, than the configuration of all layers says.
    "MiMo-V2": (
        "MiMoV2FlashConfig",
        WINDOW
        | EXPERTS
        | FOUR
        | {
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "head_dim": 16,
            "v_head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 16,
            "swa_v_head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
        4,
        2,
    ),
}
# Of old, scaled dot product attention leaves the soft cap out.
STOCK = {"Gemma2": "eager"}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "chunked prefill": {"prefill_chunk_size": 5},
}


# Before its caches were one class, a model with recurrent layers brought its own.
if not hasattr(cache_utils, "LinearAttentionLayer"):
    del FAMILIES["Qwen3-Next"], FAMILIES["Falcon-H1"]
for name in ("Gemma4", "MiMo-V2"):
    if not hasattr(transformers, FAMILIES[name][0]):
        del FAMILIES[name]


def family(name: str, attention: str | None = None, **options: Any) -> Any:
    """A random model of the family; ``options`` are of its configuration."""
    config, differs, *_ = FAMILIES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**SMALL | differs | options), attn_implementation=attention
    ).eval()


def padded_prompts() -> dict[str, Tensor]:
    """Two prompts of 14 and 11 tokens."""
    ids = torch.randint(3, 99, (2, 14), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def continued(model: Any, cache: Any, **options: Any) -> Any:
    """What ``generate`` returns, with the logits of every step."""
    torch.manual_seed(1)
    options = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10} | options
    options |= {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(**padded_prompts(), past_key_values=cache, **options)


@pytest.mark.parametrize(
    ("name", "mode", "attention"), pairwise(list(FAMILIES), list(MODES), ["stock", "kvloom"])
)
def test_family_gives_the_stock_tokens_and_logits(name: str, mode: str, attention: str) -> None:
    model = family(name, STOCK.get(name))
    stock = continued(model, DynamicCache(config=model.config), **MODES[mode])
    if attention == "kvloom":
        model.set_attn_implementation("kvloom")
    ours = continued(model, KVCache.for_model(model, page_size=4), **MODES[mode])
    assert torch.equal(ours.sequences, stock.sequences)
    for expected, actual in zip(stock.logits, ours.logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_keys_and_values_are_kept_in_pages(name: str) -> None:
    kept = [x for x in KVCache.for_model(family(name)).layers if isinstance(x, KVCacheLayer)]
    assert (len(kept), sum(layer.is_sliding for layer in kept)) == FAMILIES[name][2:]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_fork_continues_as_the_cache_it_came_from(name: str) -> None:
    model = family(name)
    prompt = padded_prompts()["input_ids"][1:]
    first = KVCache.for_model(model, page_size=4)
    with torch.no_grad():
        model(prompt, past_key_values=first, use_cache=True)
        fork = first.fork()
        logits = [model(prompt[:, :5], past_key_values=c, use_cache=True).logits for c in (first, fork)]
    assert torch.equal(logits[0], logits[1])


def test_layers_of_an_unknown_kind_are_named_in_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unknown(cache_utils.DynamicLayer):
        pass

    model = family("Llama", num_hidden_layers=4)
    layers = DynamicCache(config=model.config).layers
    layers[1] = Unknown()
    monkeypatch.setattr(layer_specs, "DynamicCache", lambda config: SimpleNamespace(layers=layers))
    with caplog.at_level(logging.WARNING, logger="kvloom"):
        KVCache.for_model(model)
    assert "1 of 4 layers keep transformers' own storage: {'Unknown': 1}" in caplog.text


def test_layers_that_this_version_mistakes_for_attention_are_refused() -> None:
    model = family("Llama")
    model.config.layer_types = ["full_attention", "unheard_of"]
    with pytest.raises((UnsupportedError, KeyError), match="unheard_of"):
        KVCache.for_model(model)


@pytest.mark.skipif("Falcon-H1" not in FAMILIES, reason="this version has no such layers")
def test_a_model_without_keys_is_refused() -> None:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=99, state_size=8)
    # Until 5.23 its argument has another name than that of a cache of keys and values.
    with pytest.raises(UnsupportedError, match=r"model must (have layers that attend to keys|take a cache)"):
        KVCache.for_model(AutoModelForCausalLM.from_config(config))


def test_a_model_with_a_cache_class_of_its_own_is_refused() -> None:
    sizes = SMALL | {"num_local_experts": 2, "layer_types": ["full_attention", "linear_attention"]}
    model = AutoModelForCausalLM.from_config(transformers.MiniMaxConfig(**sizes, head_dim=8))
    for refusing in (enable, KVCache.for_model):
        with pytest.raises(UnsupportedError, match="MiniMaxForCausalLM, which has a cache of its own"):
            refusing(model)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
def test_decoder_half_of_an_encoder_decoder_model(attention: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, init_std=0.3,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    prompt = padded_prompts()
    options = options | {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = model.generate(**prompt, **options)
    model.set_attn_implementation(attention)
    both = EncoderDecoderCache(KVCache.for_model(model, page_size=4), DynamicCache())
    assert torch.equal(model.generate(**prompt, past_key_values=both, **options), expected)
    assert both.self_attention_cache.nbytes > 0


def test_states_that_no_layer_keeps_are_refused() -> None:
    """A configuration that names no layers says nothing of them; one of attention alone has no states."""
    model = family("Llama")
    model._is_stateful, model.config.layer_types = True, None
    for door in (KVCache.for_model, lambda model: KVPool.for_model(model, max_tokens=64)):
        with pytest.raises(UnsupportedError, match=r"^model must have layers that .* got 'recurrent'"):
            door(model)
    model.config.layer_types = ["full_attention"] * 2
    assert len(KVCache.for_model(model).layers) == 2
