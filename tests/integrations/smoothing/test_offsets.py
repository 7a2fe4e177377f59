"""Means of keys before RoPE, planted in models of many families, are found and hold at any position."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, cache_utils
from transformers.models.gptj import modeling_gptj

from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.smoothing import LayerSmoothing, smoothing_of
from kvloom.ops.offsets import KeyOffset

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"n_embd": 32, "n_layer": 2, "n_head": 4}
LONG = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 512,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [9.0] * 4},
}
ROPE = {"rope_theta": 500000.0}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}
GLOBAL = ["full_attention", "sliding_attention"] * 2


@dataclass
class Family:
    """A mean in one pair of channels of one layer.

    Attributes:
        config: Name of the class.
        pair: Channels of a head.
        options: What differs from SMALL.
        layer: Which layer.
        place: Name of its projection, behind the number of the layer.
        rows: The row of the projection of head 0's first channel, and rows from head to head.
        frequency: Radians that the pair turns by, where the formula is simple.
        tolerance: The most that is left of the pair, relative to what it is.
    """

    config: str
    pair: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    layer: int = 1
    place: str = "self_attn.k_proj"
    rows: tuple[int, int] = (0, 8)
    frequency: float | None = None
    tolerance: float = 0.2


FAMILIES = {
    "halves": Family("LlamaConfig", (1, 5), frequency=0.1),
    "lowest frequency": Family("LlamaConfig", (3, 7), frequency=0.001),
    "biases of its own": Family("Qwen2Config", (0, 4), frequency=1.0),
    "norms of keys": Family("Qwen3Config", (1, 5), frequency=0.1),
    "neighbors": Family("CohereConfig", (4, 5), ROPE, frequency=500000**-0.5),
    "neighbors, partial": Family("GlmConfig", (2, 3), frequency=0.01),
    "partial": Family("PhiConfig", (1, 3), frequency=0.01),
    "what does not turn beside it": Family("PhiConfig", (6, 7), frequency=0.0),
    "partial, in one projection": Family(
        "GPTNeoXConfig", (1, 3), {"rotary_pct": 0.5}, 1, "attention.query_key_value", (8, 24), 0.01
    ),
    "a table of sines": Family(
        "GPTJConfig", (2, 3), HEADS | {"rotary_dim": 4}, place="attn.k_proj", frequency=0.01
    ),
    "complex numbers": Family(
        "Llama4TextConfig",
        (2, 3),
        {
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "use_qk_norm": False,
            "attention_chunk_size": 512,
        },
    ),
    "YaRN": Family("LlamaConfig", (2, 6), YARN),
    "LongRoPE": Family("Phi3Config", (1, 5), LONG, place="self_attn.qkv_proj", rows=(32, 8)),
    "global layers": Family("Gemma3TextConfig", (1, 5), {"layer_types": GLOBAL}, 2, tolerance=0.4),
    "local layers": Family(
        "Gemma3TextConfig",
        (1, 5),
        {"layer_types": GLOBAL, "sliding_window": 64},
        frequency=0.1,
        tolerance=0.4,
    ),
    "a layer without RoPE": Family("SmolLM3Config", (2, 3), {"no_rope_layers": [1, 0, 1, 1]}, frequency=0.0),
    "positions that are learned": Family(
        "GPT2Config", (2, 3), HEADS, 1, "attn.c_attn", (32, 8), frequency=0.0
    ),
    "positions that are learned, OPT": Family(
        "OPTConfig", (2, 3), {"ffn_dim": 48, "word_embed_proj_dim": 32}, frequency=0.0
    ),
    "among recurrent layers": Family(
        "JambaConfig", (4, 5), {"attn_layer_period": 2, "attn_layer_offset": 1}, frequency=0.0
    ),
}
if not hasattr(cache_utils, "LinearAttentionLayer"):  # as in tests/integrations/models/test_families.py
    del FAMILIES["among recurrent layers"]


def model_of(config: str, options: dict[str, Any]) -> Any:
    """A random model."""
    torch.manual_seed(0)
    found = getattr(transformers, config)(**SMALL | options)
    return AutoModelForCausalLM.from_config(found).eval()


def plant(model: Any, family: Family, size: float = 60.0) -> None:
    """Add a mean to one pair of all heads, another one in each."""
    end = f".{family.layer}.{family.place}"
    (layer,) = (module for name, module in model.named_modules() if name.endswith(end))
    first, step = family.rows
    if layer.bias is None:
        layer.bias = nn.Parameter(torch.zeros(layer.weight.shape[0]))
    for head in range(2):
        for channel, x in zip(family.pair, (size, size * (head - 0.5)), strict=True):
            layer.bias.data[first + step * head + channel] = x


def keys_of(model: Any, layer: int, num_tokens: int = 400) -> tuple[Tensor, Tensor]:
    """Keys ``[H, T, D]`` of other tokens than those that were measured, and their positions."""
    ids = torch.randint(3, 99, (1, num_tokens), generator=torch.Generator().manual_seed(5))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, use_cache=True, **as_argument(model, cache))
    keys = cache.layers[layer].keys[0]
    return keys, torch.arange(num_tokens - keys.shape[1], num_tokens)


def offset_of(found: LayerSmoothing) -> KeyOffset:
    """That of a layer that has one."""
    assert found.smoothing is not None and found.smoothing.offset is not None, found.reason
    return found.smoothing.offset


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_planted_mean_is_found_and_holds_at_other_positions(name: str) -> None:
    family = FAMILIES[name]
    if family.config == "GPTJConfig" and "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(modeling_gptj):
        pytest.skip("its attention is not called through transformers' interface")
    model = model_of(family.config, family.options)
    plant(model, family)
    found = smoothing_of(model)[family.layer]
    offset = offset_of(found)
    assert found.reason.startswith(f"offsets of {offset.mean.shape[1]} pair")
    keys, positions = keys_of(model, family.layer)
    left = keys - offset.at(positions).transpose(0, 1)
    for head in range(2):
        where = offset.channels[head].tolist().index(list(family.pair))
        if family.frequency is not None:
            torch.testing.assert_close(float(offset.frequencies[head, where]), family.frequency)
        before, after = (
            x[head, positions >= 100][:, list(family.pair)].square().mean().sqrt() for x in (keys, left)
        )
        assert after < family.tolerance * before


def test_the_mean_is_that_of_the_keys_before_rope() -> None:
    model = model_of("LlamaConfig", {})
    plant(model, FAMILIES["halves"])
    offset = offset_of(smoothing_of(model)[1])
    for head in range(2):
        where = offset.channels[head].tolist().index([1, 5])
        expected = torch.tensor([60.0, 60.0 * (head - 0.5)])
        torch.testing.assert_close(offset.mean[head, where], expected, rtol=0.0, atol=2.0)


def test_heads_have_pairs_of_their_own() -> None:
    model = model_of("LlamaConfig", {"attention_bias": True})
    bias = model.model.layers[1].self_attn.k_proj.bias.data
    bias[1], bias[8 + 2], bias[8 + 3] = 60.0, 60.0, 60.0
    offset = offset_of(smoothing_of(model)[1])
    found = [
        {tuple(pair) for pair, m in zip(offset.channels[i].tolist(), offset.mean[i], strict=True) if m.any()}
        for i in range(2)
    ]
    assert (1, 5) in found[0] and {(2, 6), (3, 7)} <= found[1]


def test_keys_without_a_mean_get_gains_only() -> None:
    model = model_of("LlamaConfig", {})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.normal_()
        model.model.embed_tokens.weight.normal_()
    found = smoothing_of(model)[0]
    assert found.smoothing is not None and found.smoothing.offset is None
    assert found.reason == "gains only: no pair of channels has a mean worth an offset"


def test_a_mean_of_a_part_of_the_text_is_none() -> None:
    """Learned positions that add much to the first tokens, as no rotation explains."""
    model = model_of("GPT2Config", HEADS)
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
        model.transformer.wpe.weight[:80] += 20 * torch.randn(32)
        model.transformer.wpe.weight[80:] += 20 * torch.randn(32)
        model.transformer.h[0].attn.c_attn.bias.zero_()
    offset = smoothing_of(model)[0].smoothing.offset
    keys, positions = keys_of(model, 0, 256)
    if offset is not None:
        left = keys - offset.at(positions).transpose(0, 1)
        for third in positions.tensor_split(3):
            assert left[:, third].square().sum() < keys[:, third].square().sum()


def test_frequencies_that_are_none_of_the_models_give_gains_only() -> None:
    model = model_of("LlamaConfig", {})
    plant(model, FAMILIES["halves"])
    model.model.rotary_emb.forward = Stretched(model.model.rotary_emb)
    found = smoothing_of(model)
    assert {x.reason for x in found} == {"gains only: the rotation of its keys is not known"}
    assert all(x.smoothing is not None and x.smoothing.offset is None for x in found)


class Stretched:
    """RoPE of positions that are stretched where nobody sees it."""

    def __init__(self, module: nn.Module) -> None:
        self.kind, self.module = type(module), module

    def __call__(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.kind.forward(self.module, x, position_ids * 1.37)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "kvloom"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_attention_and_dtype_finds_it(attention: str, dtype: torch.dtype) -> None:
    model = model_of("LlamaConfig", {})
    plant(model, FAMILIES["halves"])
    model.set_attn_implementation(attention)
    offset = offset_of(smoothing_of(model.to(dtype))[1])
    assert all([1, 5] in pairs for pairs in offset.channels.tolist())
    assert offset.frequencies.dtype == torch.float64
