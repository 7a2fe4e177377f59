"""Speculation by a model that drafts blocks (DFlash), which has a cache of its own beside this library's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from oracles.language_models import make_model

from kvloom.integrations.transformers import KVCache, enable

NEW = 24
BLOCK = 4

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "MuseGlimmerAssistantModel"),
    reason="this version of transformers drafts no blocks",
)


def drafter(model: Any) -> Any:
    """A random model that drafts blocks from what two layers of ``model`` computed."""
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=model.config.hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=256,
        block_size=BLOCK,
        mask_token_id=5,
        target_layer_ids=[0, 2],
    )
    torch.manual_seed(1)
    return transformers.MuseGlimmerAssistantModel(config).eval()


def tokens(model: Any, **options: Any) -> list[int]:
    ids = torch.arange(40)[None] * 7 % 96 + 3
    found: list[int] = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, **options)[
        0
    ].tolist()
    return found


def drafted(model: Any, **options: Any) -> list[int]:
    """Tokens of ``generate`` with a drafter, which has drafted some."""
    assistant, blocks = drafter(model), []
    assistant.register_forward_hook(lambda module, args, output: blocks.append(output))
    found = tokens(model, assistant_model=assistant, speculation_type="dflash", **options)
    assert len(blocks) > 1
    return found


@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
@pytest.mark.parametrize("kv", ["auto", "int8:g16", "int4:g16,recent=16"])
def test_drafted_blocks_give_the_tokens_of_greedy_decoding(attention: str, kv: str) -> None:
    model = make_model(attention)
    expected = tokens(model, past_key_values=KVCache.for_model(model, kv))
    cache = KVCache.for_model(model, kv)
    assert drafted(model, past_key_values=cache) == expected
    assert cache.get_seq_length() == len(expected) - 1
    if kv == "auto":
        assert expected == tokens(make_model())


def test_an_enabled_model_takes_them() -> None:
    model = make_model()
    expected = tokens(model)
    enable(model)
    assert drafted(model) == tokens(model) == expected


def test_an_enabled_drafter_keeps_the_cache_that_it_is_given() -> None:
    model = make_model()
    expected, assistant = tokens(model), drafter(model)
    enable(assistant)
    assert tokens(model, assistant_model=assistant, speculation_type="dflash") == expected
