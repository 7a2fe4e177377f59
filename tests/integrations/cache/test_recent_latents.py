"""Residual windows of latents: expanded or absorbed, each query reads its own newest tokens unquantized."""

from __future__ import annotations

import pytest
import torch
from integrations.attention.test_indexed import MANY, continued, text
from integrations.attention.test_latents import FAMILIES, family

from kvloom.integrations.transformers import KVCache

NAMES = [x for x in ("deepseek_v3", "deepseek_v32") if x in FAMILIES]
pytestmark = pytest.mark.skipif(not NAMES, reason="this version of transformers caches no latents")


@torch.no_grad()
@pytest.mark.parametrize("topk", [6, 64, 200])
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_residual_window_of_latents_does_not_depend_on_cuts(name: str, is_static: bool, topk: int) -> None:
    """Within rounding, of one layer, after which a rounding may move a number to another code."""
    model = family(name, kv_lora_rank=32, num_hidden_layers=1, index_topk=topk, index_n_heads=MANY)
    model.set_attn_implementation("kvloom")
    sizes, logits = {"max_tokens": 128, "static": True} if is_static else {}, []
    for pieces in ([90], [30, 60], [89, 1], [40, *[1] * 10, 40]):
        cache = KVCache.for_model(model, "int4,recent=24", **sizes)
        continued(model, cache, text(100, 2))
        cache.crop(-70)  # what is read as codes after it follows from the 100 tokens
        cut = [continued(model, cache, x) for x in text(120, 2)[:, 30:].split(pieces, 1)]
        logits.append(torch.cat(cut, 1))
    for found in logits[1:]:
        torch.testing.assert_close(found, logits[0], rtol=1e-4, atol=1e-4)
