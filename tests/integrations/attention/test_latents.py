"""Latents of multi-head latent attention where they lie: the stock tokens, in every way to get them."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import EXPERTS, FOUR, LATENT, MODES, SMALL, padded_prompts
from oracles.pairs import in_turn
from oracles.stateful_models import CACHES_SEE_STATES
from torch import Tensor, nn
from transformers import models as families_of_transformers

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, disable, enable
from kvloom.integrations.transformers.attention import latents as latent_attention
from kvloom.integrations.transformers.attention.latents import ExpandedStates, why_expanded
from kvloom.integrations.transformers.models.text_config import has_latents

SIZES = (
    SMALL
    | LATENT
    | EXPERTS
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 4,
        "moe_intermediate_size": 16,
        "moe_topk": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
        "num_layers": 2,
        "max_position_embeddings": 256,
        "index_topk": 6,
        "index_head_dim": 16,
        "index_n_heads": 4,
    }
)
"""Sizes of a small model, of which a configuration takes those that it has."""

OTHERS: dict[str, dict[str, Any]] = {
    "longcat_flash": {"head_dim": 8},
    "kimi_linear": FOUR
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense"] * 4,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "bailing_hybrid": FOUR
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense"] * 4,
        "q_lora_rank": None,
        "head_dim": 8,
    },
    # Layers with windows, whose sizes are no fields of the configuration.
    "dots3_note": {
        "shared_experts_intermediate_size": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "glm5_next": FOUR
    | {"qk_rope_head_dim": 0, "index_kpool": 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "qwen4_exp": FOUR
    | {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "hy_v4_vl": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    },
    # Layers without positions, with the keys of another layer, and with the choice of another.
    "mistral_large4": FOUR
    | {
        "kv_source_layers": [0, 0, 2, 2],
        "no_rope_layers": [1, 1, 0, 0],
        "indexer_types": ["full", "shared", "full", "full"],
    },
}
"""What a family's configuration needs besides."""
VISION: dict[str, dict[str, Any]] = {
    "text_config": {},
    "vision_config": {
        "depth": 1,
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "num_attention_heads": 2,
        "out_hidden_size": 32,
        "projection_intermediate_size": 16,
    },
}
"""Sizes of what sees pictures, which no test has."""


def families() -> list[str]:
    """Folders of transformers whose attention expands latents."""
    folder = families_of_transformers.__path__[0]
    found = []
    for module in pkgutil.iter_modules([folder]):
        code = Path(folder, module.name, f"modeling_{module.name}.py")
        if code.exists() and "def expand_kv(" in code.read_text():
            found.append(module.name)
    return found


FAMILIES = families()
pytestmark = pytest.mark.skipif(not FAMILIES, reason="this version of transformers caches no latents")


def family(name: str, **options: Any) -> Any:
    """A small random model of a folder."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kinds = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    kind = min(
        (x for x in kinds if x.__name__.endswith(("ForCausalLM", "ForConditionalGeneration"))),
        key=lambda x: x.__name__,
    )
    parts = {key: x for key, x in kind.config_class.sub_configs.items() if key in VISION}
    torch.manual_seed(0)
    if "text_config" not in parts:
        return kind(kind.config_class(**sizes_of(name, kind.config_class, options))).eval()
    text = sizes_of(name, parts["text_config"], options)
    return kind(kind.config_class(text_config=text, vision_config=VISION["vision_config"])).eval()


def sizes_of(name: str, config: type, options: dict[str, Any]) -> dict[str, Any]:
    """Those of a family, and of the others what its configuration has a field of."""
    fields, own = inspect.signature(config.__init__).parameters, OTHERS.get(name, {})
    return {key: x for key, x in (SIZES | own | options).items() if key in fields or key in own}


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of queries that were absorbed, one for each call of attention."""
    counts: list[int] = []
    absorb = ExpandedStates.absorbed

    def counted(self: Any, values: Any, query: Tensor, *more: Any) -> Any:
        result = absorb(self, values, query, *more)
        if result is not None:
            counts.append(query.shape[2])
        return result

    monkeypatch.setattr(ExpandedStates, "absorbed", counted)
    # Some other test's model may still want it.
    monkeypatch.setattr(latent_attention, "is_batch_invariant", lambda: False)
    return counts


@pytest.mark.parametrize(("name", "mode"), in_turn(FAMILIES, [*MODES, "lookup"]))
def test_every_family_gives_the_stock_tokens(name: str, mode: str, absorbed: list[int]) -> None:
    model = family(name)
    options = {"prompt_lookup_num_tokens": 3} if mode == "lookup" else MODES[mode]
    if mode == "lookup":
        options |= {"input_ids": padded_prompts()["input_ids"][1:], "attention_mask": None}
    if mode == "lookup" and model._is_stateful:  # which transformers refuses
        stock = generated(model, **{**options, "prompt_lookup_num_tokens": None})
        enable(model)
        if not CACHES_SEE_STATES:
            with pytest.raises(UnsupportedError, match=r"^recurrent states cannot go back"):
                generated(model, **options)
            return
        assert torch.equal(generated(model, **options).sequences, stock.sequences)
        return
    stock = generated(model, **options)
    assert not absorbed
    enable(model)
    ours = generated(model, **options)
    assert absorbed
    assert isinstance(ours.past_key_values, KVCache)
    assert torch.equal(ours.sequences, stock.sequences)
    for expected, actual in zip(stock.logits, ours.logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


def generated(model: Any, **options: Any) -> Any:
    """What ``generate`` returns, with the logits of every step."""
    torch.manual_seed(1)
    options = padded_prompts() | {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8} | options
    return model.generate(**options, return_dict_in_generate=True, output_logits=True)


@pytest.mark.parametrize("kv", ["auto", "float16", "int8", "int4", "int4,recent=0", "int2"])
def test_latents_of_every_kind_are_read_in_place(kv: str, absorbed: list[int]) -> None:
    """As the stock attention computes with the cache's own latents, dequantized.

    Of one layer: behind it roundings differ, and a number between two codes moves by a scale.
    """
    model = family("deepseek_v3", kv_lora_rank=64, qk_rope_head_dim=16, num_hidden_layers=1)
    ids = torch.randint(3, 99, (2, 90), generator=torch.Generator().manual_seed(1))
    logits = []
    for attention in ("kvloom", "sdpa"):
        model.set_attn_implementation(attention)
        cache = KVCache.for_model(model, kv, page_size=16)
        with torch.no_grad():
            model(ids[:, :80], past_key_values=cache)
            logits.append(model(ids[:, 80:81], past_key_values=cache).logits)
    assert absorbed == [1]
    bound = 1e-3 if kv != "float16" else 2e-2
    torch.testing.assert_close(*logits, rtol=bound, atol=bound)


def test_rope_keys_keep_eight_bits_beside_latents_of_fewer() -> None:
    model = family("deepseek_v3")
    enable(model, "int4")
    cache = generated(model).past_key_values
    latents, rope = cache.layers[0].pages.storage.specs
    assert (latents.quant.bits, latents.quant.rotated, rope.quant.bits, rope.quant.rotated) == (
        4,
        True,
        8,
        False,
    )


@pytest.mark.parametrize("change", ["adapter", "hook", "forward", "bias", "meta"])
def test_what_is_no_plain_product_is_expanded(change: str, absorbed: list[int]) -> None:
    model = family("deepseek_v3")
    KVCache.for_model(model)  # which finds that the class expands as it should
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        if change == "adapter":
            layer.self_attn.kv_b_proj = nn.Sequential(projection, nn.Identity())
        elif change == "hook":
            projection.register_forward_hook(lambda module, args, out: 2 * out)
        elif change == "forward":
            projection.forward = lambda x, own=projection: 2 * nn.functional.linear(x, own.weight)
        elif change == "bias":
            projection.bias = nn.Parameter(torch.ones(projection.out_features))
        else:
            layer.self_attn.kv_b_proj = copy.deepcopy(projection).to("meta")
    if change == "meta":
        assert KVCache.for_model(model).num_rows == 0
        return
    stock = generated(model)
    enable(model)
    ours = generated(model)
    assert not absorbed
    assert torch.equal(ours.sequences, stock.sequences)


def test_a_weight_that_changes_in_place_is_seen(absorbed: list[int]) -> None:
    model = family("deepseek_v3")
    enable(model)
    generated(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(1.5)
    ours = generated(model)
    disable(model)
    assert torch.equal(ours.sequences, generated(model).sequences)
    assert absorbed


def test_a_module_that_expands_otherwise_is_not_absorbed(
    monkeypatch: pytest.MonkeyPatch, absorbed: list[int]
) -> None:
    model = family("deepseek_v3")
    kind = type(model.model.layers[0].self_attn)

    class Doubled(kind):  # type: ignore[misc, valid-type]
        def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            key, value = kind.expand_kv(self, kv_nope, k_rot)
            return key, 2 * value

    for layer in model.model.layers:
        layer.self_attn.__class__ = Doubled
    stock = generated(model)
    enable(model)
    assert torch.equal(generated(model).sequences, stock.sequences)
    assert not absorbed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_batch_invariance_a_token_has_the_same_bits_in_any_forward(dtype: torch.dtype) -> None:
    model = family("deepseek_v3").to(dtype)
    enable(model, batch_invariant=True)
    ids = torch.randint(3, 99, (3, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(ids, use_cache=True).logits
        for cuts in ([30], [1] * 30, [7, 20, 3]):
            cache = KVCache.for_model(model)
            rows = [model(x, past_key_values=cache).logits for x in ids[1:2].split(cuts, 1)]
            assert torch.equal(torch.cat(rows, 1), whole[1:2])
    disable(model)


@pytest.mark.parametrize("kv", ["auto", "int8", "int4"])
def test_a_pool_finds_what_it_kept(kv: str, absorbed: list[int]) -> None:
    model = family("deepseek_v3")
    model.set_attn_implementation("kvloom")
    pool = KVPool.for_model(model, kv, max_tokens=512, page_size=8)
    ids = torch.randint(3, 99, (1, 40), generator=torch.Generator().manual_seed(1))
    logits = []
    for _ in range(2):
        cache = pool.begin(ids)
        with torch.no_grad():
            logits.append(model(ids[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -1])
        pool.commit(cache, ids)
    assert pool.report()["tokens_found"] == 32
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert absorbed


@pytest.mark.parametrize("attention", ["kvloom", "sdpa"])
def test_a_static_cache_gives_the_stock_tokens(attention: str, absorbed: list[int]) -> None:
    model = family("deepseek_v3")
    stock = generated(model)
    model.set_attn_implementation(attention)
    ours = generated(model, past_key_values=KVCache.for_model(model, static=True, max_tokens=40))
    assert torch.equal(ours.sequences, stock.sequences)
    assert bool(absorbed) == (attention == "kvloom")


def test_why_a_layer_is_expanded_is_said() -> None:
    model = family("deepseek_v3")
    layer = model.model.layers[0].self_attn
    assert why_expanded(layer) is None
    layer.kv_b_proj = nn.Identity()
    assert why_expanded(layer) == "kv_b_proj is a Identity"


def test_other_models_have_no_latents() -> None:
    assert has_latents(family("deepseek_v3").config)
    assert not has_latents(transformers.LlamaConfig())


def test_a_class_that_is_tried_under_autocast_first_is_known_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = family(FAMILIES[0])
    KVCache.for_model(model)
    (owner, *_) = {type(x) for x in model.modules() if latent_attention.why_not_absorbed(x) is None}
    monkeypatch.delattr(owner, latent_attention._IS_LINEAR)
    with torch.autocast("cpu", torch.bfloat16):
        KVCache.for_model(model)
    assert getattr(owner, latent_attention._IS_LINEAR)
