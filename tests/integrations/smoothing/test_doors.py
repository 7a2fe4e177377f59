"""Caches and pools of a model smooth its keys where they are codes, and say what was done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.language_models import make_model, make_prompts
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvloom import KVCache, KVPool
from kvloom.integrations.transformers.models.bit_plan import BitPlan, config_digest
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.smoothing import smoothing_of

TOKENS = torch.randint(3, 199, (2, 90), generator=torch.Generator().manual_seed(5))
BIAS = 60.0


def biased(**options: Any) -> Qwen2ForCausalLM:
    """A Qwen2 whose keys have biases in two pairs of channels, to which queries are small."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=199, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=2048,
        attn_implementation="kvloom", **options,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for pair in (1, 5):
                for channel in (pair, pair + 8):
                    attention.k_proj.bias[channel::16] = BIAS
                    attention.q_proj.weight[channel::16] /= BIAS
                    attention.q_proj.bias[channel::16] = 0
    return model


def logits(model: Any, cache: Any = None) -> Tensor:
    """Of the second half of each row, token by token, behind the first."""
    with torch.no_grad():
        if cache is None:
            return model(TOKENS, use_cache=False).logits[:, 50:].double()
        options = {"use_cache": True, **as_argument(model, cache)}
        model(TOKENS[:, :50], **options)
        steps = [model(TOKENS[:, i : i + 1], **options).logits for i in range(50, TOKENS.shape[1])]
        return torch.cat(steps, 1).double()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("kv", "attention"), [("int8", "kvloom"), ("int8", "sdpa"), ("int4,recent=0", "kvloom")]
)
def test_keys_with_biases_cost_hardly_more_than_others(kv: str, attention: str, static: bool) -> None:
    model = biased()
    model.set_attn_implementation(attention)
    options: dict[str, Any] = {"static": True, "max_tokens": 96} if static else {}
    want = logits(model)
    smoothed, plain = (
        (logits(model, KVCache.for_model(model, name, **options)) - want).norm()
        for name in (kv, f"{kv},smooth=none")
    )
    assert smoothed < 0.25 * plain


def said_of(model: Any) -> dict[str, list[int]]:
    """Numbers of layers by what was done to smooth their keys."""
    said: dict[str, list[int]] = {}
    for i, layer in enumerate(smoothing_of(model)):
        said.setdefault(layer.reason, []).append(i)
    return said


def storages(cache: KVCache) -> list[Any]:
    return [layer.pages.storage for layer in cache.layers]


def test_only_codes_of_keys_are_smoothed_unless_asked_otherwise(tmp_path: Path) -> None:
    model = make_model("kvloom")
    for kv in ("auto", "float16", "int8,smooth=none", "int4:g8,recent=0,smooth=none"):
        cache = KVCache.for_model(model, kv, values="int8")
        logits(model, cache)
        assert all(x.smoothing is None for x in storages(cache))
    plan = tmp_path / "plan.json"
    layers = (("int8", "auto"), ("auto", "int8"), ("int8,smooth=none", "int8"))
    BitPlan(config_digest(model.config), layers, 1, 0).save(plan)
    cache = KVCache.for_model(model, plan)
    logits(model, cache)
    assert [x.smoothing is not None for x in storages(cache)] == [True, False, False]
    assert torch.equal(storages(cache)[0].smoothing.gain, smoothing_of(model)[0].smoothing.gain)


def test_no_model_is_asked_for_what_is_not_wanted() -> None:
    model = make_model("kvloom")
    forwards: list[int] = []
    model.forward = lambda *args, **kwargs: forwards.append(1)
    for kv in ("auto", "bfloat16", "int8,smooth=none"):
        KVCache.for_model(model, kv)
    assert not forwards


def test_pools_say_what_was_done_in_each_layer() -> None:
    model = biased()
    said = said_of(model)
    assert all(reason.startswith("offsets of ") for reason in said)
    with KVPool.for_model(model, "int8", max_tokens=64) as pool:
        assert (pool.report()["kv"], pool.report()["smoothing"]) == ("int8:g16", said)
    with KVPool.for_model(model, "int8,smooth=none", max_tokens=64) as pool:
        assert (pool.report()["kv"], pool.report()["smoothing"]) == ("int8:g16,smooth=none", {})


def test_rows_behind_padding_are_as_exact_as_others() -> None:
    """Their positions are not those of the model, so codes are less good, but nothing is wrong."""
    model = biased()
    inputs = make_prompts([40, 23])
    with torch.no_grad():
        want = model(**inputs, use_cache=False).logits
        cache = KVCache.for_model(model, "int8")
        found = model(**inputs, use_cache=True, **as_argument(model, cache)).logits
    assert (found - want)[inputs["attention_mask"] == 1].norm() < 0.1 * want.norm()
