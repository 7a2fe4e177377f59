"""A cache stores no gradient: what would need one says so on ``backward``, and everything else goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.language_models import make_model, make_prompts
from torch import Tensor

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import KVCache

ATTENTIONS = pytest.mark.parametrize("attention", ["sdpa", "eager", "kvloom"])
KINDS = pytest.mark.parametrize(
    "options",
    [{}, {"kv": "int8:g16"}, {"max_tokens": 32, "static": True}],
    ids=["pages", "int8", "static"],
)


def loss_of(model: Any, cache: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens, past_key_values=cache, labels=tokens).loss
    return loss


@KINDS
@ATTENTIONS
@pytest.mark.parametrize("trained", ["all", "k_proj", "v_proj"])
def test_backward_through_a_cache_is_refused(trained: str, attention: str, options: dict[str, Any]) -> None:
    """Also where the queries need no gradient, and the head does."""
    model, tokens = make_model(attention), make_prompts([9])["input_ids"]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in (*name.split("."), "all") or name.startswith("lm_head"))
    loss = loss_of(model, KVCache.for_model(model, **options), tokens)
    with pytest.raises(UnsupportedError, match="stores keys and values without their gradient: train with"):
        loss.backward()


@ATTENTIONS
def test_a_forward_with_gradients_enabled_gives_the_same_logits(attention: str) -> None:
    model, tokens = make_model(attention), make_prompts([9])["input_ids"]
    free, bound = KVCache.for_model(model), KVCache.for_model(model)
    for part in tokens.split([5, 3, 1], dim=1):
        with torch.no_grad():
            expected = model(part, past_key_values=free).logits
        assert torch.equal(model(part, past_key_values=bound).logits, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_needs_no_stored_gradient_is_trained(attention: str) -> None:
    """A head behind a frozen model."""
    model, tokens = make_model(attention), make_prompts([9])["input_ids"]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("lm_head"))
    loss_of(model, KVCache.for_model(model), tokens).backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    model(tokens, use_cache=False, labels=tokens).loss.backward()
    torch.testing.assert_close(gradient, model.lm_head.weight.grad, rtol=1e-4, atol=1e-5)


def test_attention_in_place_has_no_gradient_without_a_cache_either() -> None:
    model = make_model("kvloom")
    loss = model(make_prompts([5])["input_ids"], use_cache=False).logits.sum()
    with pytest.raises(UnsupportedError, match="attend has no gradient"):
        loss.backward()
