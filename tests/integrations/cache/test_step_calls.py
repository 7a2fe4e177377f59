"""How many functions of kvloom a decode step calls in each layer: time that no kernel can make up for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from oracles.batching import session
from transformers import LlamaConfig, LlamaForCausalLM

import kvloom
from kvloom.caches import CacheFormat, PrefixCache
from kvloom.core.specs import QuantSpec
from kvloom.integrations.transformers import KVCache, continuous_batching
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.versions import IS_4
from kvloom.ops.impl import cpu

NUM_LAYERS, NUM_TOKENS, ROWS = 12, 70, 4
SOURCES = str(Path(kvloom.__file__).parent)
pytestmark = pytest.mark.skipif(cpu.ISA is None, reason="plain torch computes in more calls than kernels")

Step = Callable[[], object]
OPEN = ExitStack()
"""Sessions that end after the test."""


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=32, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def num_calls(step: Step) -> int:
    """Functions of kvloom that Python enters in a step, after one in which what is made once is made."""
    total = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal total
        total += event == "call" and frame.f_code.co_filename.startswith(SOURCES)

    step()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return total


def in_cache(kv: str, **options: Any) -> Step:
    model = llama()
    model.set_attn_implementation("kvloom")
    cache = as_argument(model, KVCache.for_model(model, kv, **options))
    model(torch.ones(1, NUM_TOKENS, dtype=torch.int64), use_cache=True, **cache)
    return lambda: model(torch.ones(1, 1, dtype=torch.int64), use_cache=True, **cache)


def in_session(kv: str) -> Step:
    """One token of each of some requests."""
    model = llama()
    continuous_batching(model, kv)
    running = OPEN.enter_context(session(model, {"max_new_tokens": 64}))
    running.manager.add_requests([[1] * NUM_TOKENS] * ROWS)
    for _ in range(4):
        running.step()

    def step() -> None:
        assert running.processor.prepare_next_batch()
        running.manager._generation_step()
        running.processor.update_batch()

    return step


def in_prefix_cache(kv: str) -> Step:
    """One token of each of some sequences."""
    form = CacheFormat(quant=None if kv == "auto" else QuantSpec(int(kv[3:]), 32), max_tokens=1024)
    cache = PrefixCache(form, num_layers=NUM_LAYERS, heads=1, head_dim=32, dtype=torch.float32)
    sequences = [cache.begin([row] * NUM_TOKENS) for row in range(ROWS)]

    def step() -> None:
        for layer in range(NUM_LAYERS):
            for sequence in sequences:
                new = torch.ones(len(sequence.tokens) - sequence.stored[layer], 1, 32)
                cache.append(sequence, layer, new, new)
            cache.attend(torch.ones(ROWS, 2, 32), sequences, layer)
        for sequence in sequences:
            cache.commit(sequence)
            cache.extend(sequence, [1])

    step()
    return step


def fixed(kv: str) -> Step:
    return in_cache(kv, static=True, max_tokens=128)


SESSIONS = pytest.mark.skipif(IS_4, reason="this transformers has no sessions")
# Functions a layer: what was counted, and a twentieth. A session and PrefixCache have several rows.
MOST = {
    in_cache: {"auto": 21, "int8": 25, "int4": 38},
    fixed: {"auto": 58, "int8": 62, "int4": 93},
    in_session: {"auto": 142, "int8": 148, "int4": 173},
    in_prefix_cache: {"auto": 178, "int8": 178, "int4": 178},
}


@torch.no_grad()
@pytest.mark.parametrize("kv", ["auto", "int8", "int4"])
@pytest.mark.parametrize(
    "make",
    [in_cache, fixed, pytest.param(in_session, marks=SESSIONS), in_prefix_cache],
    ids=lambda x: x.__name__,
)
def test_a_step_makes_few_calls(make: Callable[[str], Step], kv: str) -> None:
    with OPEN:
        assert NUM_LAYERS < num_calls(make(kv)) <= MOST[make][kv] * NUM_LAYERS
