"""How many functions of kvloom a decode step calls in each layer: time that no kernel can make up for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvloom
from kvloom.integrations.transformers import KVCache
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.ops.impl import cpu

NUM_LAYERS = 12
SOURCES = str(Path(kvloom.__file__).parent)


@pytest.mark.skipif(cpu.ISA is None, reason="without compiled kernels plain torch computes, in more calls")
@pytest.mark.parametrize(("kv", "most"), [("auto", 23), ("int8", 27), ("int4", 40)])
def test_a_step_makes_few_calls(kv: str, most: int) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=32, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("kvloom")
    cache, num_calls = as_argument(model, KVCache.for_model(model, kv)), 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(SOURCES)

    with torch.no_grad():
        model(torch.ones(1, 70, dtype=torch.int64), use_cache=True, **cache)
        for is_counted in (False, True):
            sys.setprofile(count if is_counted else None)
            try:
                model(torch.ones(1, 1, dtype=torch.int64), use_cache=True, **cache)
            finally:
                sys.setprofile(None)
    assert NUM_LAYERS < num_calls <= most * NUM_LAYERS
