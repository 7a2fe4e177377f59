"""Models that compute layers several times: keys of each pass are kept, shared and found as any others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import FOUR, MODES, SMALL, WINDOW, continued, padded_prompts
from oracles.language_models import make_model
from oracles.pairs import pairwise
from transformers import AutoModelForCausalLM, DynamicCache

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import KVCache, KVCacheLayer, KVPool, enable
from kvloom.integrations.transformers.invariance import report_layers
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.smoothing import smoothing_of

KINDS = ["sliding_attention", "full_attention"] * 2
# Name: configuration class, what differs from SMALL, and how many layers its cache has.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "Dory": (
        "DoryConfig",
        WINDOW
        | FOUR
        | {"layer_types": KINDS, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3},
        8,
    ),
    "Dory of one pass": (
        "DoryConfig",
        WINDOW
        | FOUR
        | {
            "layer_types": KINDS,
            "n_input_layers": 1,
            "n_output_layers": 1,
            "recurrent_kv_cache_mode": "last_loop",
        },
        4,
    ),
    "HRM": (
        "HrmTextConfig",
        {"num_hidden_layers": 1, "head_dim": 8, "H_cycles": 2, "L_cycles": 2, "L_bp_cycles": [1]},
        6,
    ),
    "Inkling 2 Loop": (
        "Inkling2LoopTextConfig",
        FOUR
        | {
            "head_dim": 8,
            "swa_head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "sliding_window_size": 8,
            "unpadded_vocab_size": 99,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 3,
        },
        8,
    ),
}
NAMES = [name for name, (config, *_) in FAMILIES.items() if hasattr(transformers, config)]
pytestmark = pytest.mark.skipif(not NAMES, reason="this version of transformers has no such model")
PLAIN = [name for name in NAMES if name != "Inkling 2 Loop"]  # without recurrent states


def family(name: str) -> Any:
    config, differs, _ = FAMILIES[name]
    sizes = {key: x for key, x in SMALL.items() if key != "num_key_value_heads" or name != "HRM"}
    if "Inkling" in name:
        del sizes["intermediate_size"]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes | differs)).eval()


@pytest.mark.parametrize(("name", "mode", "attention"), pairwise(NAMES, list(MODES), ["stock", "kvloom"]))
def test_a_looped_model_gives_the_stock_tokens(name: str, mode: str, attention: str) -> None:
    model = family(name)
    stock = continued(model, DynamicCache(config=model.config), **MODES[mode])
    if attention == "kvloom" and name in PLAIN:  # the other has sinks of each query
        model.set_attn_implementation("kvloom")
    ours = continued(model, KVCache.for_model(model, page_size=4), **MODES[mode])
    assert torch.equal(ours.sequences, stock.sequences)
    for expected, actual in zip(stock.logits, ours.logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_of_every_pass_are_kept_in_pages(name: str) -> None:
    model = family(name)
    cache = KVCache.for_model(model)
    assert sum(isinstance(x, KVCacheLayer) for x in cache.layers) == len(cache.layers) == FAMILIES[name][2]
    with torch.no_grad():
        model(padded_prompts()["input_ids"], **{CACHE_ARGUMENT: cache})
    assert len(cache.layers) == FAMILIES[name][2]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_every_pass_is_cropped_forked_and_selected(name: str, kv: str) -> None:
    model, ids = family(name), padded_prompts()["input_ids"]
    enable(model, kv)
    with torch.no_grad():
        cache = KVCache.for_model(model, kv, page_size=4)
        model(ids, **{CACHE_ARGUMENT: cache})
        fork = cache.fork()
        expected = model(ids[1:, :3].repeat(2, 1), **{CACHE_ARGUMENT: reordered(fork)}).logits
        model(ids[:, :5], **{CACHE_ARGUMENT: cache})
        cache.crop(-5)
        actual = model(ids[1:, :3].repeat(2, 1), **{CACHE_ARGUMENT: reordered(cache)}).logits
        alone = KVCache.for_model(model, kv, page_size=4)
        model(ids[1:], **{CACHE_ARGUMENT: alone})
        torch.testing.assert_close(
            actual[:1], model(ids[1:, :3], **{CACHE_ARGUMENT: alone}).logits, rtol=1e-3, atol=1e-3
        )
    assert torch.equal(actual, expected)


def reordered(cache: KVCache) -> KVCache:
    """A cache whose rows are both the second one."""
    cache.reorder_cache(torch.tensor([1, 1]))
    return cache


@pytest.mark.parametrize("name", [x for x in PLAIN if x != "Dory of one pass"])
@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
def test_a_pool_finds_the_keys_of_every_pass(name: str, attention: str) -> None:
    model = family(name)
    model.set_attn_implementation(attention)
    pool = KVPool.for_model(model, page_size=4, max_tokens=200)
    ids = torch.randint(3, 99, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -1]
    for found in (0, 36):
        cache = pool.begin(ids)
        assert cache.get_seq_length() == found
        with torch.no_grad():
            logits = model(ids[:, found:], **{CACHE_ARGUMENT: cache}).logits[:, -1]
        pool.commit(cache, ids)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif("Dory" not in NAMES, reason="this version of transformers has no such model")
def test_a_pool_refuses_passes_that_read_the_last_one() -> None:
    model = family("Dory of one pass")
    with pytest.raises(UnsupportedError, match="the same keys and values however a text is cut"):
        KVPool.for_model(model, max_tokens=64)
    enable(model, batch_invariant=True)
    assert [x for x in report_layers(model).not_invariant if "of earlier forwards" in x]


@pytest.mark.parametrize("name", PLAIN)
def test_the_keys_of_every_pass_are_smoothed_by_their_own_numbers(name: str) -> None:
    model = family(name)
    assert len(smoothing_of(model)) == len(KVCache.for_model(model).layers)
    assert not [x.reason for x in smoothing_of(model) if "failed" in x.reason]


@pytest.mark.skipif("Inkling 2 Loop" not in NAMES, reason="this version has no such model")
@pytest.mark.parametrize("mode", list(MODES))
def test_an_enabled_model_with_sinks_of_each_query_keeps_its_attention(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = family("Inkling 2 Loop")
    stock = continued(model, None, **MODES[mode])
    enable(model, page_size=4)
    assert "attention of Inkling2LoopForCausalLM stays 'eager': it cannot be replaced" in caplog.text
    ours = continued(model, None, **MODES[mode])
    assert isinstance(ours.cache, KVCache) and torch.equal(ours.sequences, stock.sequences)


def test_a_layer_alone_is_not_copied() -> None:
    """As a model would do that appends copies of layers to its cache, and that nobody told us of."""
    cache = KVCache.for_model(make_model())
    with pytest.raises(UnsupportedError, match="shares its rows with the others"):
        copy.deepcopy(cache.layers[1])
