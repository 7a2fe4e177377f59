"""Models whose layers ask for sizes within a step, when layers before are a step ahead, as Inkling does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import MODES, continued
from transformers import AutoModelForCausalLM, DynamicCache

from kvloom.errors import StateError
from kvloom.integrations.transformers import KVCache, enable
from kvloom.integrations.transformers.invariance import report_layers
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT

pytestmark = pytest.mark.skipif(
    CACHE_ARGUMENT != "cache" or not hasattr(transformers, "InklingTextConfig"),
    reason="this version has no such model with one cache for all",
)


def inkling() -> Any:
    sizes = {
        "vocab_size": 99, "unpadded_vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_head_dim": 8,
        "swa_num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "intermediate_size": 48, "moe_intermediate_size": 16, "dense_intermediate_size": 48,
        "head_dim": 8, "pad_token_id": 0,
        "sliding_window_size": 8, "layer_types": ["hybrid_sliding", "hybrid"] * 2, "initializer_range": 0.3,
    }  # fmt: skip
    fields = transformers.InklingTextConfig.__init__.__annotations__
    torch.manual_seed(0)
    config = transformers.InklingTextConfig(**{key: x for key, x in sizes.items() if key in fields})
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def test_with_batch_invariance_a_cut_leaves_the_bits() -> None:
    """What its convolutions return lies in memory by channels, but for a single token."""
    model, ids = inkling(), torch.randint(3, 99, (1, 24), generator=torch.Generator().manual_seed(1))
    enable(model, batch_invariant=True)
    whole, cache = model(ids).logits, KVCache.for_model(model, page_size=4)
    parts = [model(ids[:, a:b], cache=cache).logits for a, b in ((0, 9), (9, 10), (10, 17), (17, 24))]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert not report_layers(model).not_invariant


@pytest.mark.parametrize("mode", list(MODES))
def test_the_tokens_are_the_stock_ones(mode: str) -> None:
    model = inkling()
    stock = continued(model, DynamicCache(config=model.config), **MODES[mode])
    ours = continued(model, KVCache.for_model(model, page_size=4), **MODES[mode])
    assert torch.equal(ours.sequences, stock.sequences)
    for expected, actual in zip(stock.logits, ours.logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


def test_a_step_that_broke_off_is_noticed() -> None:
    model, ids = inkling(), torch.randint(3, 99, (1, 5))
    cache = KVCache.for_model(model)
    with torch.no_grad():
        model(ids, cache=cache)
        hook = model.get_decoder().layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids, cache=cache)
        hook.remove()
        with pytest.raises(StateError, match="layers must have one length"):
            model(ids, cache=cache)
