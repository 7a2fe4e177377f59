"""Speculation by a model's own heads (MTP), which have a cache of their own beside this library's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import modeling_layers

from kvloom.integrations.transformers import KVCache, enable

HEADS = 2
NEW = 24
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_mtp_layers": HEADS,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Glm4Moe": {"num_key_value_heads": 2, "head_dim": 8},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
    },
}
pytestmark = pytest.mark.skipif(
    not hasattr(modeling_layers, "MtpModel"), reason="this version of transformers has no such heads"
)


@pytest.fixture(params=list(FAMILIES))
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A random model; its heads, which transformers reads from its folder, too, so that most drafts go."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **FAMILIES[request.param])
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).eval()
    heads = modeling_layers.MtpModel(model, HEADS).eval()
    monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", lambda *args, **options: heads)
    return model


def tokens(model: Any, **options: Any) -> list[int]:
    ids = torch.arange(40)[None] * 7 % 96 + 3
    found: list[int] = model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)[0].tolist()
    return found


@pytest.mark.parametrize("kv", ["auto", "int8", "int4:g8,recent=16"])
def test_drafts_of_heads_give_the_tokens_of_greedy_decoding(model: Any, kv: str) -> None:
    expected = tokens(model, past_key_values=KVCache.for_model(model, kv))
    assert tokens(model, use_mtp=True, past_key_values=KVCache.for_model(model, kv)) == expected
    if kv == "auto":
        assert expected == tokens(model)


def test_an_enabled_model_takes_them(model: Any) -> None:
    expected = tokens(model)
    enable(model)
    assert tokens(model, use_mtp=True) == tokens(model) == expected
