"""A step that fills a page costs the same behind any number of tokens."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from oracles.interrupts import interrupted
from transformers import LlamaConfig

from kvloom.caches import CacheFormat
from kvloom.core.entries import Entry, SideFormat
from kvloom.core.text import Text
from kvloom.integrations.transformers.models.layer_specs import LayerSpec
from kvloom.integrations.transformers.session.cache import BatchCache
from kvloom.integrations.transformers.session.requests.groups import Limits
from kvloom.integrations.transformers.session.requests.prompt import Prompt

PAGE = 16


def test_a_step_that_fills_a_page_costs_the_same_behind_any_number_of_tokens() -> None:
    lines = []
    for num_pages in (20, 40, 80):
        cache = cache_of(200)
        state = SimpleNamespace(
            request_id="a", initial_tokens=[*range(PAGE * num_pages)], generated_tokens=[1] * 2 * PAGE,
            num_children=0, logit_processor_kwargs={}, length=0, _true_initial_tokens=0,
        )  # fmt: skip
        state.current_len = partial(getattr, state, "length")
        state.remaining_prefill_tokens = state.initial_tokens
        for num_new in (PAGE * num_pages, PAGE):
            step(cache, state, num_new)
        lines.append(interrupted(0, partial(step, cache, state, PAGE)))
        cache.requests.check()
        tokens = state.initial_tokens + state.generated_tokens
        assert cache.requests.num_known(Prompt("b", Text(tokens), "", None, len(tokens))) == len(tokens)
    assert max(lines) <= 1.05 * min(lines)  # a look-up by hash passes others of the same place


def cache_of(num_pages: int) -> BatchCache:
    config = LlamaConfig(hidden_size=16, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    form, device, side = CacheFormat(page_size=PAGE), torch.device("cpu"), SideFormat(16, "float32")
    layers = {0: LayerSpec(0, "full_attention", None, entry=Entry(1, side, side))}
    cache = BatchCache(config, Limits(layers, form, 1024, PAGE), device, max_pages=num_pages, share=True)
    cache.requests.pages.make_room(num_pages)
    return cache


def step(cache: BatchCache, state: Any, num_new: int) -> None:
    """Room for new tokens, what attention needs to know of them, and full pages for others to find."""
    assert cache.can_store_request_tokens(state, num_new)
    cache.extend_read_and_write_indices(state.request_id, state.length, num_new, None, None)
    cache.steps.begin()
    complete = cache.count_new_complete_blocks(state, num_new)
    state.length += num_new
    cache.mark_complete_blocks(state, complete)
