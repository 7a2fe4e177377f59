"""Models of which a part attends by code of its own: its masks are the stock ones, and it is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.models.test_families import MODES, continued
from transformers import DynamicCache, GitConfig, GitForCausalLM

from kvloom.integrations.transformers import enable
from kvloom.integrations.transformers.invariance import report_layers
from kvloom.integrations.transformers.versions import IS_4


def git() -> Any:
    """GIT adds its mask to scores, and calls the interface of transformers for pictures alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "initializer_range": 0.3}
    picture = sizes | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    config = GitConfig(vision_config=picture, **sizes, vocab_size=99, num_hidden_layers=2, pad_token_id=0)
    return GitForCausalLM(config).eval()


# GIT of transformers 4 adds the embedding of every position to those of its last piece.
@pytest.mark.parametrize("mode", [x for x in MODES if not IS_4 or x != "chunked prefill"])
@pytest.mark.parametrize("kv", ["auto", "float32"])
def test_an_enabled_model_gives_the_stock_tokens(mode: str, kv: str) -> None:
    model = git()
    stock = continued(model, DynamicCache(config=model.config), **MODES[mode])
    enable(model, kv, page_size=4)
    ours = continued(model, None, **MODES[mode])
    assert torch.equal(ours.sequences, stock.sequences)
    for expected, actual in zip(stock.logits, ours.logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


def test_a_text_alone_is_read_causally() -> None:
    model = git()
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        enable(model)
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        torch.testing.assert_close(model(ids).logits, expected)


def test_it_is_no_more_batch_invariant_than_its_attention() -> None:
    model = git()
    enable(model, batch_invariant=True)
    reasons = report_layers(model).not_invariant
    assert reasons == {
        "attention is not called through transformers' interface": [
            f"git.encoder.layer.{i}.attention.self" for i in range(2)
        ]
    }
