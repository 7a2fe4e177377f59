"""Small random models of the architectures that are carried, and what they compute."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor

from kvloom import KVCache

WINDOW, VOCABULARY = 16, 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.2,
}
_WINDOWS = {
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],  # the order that other engines know
}
_LATENTS = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "wide": ("LlamaForCausalLM", {"head_dim": 128}),
    "yarn": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            }
        },
    ),
    "dynamic": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 256}),
    "gemma3": ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 64, **_WINDOWS}),
    "deepseek": ("DeepseekV3ForCausalLM", _LATENTS),
    "phi": ("PhiForCausalLM", {"partial_rotary_factor": 0.5}),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True}),
    "neox": ("GPTNeoXForCausalLM", {"num_key_value_heads": 4, "intermediate_size": 512}),
    "glm": ("Glm4ForCausalLM", {"pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 256, "n_ctx": 256}),
}
HAS_LATENTS = int(transformers.__version__.split(".")[0]) >= 5
HAS_ROPE_PARAMETERS = HAS_LATENTS
"""Whether a configuration takes ``rope_parameters``."""


@functools.cache
def small(name: str) -> Any:
    """A model by its name among ``_CONFIGS``, float32."""
    torch.manual_seed(3)
    kind, own = _CONFIGS[name]
    form: Any = getattr(transformers, kind)
    sizes = {"vocab_size": VOCABULARY} if name == "gpt2" else _SIZES
    sizes = {
        k: v
        for k, v in sizes.items()
        if k != "head_dim" or name not in ("phi", "stablelm", "neox", "deepseek")
    }
    model = form(form.config_class(**{**sizes, **own})).eval()
    for weight in model.parameters():
        if weight.ndim == 1:  # biases, and norms that do not change one thing alone
            torch.nn.init.normal_(weight, mean=float(weight.detach().mean()), std=0.2)
    return model


def text(length: int, seed: int = 5) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def prefilled(model: Any, tokens: Tensor, kv: str = "auto", **options: Any) -> KVCache:
    cache = KVCache.for_model(model, kv, **options)
    model(tokens, past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def continued(model: Any, cache: Any, tokens: Tensor) -> Tensor:
    """Logits of some more tokens, one by one."""
    steps = [model(x, past_key_values=cache, use_cache=True).logits[:, -1] for x in tokens.split(1, 1)]
    return torch.stack(steps)
