"""A token has the same bits in any batch and however its text is cut, in every family that can be so."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import EXPERTS, FAMILIES, LATENT, SMALL
from integrations.models.test_unchanged_families import FAMILIES as OTHERS
from oracles.pairs import in_turn, pairwise
from oracles.threads import num_threads
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvloom.integrations.transformers import KVCache, enable
from kvloom.integrations.transformers.invariance import report_layers

MIXTURE = EXPERTS | {"moe_intermediate_size": 16}
DEEPSEEK = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2-MoE": ("Qwen2MoeConfig", MIXTURE | {"num_experts": 4, "shared_expert_intermediate_size": 24}),
    "OLMoE": ("OlmoeConfig", EXPERTS | {"num_experts": 4}),
    "DeepSeek-V3 of experts": ("DeepseekV3Config", LATENT | MIXTURE | DEEPSEEK | {"num_key_value_heads": 4}),
    "GLM-4": ("Glm4Config", {"head_dim": 8}),
    "GLM-4-MoE": ("Glm4MoeConfig", MIXTURE | DEEPSEEK | {"head_dim": 8}),
    "Granite-MoE": ("GraniteMoeConfig", EXPERTS | {"num_local_experts": 4}),
    "PhiMoE": ("PhimoeConfig", EXPERTS | {"num_local_experts": 4}),
    "JetMoE": ("JetMoeConfig", EXPERTS | {"num_local_experts": 4, "kv_channels": 8}),
    "Phi-3": ("Phi3Config", {}),
    "StarCoder2": ("Starcoder2Config", {}),
    "SmolLM3": ("SmolLM3Config", {}),
    "Cohere2": ("Cohere2Config", {"sliding_window": 8}),
    "ERNIE 4.5": ("Ernie4_5Config", {"head_dim": 8}),
    "Helium": ("HeliumConfig", {"head_dim": 8}),
    "Nemotron": ("NemotronConfig", {}),
    "Persimmon": ("PersimmonConfig", {}),
    "Hunyuan": ("HunYuanDenseV1Config", {"head_dim": 8}),
    "Arcee": ("ArceeConfig", {}),
    "Seed-OSS": ("SeedOssConfig", {"head_dim": 8}),
    "EXAONE 4": ("Exaone4Config", {"sliding_window": 8}),
    "DiffLlama": ("DiffLlamaConfig", {}),
    # Whose experts have no product but those of the operator @.
    "Aria": ("AriaTextConfig", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
}
ALL = {name: (config, differs) for name, (config, differs, *_) in FAMILIES.items()} | OTHERS | MORE
# Attention of their own, or sums over a whole text whose order is that of the cut.
EXCEPTIONS = {
    "Bloom": "attention",
    "Falcon": "attention",
    "Qwen3-Next": "recurrent",
    "Falcon-H1": "recurrent",
}
NAMES = [name for name, (config, _) in ALL.items() if hasattr(transformers, config)]
HELD = [name for name in NAMES if name not in EXCEPTIONS]
# Of the others the first two layers have all kinds.
FOUR_LAYERS = ("Llama4", "Gemma3n", "Gemma4", "Qwen3-Next", "Cohere2", "EXAONE 4", "SmolLM3", "MiMo-V2")
TOKENS, ROWS = 20, 3
DTYPES = [torch.float32, torch.bfloat16]


def model_of(name: str, dtype: torch.dtype) -> Any:
    config, differs = ALL[name]
    sizes = SMALL | differs | {"num_hidden_layers": 4 if name in FOUR_LAYERS else 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    return model.eval().to(dtype)


def texts() -> Tensor:
    return torch.randint(3, 99, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, ids: Tensor, cuts: int | None, kv: str = "auto", pad: int = 0) -> Tensor:
    """Of texts in one batch, in one forward or cut at random by a seed; 0 is token by token.

    The first row is padded on the left by ``pad`` tokens, which are not in the result.
    """
    draw, cache, at = random.Random(cuts), KVCache.for_model(model, kv=kv), 0
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    positions = mask.cumsum(1).sub(1).clamp(min=0)
    parts: list[Tensor] = []
    while at < ids.shape[1]:
        size = ids.shape[1] if cuts is None else draw.choice([1, 2, 3, 5, 7, 17]) if cuts else 1
        piece = slice(at, at + size)
        extra = {"position_ids": positions[:, piece], "attention_mask": mask[:, : at + size]} if pad else {}
        parts.append(model(ids[:, piece], past_key_values=cache, **extra).logits)
        at += size
    return torch.cat(parts, 1)


@pytest.mark.parametrize(("name", "dtype", "kv"), in_turn(HELD, DTYPES, ["auto", "int8"]), ids=str)
def test_every_batch_and_cut_has_the_same_bits(name: str, dtype: torch.dtype, kv: str) -> None:
    model, ids = model_of(name, dtype), texts()
    enable(model, batch_invariant=True)
    alone = torch.cat([logits(model, row[None], None, kv) for row in ids])
    assert torch.equal(logits(model, ids[:1], 0, kv), alone[:1])
    for cuts in (None, 6):
        assert torch.equal(logits(model, ids, cuts, kv), alone)
    assert report_layers(model).not_invariant == {}


@pytest.mark.parametrize("name", [name for name in NAMES if name in EXCEPTIONS])
def test_where_it_does_not_hold_the_report_says_why(name: str) -> None:
    model = model_of(name, torch.float32)
    enable(model, batch_invariant=True)
    reasons = report_layers(model).not_invariant
    assert [reason for reason in reasons if reason.startswith(EXCEPTIONS[name])], reasons


@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE", "GPT-2", "Gemma2"])
def test_threads_do_not_count(name: str) -> None:
    model, ids = model_of(name, torch.float32), texts()
    enable(model, batch_invariant=True)
    found = []
    for threads in (1, 2, 3):
        with num_threads(threads):
            found += [logits(model, ids, cuts) for cuts in (None, 1)]
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize(
    ("name", "dtype", "pack"),
    pairwise(["Llama", "Qwen2-MoE", "GPT-2", "Gemma2", "Phi"], DTYPES, [True, "only"]),
    ids=str,
)
def test_packed_layers_have_the_same_bits(name: str, dtype: torch.dtype, pack: bool | str) -> None:
    model, ids = model_of(name, dtype), texts()
    plain = logits(model, ids, None)
    enable(model, batch_invariant=True, pack=pack)
    alone = torch.cat([logits(model, row[None], None) for row in ids])
    assert report_layers(model).packed > 0 or report_layers(model).not_packed
    for threads, several in ((1, (None, 0)), (2, (None, 1))):
        with num_threads(threads):
            assert all(torch.equal(logits(model, ids, cuts), alone) for cuts in several)
    assert (alone - plain).norm() < (1e-4 if dtype == torch.float32 else 0.1) * plain.norm()


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3-MoE"])
def test_left_padding_does_not_count(name: str) -> None:
    model, ids = model_of(name, torch.float32), texts()
    enable(model, batch_invariant=True)
    alone = logits(model, ids[:1, 9:], None)
    for cuts in (None, 1):
        assert torch.equal(logits(model, ids, cuts, pad=9)[:1, 9:], alone)


def test_without_it_the_bits_differ() -> None:
    """What the tests above would not notice, they could not show."""
    model, ids = model_of("Llama", torch.float32), texts()
    enable(model)
    assert not torch.equal(logits(model, ids[:1], 0), logits(model, ids[:1], None))


@pytest.mark.parametrize(
    "mode", [{"num_beams": 3}, {"prefill_chunk_size": 5}, {"prompt_lookup_num_tokens": 3}]
)
def test_generation_of_every_mode_goes_by_the_same_logits(mode: dict[str, Any]) -> None:
    """Modes that cut a text otherwise choose from logits with the same bits."""
    model, ids = model_of("Llama", torch.float32), texts()
    enable(model, batch_invariant=True)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids[:1], **options, **mode)
    if "num_beams" in mode:
        out = model.generate(out.sequences[:, :TOKENS], **options)
    text = out.sequences[:, :-1]
    expected = logits(model, text, None)[:, TOKENS - 1 :]
    assert torch.equal(torch.stack(out.logits, 1)[:1], expected)
