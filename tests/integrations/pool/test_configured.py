"""A pool, and a session, of a model whose configuration is changed while they are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.models.test_families import family
from oracles.batching import session
from torch import Tensor
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

from kvloom.errors import StateError
from kvloom.integrations.transformers import KVPool, continuous_batching
from kvloom.integrations.transformers.versions import IS_4

TEXT = torch.randint(3, 99, (1, 60), generator=torch.Generator().manual_seed(1))


def long_rope(trained: int) -> Phi3ForCausalLM:
    """A model whose frequencies are others beyond so many tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope |= {"original_max_position_embeddings": trained}
    sizes |= {"num_attention_heads": 4, "pad_token_id": 0, "original_max_position_embeddings": trained}
    config = Phi3Config(**sizes, rope_parameters=rope)
    return Phi3ForCausalLM(config).eval()


@torch.no_grad()
def asked(model: Any, pool: KVPool, length: int) -> tuple[int, Tensor]:
    """Tokens that are found, and logits behind them; the text is committed."""
    cache, ids = pool.begin(TEXT[:, :length]), TEXT[:, :length]
    found = int(cache.get_seq_length())
    logits = model(ids[:, found:], past_key_values=cache).logits
    pool.commit(cache, ids)
    return found, logits


@pytest.mark.skipif(IS_4, reason="transformers 4 names frequencies of RoPE otherwise")
def test_texts_share_within_the_frequencies_of_now() -> None:
    model = long_rope(24)
    pool = KVPool.for_model(model, page_size=4, max_tokens=512)
    assert [asked(model, pool, x)[0] for x in (20, 40, 44)] == [0, 0, 40]
    model.config.rope_parameters["original_max_position_embeddings"] = 50
    for length, expected in ((40, 0), (58, 0), (45, 40), (60, 56)):
        found, logits = asked(model, pool, length)
        with torch.no_grad():
            alone = model(TEXT[:, :length], past_key_values=DynamicCache()).logits[:, found:]
        assert found == expected
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


def test_another_window_is_refused_before_anything_is_read() -> None:
    model: Any = family("Mistral")
    pool = KVPool.for_model(model, page_size=4, max_tokens=512)
    asked(model, pool, 40)
    begun, window = pool.begin(TEXT[:, :3]), model.config.sliding_window
    model.config.sliding_window = window + 9
    message = rf"^model must keep what it kept when its pool was made, got window {window + 9} of layer 0, "
    with pytest.raises(StateError, match=message):
        pool.begin(TEXT)
    with torch.no_grad(), pytest.raises(StateError, match=message):
        model(TEXT[:, :3], past_key_values=begun)
    model.config.sliding_window = window
    assert asked(model, pool, 50)[0] == 40


@pytest.mark.skipif(IS_4, reason="transformers 4 has no such sessions")
def test_a_session_that_goes_on_refuses_another_window() -> None:
    model: Any = family("Mistral")
    continuous_batching(model)
    window = model.config.sliding_window
    message = "^model must keep what it kept when its session was made, got window "
    try:
        with session(model, {"max_new_tokens": 2}) as running:
            model.config.sliding_window = window + 9
            with pytest.raises(StateError, match=message):
                running.manager.switch_to_cb_friendly_attn(model)  # as transformers does to go on
    finally:
        model.config.sliding_window = window
        continuous_batching(model, None)
