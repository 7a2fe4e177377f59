"""Models whose windows bound what a cache keeps after a forward, and not what the tokens of a forward see."""

from __future__ import annotations

import pytest
import torch
import transformers
from integrations.models.test_families import MODES, SMALL, continued
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, enable
from kvloom.integrations.transformers.invariance import report_layers


def moshi() -> PreTrainedModel:
    """One with a window of 8, which the prompts of 14 tokens pass."""
    config = transformers.MoshiConfig(**SMALL, head_dim=8, ffn_dim=48, sliding_window=8)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
def test_tokens_see_all_of_their_forward(attention: str, mode: str) -> None:
    model = moshi()
    stock = continued(model, DynamicCache(config=model.config), **MODES[mode])
    model.set_attn_implementation(attention)
    ours = continued(model, KVCache.for_model(model, page_size=4), **MODES[mode])
    assert torch.equal(ours.sequences, stock.sequences)
    for expected, actual in zip(stock.logits, ours.logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


def test_what_would_cut_a_text_otherwise_is_refused() -> None:
    model = moshi()
    with pytest.raises(UnsupportedError, match="the same keys and values however a text is cut"):
        KVPool.for_model(model, max_tokens=64)
    with pytest.raises(UnsupportedError, match="static must be False for MoshiForCausalLM"):
        KVCache.for_model(model, static=True, max_tokens=64)


def test_batch_invariance_does_not_hold_and_the_report_says_why() -> None:
    model = moshi()
    enable(model, batch_invariant=True)
    assert [x for x in report_layers(model).not_invariant if "all of their own forward" in x]
