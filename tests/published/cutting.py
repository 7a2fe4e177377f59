"""Published configurations cut to sizes that run in tests: fewer and narrower layers, a smaller vocabulary.

What says how a model works stays as published: kinds of layers, RoPE, windows, experts for each token, and
fields that are missing. Dtypes become float32, and weights are not quantized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

VOCABULARY = 2112
_HIDDEN, _HEAD, _HEADS, _FFN = 64, 32, 4, 96
_LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers",
    "num_decoder_layers",
)  # fmt: skip
_ALL_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
    "decoder_attention_heads",
)  # fmt: skip
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
_PERIODS = (
    "full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern", "layer_switch",
    "attn_layer_period", "no_rope_layer_interval",
)  # fmt: skip
_INDICES = (
    "full_attn_idxs", "attn_layer_indices", "cross_attention_layers", "fullatt_block_indexes",
    "deepstack_visual_indexes", "intermediate_layers_indices",
)  # fmt: skip
_USUAL_PERIOD = {"gemma3_text": 6, "cohere2": 4, "recurrent_gemma": 3, "mllama_text_model": 4}
"""Of families whose configurations need not say it."""
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_embed", "out_hidden_size", "block_dim"), _HIDDEN),
    **dict.fromkeys(
        ("conv_dim", "conv_dim_out", "projection_dim", "lru_width", "word_embed_proj_dim"), _HIDDEN
    ),
    **dict.fromkeys(("hidden_size_per_layer_input", "d_kv", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("vocab_size", "org_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_lora_rank", "q_lora_rank"), _HEAD),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), _FFN),
    **dict.fromkeys(("n_inner", "ffn_hidden_size", "block_ff_dim", "intermediate_size_mlp"), _FFN),
    **dict.fromkeys(("moe_intermediate_size", "mlp_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "qk_rope_head_dim", "laurel_rank"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "mm_tokens_per_image", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads"), 2),
    "mamba_d_ssm": 2 * _HIDDEN,
    "attention_hidden_size": _HIDDEN,
}
_UNSAID = {
    "hidden_size": _HIDDEN,
    "intermediate_size": _FFN,
    "num_attention_heads": _HEADS,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
}
_INNER = ("mamba", "mamba2", "falcon_mamba")
"""Whose ``intermediate_size`` is the width of their states."""


def cut(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with small sizes; whatever else it says, it says as before.

    A nested configuration of text that leaves out sizes, which are those of a full model then, gets small
    ones.
    """
    found = _cut(config)
    if "text_config" in config:
        found["text_config"] = _UNSAID | found["text_config"]
    for name in ("audio_config", "vision_config"):
        if isinstance(config.get(name), dict):
            found[name] = _tower(config[name], found[name])
    return found | {"initializer_range": 0.3, "init_std": 0.3}  # so that greedy tokens do not repeat


def ids(said: Any) -> Any:
    """Ids of tokens within the smaller vocabulary, as many of them, and different where they were."""
    if isinstance(said, list):
        return [*map(ids, said)]
    is_outside = isinstance(said, int) and not isinstance(said, bool) and said >= VOCABULARY
    return 1000 + said % 1000 if is_outside else said


def cut_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that name tokens, by ``ids``; the others as they are."""
    named = ("token_id", "token_ids", "token_index", "tokens")
    return {k: ids(v) if k.endswith(named) else v for k, v in config.items()}


def _cut(config: Mapping[str, Any]) -> dict[str, Any]:
    kept, was = _num_kept(config), {name: config[name] for name in _LAYERS if config.get(name)}
    found = cut_ids({name: _value(name, x, config, kept, was) for name, x in config.items()})
    if config.get("model_type") in _INNER:
        found["intermediate_size"] = 2 * _HIDDEN
        found |= {"num_heads": 8, "head_dim": 16} if "num_heads" in config else {}
    if config.get("rotary_dim"):
        found["rotary_dim"] = 2 * round(config["rotary_dim"] * _scale(config) / 2)
    if "moe_layer_end_index" in config:
        found["moe_layer_end_index"] = kept - 1
    if config.get("num_kv_shared_layers"):
        found["num_kv_shared_layers"] = kept // 2
    found.pop("quantization_config", None)
    return found


def _value(name: str, x: Any, config: Mapping[str, Any], kept: int, layers: Mapping[str, int]) -> Any:
    """What a field says in the cut configuration."""
    if name in ("rope_scaling", "rope_parameters") and isinstance(x, dict):
        return {key: _rope(key, each, _scale(config)) for key, each in x.items()}
    if isinstance(x, dict) and name != "quantization_config":
        return _cut(x)
    if name in ("dtype", "torch_dtype") and x:
        return "float32"
    if name in _INDICES and x:
        return [i for i in x if i < kept] or [kept - 1]
    if name == "attention_types":
        return [[x[0][0], max(1, kept // len(x[0][0]))]]
    if isinstance(x, list | str) and len(x) in layers.values() and len(x) > 4:
        return x[:kept] if isinstance(x, str) else [_SIZES.get(name, each) for each in x[:kept]]
    if x is None or isinstance(x, bool | str):
        return x
    if name in _LAYERS:
        return kept
    if name in _ALL_HEADS:
        return min(x, _HEADS)
    if name in _KEY_HEADS:
        heads = (
            next(config[each] for each in _ALL_HEADS if each in config)
            if any(each in config for each in _ALL_HEADS)
            else 0
        )
        return _HEADS if x == heads else min(x, 2)
    return min(x, _SIZES[name]) if name in _SIZES and isinstance(x, int) else x


def _num_kept(config: Mapping[str, Any]) -> int:
    """The fewest layers that have each kind among them, and at least two."""
    total = max((config[name] for name in _LAYERS if config.get(name)), default=0)
    needed = [
        2,
        config.get("first_k_dense_replace", 0) + 1,
        _USUAL_PERIOD.get(config.get("model_type", ""), 0),
    ]
    needed += [10] if config.get("num_kv_shared_layers") else []  # half of them with both kinds
    needed += [config[name] for name in _PERIODS if isinstance(config.get(name), int)]
    for name, x in config.items():
        if isinstance(x, list | str) and len(x) == total and total > 4:
            needed += [1 + min(i for i, each in enumerate(x) if each == kind) for kind in {*x}]
        if name in _INDICES and x and name.startswith(("full_attn", "cross")):
            needed.append(x[0] + 1)
    return min(total, max(needed)) if total else 2


def _head(config: Mapping[str, Any]) -> float:
    width = next((config[x] for x in ("hidden_size", "d_model", "n_embd") if config.get(x)), 1)
    heads = next((config[x] for x in _ALL_HEADS if config.get(x)), 1)
    return float(config.get("head_dim") or width / heads)


def _scale(config: Mapping[str, Any]) -> float:
    """By how much heads become smaller."""
    return (_HEAD if config.get("head_dim") else _HIDDEN / _HEADS) / _head(config)


def _rope(name: str, x: Any, scale: float) -> Any:
    """Sections and factors of RoPE, which are for each of a head's frequencies."""
    if name.endswith("_factor") and isinstance(x, list):
        return x[: int(len(x) * scale)]
    if name != "mrope_section":
        return x
    total = round(sum(x) * scale)
    parts = [math.floor(each * scale) for each in x]
    return [each + (i < total - sum(parts)) for i, each in enumerate(parts)]


def _tower(config: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """A tower of pictures, whose sizes belong together."""
    inner = "embed_dim" if "embed_dim" in config else "hidden_size"
    found |= {inner: 32} | ({"head_dim": 16} if "head_dim" in config else {})
    found |= {name: 2 for name in _ALL_HEADS if name in config}
    if "image_size" in config and "patch_size" in config:
        found["image_size"] = 4 * config["patch_size"]
    if "vision_output_dim" in config and "intermediate_layers_indices" in config:
        found["vision_output_dim"] = 32 * (1 + len(found["intermediate_layers_indices"]))
    return found
