"""Where a step would wait for a GPU, and what it launches there: told without one.

On the device ``meta`` the way of a device is taken, and reading a tensor raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.pool.test_pool import make_pool, text
from integrations.smoothing.test_doors import biased
from oracles.batching import session
from oracles.language_models import make_model
from oracles.waiting import Operators, Waits
from transformers import MistralConfig, MistralForCausalLM

import kvloom.ops.expect
from kvloom import KVCache, continuous_batching
from kvloom.core.views import KVView
from kvloom.integrations.transformers.versions import IS_4
from kvloom.ops.gathered import attention as gathered

pytestmark = pytest.mark.skipif(IS_4, reason="transformers 4 keeps positions on the device, and reads them")
PLAIN = ["store", "attend"]
LAYERS = {
    "auto": PLAIN,
    "int8,smooth=none": PLAIN,
    "int4,smooth=none,recent=0": ["store.transformed", "rotate", "attend"],
    "int4,smooth=none,recent=8": ["store.transformed", "store", "attend_part", "rotate", "attend_part"],
}
"""Operators of a layer in a step of decoding."""


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without memory all have one address: what compares addresses must not."""
    monkeypatch.setattr(kvloom.ops.expect, "expect_disjoint", lambda *_: None)
    monkeypatch.setattr(kvloom.ops.expect, "shares_memory", lambda *_: False)
    monkeypatch.setattr(KVView, "lies_apart_from", lambda *_: True)
    yield


def steps(model: Any, cache: Any, counts: list[int], device: str = "meta") -> list[list[str]]:
    """Operators of kvloom in forwards of so many tokens of two rows."""
    found = []
    for count in counts:
        with Operators() as seen, torch.no_grad():
            model(torch.full((2, count), 3, device=device), past_key_values=cache, use_cache=True)
        found.append(seen.names)
    return found


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize("kv", LAYERS)
@pytest.mark.parametrize("gathers", [False, True])
def test_prompts_chunks_and_steps_read_nothing(
    kv: str, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gathers:
        monkeypatch.setattr(gathered, "DEVICES", ["meta"])
        monkeypatch.setattr(gathered, "LEAST_ROWS", 1)
    model = make_model("kvloom").to("meta")
    cache = KVCache.for_model(model, kv=kv)
    prompt, *decoded, chunk, last = steps(model, cache, [40, 1, 1, 1, 20, 1])
    for names in (*decoded, last):
        assert names == LAYERS[kv] * 3
    assert ("load" in prompt, "load" in chunk) == (gathers, gathers)


@pytest.mark.usefixtures("without_memory")
def test_windows_forks_and_crops_read_nothing() -> None:
    config = MistralConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16, attn_implementation="kvloom",
    )  # fmt: skip
    model = MistralForCausalLM(config).to("meta").eval()
    cache = KVCache.for_model(model, page_size=4)
    steps(model, cache, [40, 1, 1, 9])
    fork = cache.fork()
    steps(model, fork, [1, 5])
    cache.reorder_cache(torch.tensor([1, 0]))
    steps(model, cache, [1] * 5)
    assert fork.get_seq_length() == 57
    assert cache.get_seq_length() == 56


def test_smoothed_keys_take_one_operator_more() -> None:
    model = biased(eos_token_id=None)
    cache = KVCache.for_model(model, kv="int8")
    found = steps(model, cache, [20, 1, 1], "cpu")
    assert found[1] == found[2] == ["store.transformed", "smooth_query", "attend.biased"] * 2


@pytest.mark.parametrize("kv", ["auto", "int4"])
def test_a_mask_is_read_once_in_a_forward(kv: str) -> None:
    """As by transformers' own masks. In a pool it is also told what the mask hides."""
    model, tokens = make_model("kvloom"), text(40)
    for cache, most in ((KVCache.for_model(model, kv=kv), 1), (make_pool(model, kv).begin(tokens), 2)):
        for count in (20, 1, 1, 1):
            mask = torch.ones(1, cache.get_seq_length() + count, dtype=torch.int64)
            with Waits() as waits, torch.no_grad():
                model(tokens[:, :count], attention_mask=mask, past_key_values=cache, use_cache=True)
            assert len(waits.reads) <= most, waits.reads
        assert not waits.copies, "page tables follow on the device"


def test_a_step_of_a_session_reads_the_tokens_it_chose_and_no_more() -> None:
    model = make_model()
    continuous_batching(model)
    with session(model, {"max_new_tokens": 8}) as running:
        for i in range(4):
            running.manager.add_request(text(20 + i)[0].tolist())
        for _ in range(6):
            with Waits() as waits:
                running.step()
            assert len(waits.reads) == 1, waits.reads
    own = Counter(x for x in waits.copies if "drafted" not in x)  # others are of transformers
    assert sum(own.values()) == 1, own
