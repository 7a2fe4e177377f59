"""Gains make channels of a head alike; layers whose keys or queries are not seen say why they have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from integrations.smoothing.test_offsets import model_of
from oracles.language_models import make_model
from transformers import AutoModelForSeq2SeqLM, cache_utils

from kvloom.integrations.transformers.smoothing import LayerSmoothing, smoothing_of


def gain_of(found: LayerSmoothing) -> torch.Tensor:
    """``[H, D]`` of a layer that is smoothed."""
    assert found.smoothing is not None, found.reason
    return found.smoothing.gain


def test_channels_that_are_larger_have_larger_gains() -> None:
    """The pair (3, 11) of head 0 is 16 times as large, its queries a 16th: the model computes the same."""
    plain = gain_of(smoothing_of(make_model())[1])
    model = make_model()
    with torch.no_grad():
        attention: Any = model.model.layers[1].self_attn
        for channel in (3, 11):
            attention.k_proj.weight[channel] *= 16
            attention.q_proj.weight.view(8, 16, -1)[:4, channel] /= 16
    found = gain_of(smoothing_of(model)[1])
    assert torch.equal(found[1], plain[1])
    ratio = found[0] / plain[0]
    others = [i for i in range(16) if i not in (3, 11)]
    assert (ratio[others] == ratio[0]).all()
    assert (ratio[[3, 11]] >= 8 * ratio[0]).all() and (ratio[[3, 11]] <= 32 * ratio[0]).all()
    assert torch.equal(found, torch.exp2(found.log2().round()))


def test_queries_of_all_heads_of_a_group_count() -> None:
    """Each query head of key head 0 has large queries in a channel of its own, which get small gains."""
    model = make_model()
    plain = gain_of(smoothing_of(model)[0])
    with torch.no_grad():
        queries: Any = model.model.layers[0].self_attn.q_proj.weight
        for head in range(4):
            for channel in (head, head + 8):
                queries.view(8, 16, -1)[head, channel] *= 30
    ratio = gain_of(smoothing_of(model)[0]) / plain
    large = [*range(4), *range(8, 12)]
    others = [*range(4, 8), *range(12, 16)]
    assert (ratio[0, large] < 0.5 * ratio[0, others].min()).all()
    assert torch.equal(ratio[1], torch.ones(16))


def test_dead_channels_have_bounded_gains() -> None:
    model = make_model()
    with torch.no_grad():
        attention: Any = model.model.layers[0].self_attn
        attention.k_proj.weight[[0, 8]] = 0
        attention.q_proj.weight.view(8, 16, -1)[:, [1, 9]] = 0
        attention.k_proj.weight[16:] = 0
    gain = gain_of(smoothing_of(model)[0])
    assert gain.isfinite().all() and (gain >= 1 / 64).all() and (gain <= 64).all()


LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 4,
    "num_key_value_heads": 4,
}
SHARED = {
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 99,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": None,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}
RECURRENT = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}


@pytest.mark.parametrize(
    ("config", "options", "missing"),
    [
        ("GptOssConfig", SINKS, {}),
        ("Gemma2Config", {"sliding_window": 8}, {}),
        pytest.param(
            "Gemma3nTextConfig",
            SHARED,
            {3: "it reads the keys of another layer"},
            marks=pytest.mark.skipif(
                not hasattr(cache_utils, "DummyLayer"), reason="caches have no layers for those that share"
            ),
        ),
        (
            "BloomConfig",
            {},
            dict.fromkeys(range(4), "attention is not called through transformers' interface"),
        ),
    ],
)
def test_layers_that_keep_no_keys_of_their_own_say_so(
    config: str, options: dict[str, Any], missing: dict[int, str]
) -> None:
    found = smoothing_of(model_of(config, options))
    assert {i: x.reason for i, x in enumerate(found) if x.smoothing is None} == missing
    assert len(found) == 4


@pytest.mark.skipif(not hasattr(cache_utils, "LinearAttentionLayer"), reason="no such layers in this version")
@pytest.mark.parametrize(
    ("config", "options", "missing"),
    [("Qwen3NextConfig", RECURRENT, [0, 2]), ("MambaConfig", {"state_size": 8}, [0, 1, 2, 3])],
)
def test_recurrent_layers_keep_no_keys(config: str, options: dict[str, Any], missing: list[int]) -> None:
    found = smoothing_of(model_of(config, options))
    assert [i for i, x in enumerate(found) if x.reason == "it keeps no keys"] == missing
    assert [i for i, x in enumerate(found) if x.smoothing is None] == missing


def test_latent_keys_are_those_that_the_cache_keeps() -> None:
    """Expanded, they have the width of what attention reads; as latents, nobody knows their queries."""
    for found in smoothing_of(model_of("DeepseekV3Config", LATENT)):
        if found.smoothing is None:
            assert found.reason == "attention reads other keys than the cache keeps"
        else:
            assert gain_of(found).shape == (4, 16)


@pytest.mark.parametrize("config", ["BartConfig", "T5Config"])
def test_the_decoder_of_an_encoder_decoder_model(config: str) -> None:
    torch.manual_seed(0)
    sizes = {"BartConfig": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
                            "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                            "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
             "T5Config": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
                          "num_heads": 4, "decoder_start_token_id": 0}}[config]  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(getattr(transformers, config)(vocab_size=99, **sizes)).eval()
    found = smoothing_of(model)
    assert len(found) == 2
    for layer in found:
        if layer.smoothing is not None:
            assert gain_of(layer).shape == (4, 8)
        else:  # before their attention was one function
            assert layer.reason == "attention is not called through transformers' interface"
