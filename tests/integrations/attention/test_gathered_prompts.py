"""Prompts by torch over gathered tokens, as on a GPU: caches give what they give in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.models.test_families import FAMILIES, continued, family
from integrations.pool.test_pool import make_pool, text
from integrations.pool.test_pool_rows import forward, padded
from integrations.smoothing.test_doors import biased
from oracles.batching import batched, random_requests
from oracles.gathering import gathering
from oracles.language_models import make_model
from oracles.pairs import pairwise
from torch import Tensor

from kvloom.integrations.transformers import KVCache, KVPool
from kvloom.integrations.transformers.versions import IS_4
from kvloom.ops.gathered import attention as gathered

WITH_SINKS = [x for x in ("gpt-oss",) if x in FAMILIES]
"""With windows in every other layer, too."""
CHUNKS, BEAMS = {"prefill_chunk_size": 5}, {"num_beams": 2}
LATENTS = {"kv_lora_rank": 64}
"""Sizes with which it takes less to expand latents for a prompt."""


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        *pairwise(["Llama", "Mistral", "Gemma3", *WITH_SINKS], [{}, CHUNKS, BEAMS], [{}]),
        ("DeepSeek-V3", {}, LATENTS),
    ],
    ids=str,
)
def test_generate_gives_the_same_with_padded_prompts(
    name: str, mode: dict[str, Any], options: dict[str, Any]
) -> None:
    model = family(name, "kvloom", **options)
    expected = continued(model, KVCache.for_model(model, page_size=4), **mode)
    with gathering(least_rows=6) as calls:
        actual = continued(model, KVCache.for_model(model, page_size=4), **mode)
    assert calls
    assert torch.equal(actual.sequences, expected.sequences)
    for want, got in zip(expected.logits, actual.logits, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def fed(model: Any, tokens: Tensor, cache: Any) -> list[Tensor]:
    """Logits of chunks of 30, 20 and 1 tokens and the rest, the first row behind 7 tokens of padding."""
    chunks = tokens.split([30, 20, 1, tokens.shape[1] - 51], dim=1)
    mask, end, logits = torch.ones_like(tokens), 0, []
    mask[0, :7] = 0
    for chunk in chunks:
        end += chunk.shape[1]
        with torch.no_grad():
            out = model(chunk, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        logits.append(out.logits[:, 7:] if end == 30 else out.logits)
    return logits


@pytest.mark.parametrize(
    "kv",
    ["int8", "int4:g16,rotate=both,recent=0", "int4,recent=0,smooth=none", "int4:g16,rotate=both,recent=16"],
)
def test_codes_are_restored(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of which an offset was subtracted, and rotated keys and values."""
    model = biased(eos_token_id=None)
    model.set_attn_implementation("kvloom")
    tokens, caches = text(70, rows=2), [KVCache.for_model(model, kv=kv, page_size=4) for _ in range(2)]
    expected = fed(model, tokens, caches[0])
    assert all(layer.pages.storage.needs_positions == ("smooth=none" not in kv) for layer in caches[0].layers)
    with gathering() as calls:
        actual = fed(model, tokens, caches[1])
    assert len(calls) == 3 * model.config.num_hidden_layers
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["Gemma3", *WITH_SINKS])
def test_codes_beside_a_residual_window_behind_windows(name: str) -> None:
    """As in place: chunks of rows, one behind padding, and a fork that goes on by itself."""
    model, found = family(name, "kvloom"), []
    tokens = text(70, rows=2) % 99
    for least_rows in (1 << 40, 1):
        cache = KVCache.for_model(model, kv="int4:g8,recent=6", page_size=4)
        with gathering(least_rows) as calls, torch.no_grad():
            logits = fed(model, tokens, cache)
            fork, more = cache.fork(), text(9, 1, rows=2) % 99
            logits += [model(more, past_key_values=x, use_cache=True).logits for x in (cache, fork)]
        found.append(logits)
    assert len(calls) == 5 * model.config.num_hidden_layers
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(IS_4, reason="this transformers has no sessions")
@pytest.mark.parametrize("kv", ["auto", "int8", "int4,recent=8"])
def test_sessions_gather_prompts_and_not_what_is_decoded_beside_them(kv: str) -> None:
    model = biased(eos_token_id=None, pad_token_id=0)
    requests = random_requests(8, seed=3, vocab=199)
    expected = batched(model, requests, 8, kv, max_batch_tokens=64)
    with gathering(least_rows=32) as calls:  # 16 new tokens
        actual = batched(model, requests, 8, kv, max_batch_tokens=64)
    assert calls
    assert actual == expected


@pytest.mark.parametrize("kv", ["auto", "int4,recent=8"])
def test_a_chunk_behind_a_found_prefix_is_gathered(kv: str) -> None:
    model = make_model("kvloom")
    pool, tokens = make_pool(model, kv), text(60)
    with torch.no_grad():
        first = pool.begin(tokens)
        expected = model(tokens, past_key_values=first, use_cache=True).logits
        pool.commit(first, tokens)
        behind = pool.begin(tokens)
        found = behind.get_seq_length()
        with gathering() as calls:
            actual = model(tokens[:, found:], past_key_values=behind, use_cache=True).logits
    assert found >= 32
    assert len(calls) == 3
    torch.testing.assert_close(actual, expected[:, found:], rtol=1e-4, atol=1e-4)


def test_restored_keys_know_where_the_text_of_each_row_begins() -> None:
    model = biased(eos_token_id=None)
    ids, mask = padded([text(40), text(23)])
    logits = []
    for least_rows in (1 << 40, 1):
        pool = KVPool.for_model(model, kv="int8", page_size=4, max_tokens=400)
        cache = pool.begin(ids, attention_mask=mask)
        with gathering(least_rows) as calls:
            logits.append(forward(model, cache, ids, mask, cuts=(30,)))
    assert len(calls) == 2 * model.config.num_hidden_layers
    torch.testing.assert_close(logits[1][:, 17:], logits[0][:, 17:], rtol=1e-3, atol=1e-3)


def test_memory_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same forward, repeated, gives what it gives elsewhere."""
    model = make_model("kvloom")
    cache, tokens, call = KVCache.for_model(model, page_size=4), text(40), gathered.call
    expected = model(tokens, use_cache=False).logits

    def refused(*arguments: Any) -> Any:
        monkeypatch.setattr(gathered, "call", call)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(gathered, "call", refused)
    with gathering(), torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError):
            model(tokens, past_key_values=cache, use_cache=True)
        cache.reset()
        actual = model(tokens, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
