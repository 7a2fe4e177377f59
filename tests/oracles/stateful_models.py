"""Small random models of families with recurrent states, by their folders in transformers."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import is_whole
from transformers import models as families_of_transformers
from transformers.cache_utils import Cache

from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT

SIZES: dict[str, Any] = {
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
    "max_position_embeddings": 4096,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 1,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "use_mamba_kernels": False,
}
MIXED: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2}
DENSE = MIXED | {"mlp_layer_types": ["dense"] * 4, "num_key_value_heads": 4}
OTHERS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": DENSE | {"q_lora_rank": None},
    "falcon_h1": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "inkling2": {
        "unpadded_vocab_size": 99,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
    },
    "kimi_linear": DENSE,
    "lara_mini": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]},
    "olmo_hybrid": MIXED,
    "qwen3_5": MIXED,
    "qwen3_5_moe": MIXED,
    "qwen3_next": MIXED,
}
"""Those that go on from their states, and what their configurations need besides."""
WRONG: dict[str, dict[str, Any]] = {
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "bamba": {"attn_layer_indices": [1, 3]},
}
"""Those that do not."""


TWINS = {"lfm3": "lfm2", "olmo_hybrid": "qwen3_next", "qwen3_5": "qwen3_next", "qwen3_5_moe": "qwen3_next"}
"""Families with the mixer of another."""


def stateful_model(name: str, **options: Any) -> Any:
    """A small random model of a folder; ``options`` are of its configuration."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kind = next(
        x
        for x in vars(module).values()
        if getattr(x, "__module__", "") == module.__name__ and x.__name__.endswith("ForCausalLM")
    )
    fields = inspect.signature(kind.config_class.__init__).parameters
    sizes = SIZES | (OTHERS | WRONG).get(name, {})
    torch.manual_seed(0)
    config = kind.config_class(**{key: x for key, x in sizes.items() if key in fields} | options)
    return kind(config).eval()


def small_model(name: str) -> Any:
    """One with as few layers as have all kinds of them: states, keys and values, and a window if any has."""
    count = {"lara_mini": 4, "lfm3": 3}.get(name, 2)
    patterns = ("layer_types", "mlp_layer_types", "layers_block_type")
    fewer = {key: OTHERS[name][key][:count] for key in patterns if key in OTHERS[name]}
    return stateful_model(name, num_hidden_layers=count, **fewer)


CACHES_SEE_STATES = hasattr(Cache, "get_conv_state")
"""Whether mixers of this transformers change states by methods of a cache."""
STATES_IN_SESSIONS = CACHE_ARGUMENT == "cache"
"""Whether sessions take those of this transformers."""
NEEDS_STATES_IN_SESSIONS = pytest.mark.skipif(
    not STATES_IN_SESSIONS, reason="sessions give no cache to these mixers"
)


def folders() -> list[str]:
    """Of ``OTHERS`` those that the installed transformers has.

    Before 5.24 Inkling 2 asks for the length of its cache within a step, which is refused.
    """
    names = [x for x in OTHERS if Path(families_of_transformers.__path__[0], x).is_dir()]
    return [x for x in names if x != "inkling2" or STATES_IN_SESSIONS]


def mixers() -> list[str]:
    """Of ``folders`` one for each mixer; ``pytest --campaign`` has all."""
    return [x for x in folders() if x not in TWINS or is_whole()]
