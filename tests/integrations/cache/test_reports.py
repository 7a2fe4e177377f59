"""What a cache says of itself: `report()`, its table and `repr`."""

from __future__ import annotations

import pytest
import torch
from oracles.language_models import make_model

from kvloom.integrations.transformers import KVCache


def text(rows: int, length: int) -> torch.Tensor:
    return torch.arange(3, 3 + rows * length).view(rows, length) % 90


@pytest.mark.parametrize("kv", ["auto", "int8,smooth=none", "int4,recent=16"])
def test_a_report_counts_what_a_dynamic_cache_would_hold(kv: str) -> None:
    from transformers import DynamicCache

    model = make_model()
    cache, stock = KVCache.for_model(model, kv), DynamicCache()
    with torch.no_grad():
        for kept in (cache, stock):
            model(text(2, 40), past_key_values=kept, use_cache=True)
    held = sum(x.nbytes for layer in stock.layers for x in (layer.keys, layer.values))
    found = cache.report()
    assert (found["rows"], found["tokens"], found["nbytes"]) == (2, 40, cache.nbytes)
    assert (found["nbytes_dynamic"], found["nbytes_bfloat16"]) == (held, held // 2)
    assert found["nbytes_per_token"] == cache.nbytes_per_token
    assert str(found).splitlines()[0].split() == ["kind", found["kv"]]
    said = f"KVCache(kv={found['kv']!r}, 2 rows x 40 tokens, {cache.nbytes_per_token:,.0f} bytes a token of "
    assert repr(cache) == f"{said}{held // 80:,})"


def test_an_empty_cache_says_so() -> None:
    cache = KVCache.for_model(make_model())
    assert repr(cache) == "KVCache(empty)" and cache.report()["nbytes_dynamic"] == 0


def test_smoothed_layers_are_named() -> None:
    model = make_model()
    with torch.no_grad():
        model(text(1, 20), past_key_values=(cache := KVCache.for_model(model, "int8")), use_cache=True)
    smoothed = [i for i, x in enumerate(cache.layers) if x.pages.format.smoothing is not None]
    assert cache.report()["smoothed"] == smoothed
