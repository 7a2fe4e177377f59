"""Names, order and defaults of the arguments are those of the documents."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from kvloom.dialects import pmx

REQUIRED = inspect.Parameter.empty

STATIC = {
    "current_key": REQUIRED,
    "current_value": REQUIRED,
    "start_pos": REQUIRED,
    "cache": REQUIRED,
    "scale": None,
    "num_layer": 1,
    "layer_idx": 0,
    "quant_bit": 0,
    "quant_group": 8,
    "num_repeat": 1,
    "cache_layout": 0,
}
DYNAMIC = {
    "current_key": REQUIRED,
    "current_value": REQUIRED,
    "seqstarts": REQUIRED,
    "kvstarts": REQUIRED,
    "cachestarts": REQUIRED,
    "start_pos": REQUIRED,
    "max_seqlen": REQUIRED,
    "max_kvlen": REQUIRED,
    "cache": REQUIRED,
    "scale": None,
    "num_layer": 1,
    "layer_idx": 0,
    "quant_bit": 0,
    "quant_group": 8,
    "num_repeat": 1,
    "cache_mode": 0,
    "cache_layout": 0,
    "page_size": 128,
}
FUSED = {
    "query": REQUIRED,
    "current_key": REQUIRED,
    "current_value": REQUIRED,
    "seqstarts": REQUIRED,
    "kvstarts": REQUIRED,
    "cachestarts": REQUIRED,
    "start_pos": REQUIRED,
    "decoding_batches": REQUIRED,
    "max_seqlen": REQUIRED,
    "max_kvlen": REQUIRED,
    "cache": REQUIRED,
    "scale": None,
    "attn_mask": None,
}
FUSED_KEYWORDS = {
    "num_heads": REQUIRED,
    "head_dim": REQUIRED,
    "is_causal": REQUIRED,
    "num_kv_heads": 0,
    "num_layer": 1,
    "layer_idx": 0,
    "quant_bit": 0,
    "quant_group": 8,
    "cache_mode": 0,
    "cache_layout": 0,
    "page_size": 128,
    "is_alibi": False,
    "spec": "pmx",
}
UNFUSED = {
    "query": REQUIRED,
    "key": REQUIRED,
    "value": REQUIRED,
    "seqstarts": REQUIRED,
    "kvstarts": REQUIRED,
    "decoding_batches": REQUIRED,
    "max_seqlen": REQUIRED,
    "max_kvlen": REQUIRED,
    "attn_mask": None,
}
UNFUSED_KEYWORDS = {
    "num_heads": REQUIRED,
    "head_dim": REQUIRED,
    "is_causal": REQUIRED,
    "is_alibi": False,
    "num_kv_heads": 0,
}


@pytest.mark.parametrize(
    ("operator", "positional", "keyword_only"),
    [
        (pmx.key_value_cache, STATIC, {}),
        (pmx.dynamic_batching.key_value_cache, DYNAMIC, {}),
        (pmx.dynamic_batching.multi_head_cache_attention, FUSED, FUSED_KEYWORDS),
        (pmx.dynamic_batching.multi_head_attention, UNFUSED, UNFUSED_KEYWORDS),
    ],
    ids=["key_value_cache", "dynamic key_value_cache", "multi_head_cache_attention", "multi_head_attention"],
)
def test_arguments_follow_the_document(
    operator: Callable[..., object], positional: dict[str, object], keyword_only: dict[str, object]
) -> None:
    parameters = inspect.signature(operator).parameters.values()
    by_position = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    by_name = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert list(by_position.items()) == list(positional.items())
    assert by_name == keyword_only
