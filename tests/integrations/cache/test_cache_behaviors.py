"""A KVCache does what transformers' own DynamicCache of the same release does, call by call and in a model.

What ``crop`` and ``get_mask_sizes`` take changed between releases; each test asks the installed one.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from oracles.language_models import FakeQuantCache, generate, make_model, make_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache

from kvloom.errors import StateError
from kvloom.integrations.transformers import KVCache

CROP_KEEPS = "tokens_to_remove" not in inspect.signature(Cache.crop).parameters
MASK_TAKES_POSITIONS = "cache_position" in inspect.signature(Cache.get_mask_sizes).parameters
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,  # so that greedy tokens do not repeat
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 4
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("LlamaConfig", {}),
    "sliding": ("Gemma2Config", {"sliding_window": WINDOW}),
    "chunked": (
        "Llama4TextConfig",
        {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48,
         "num_hidden_layers": 4},
    ),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", list(MODELS))
EXACT: dict[str, Any] = {"float32": DynamicCache, "int8:g16": FakeQuantCache}


def small_model(config: str, **differs: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL | differs)).eval()


def pair(name: str = "full", page_size: int = 4) -> tuple[DynamicCache, KVCache]:
    """An empty stock cache and an empty one of ours for the same model."""
    config, differs = MODELS[name]
    model = small_model(config, **differs)
    return DynamicCache(config=model.config), KVCache.for_model(model, page_size=page_size)


def tokens(count: int, seed: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    key, value = torch.randn(2, batch, 2, count, 8, generator=torch.Generator().manual_seed(seed))
    return key, value


def put(cache: Any, count: int, seed: int = 0, batch: int = 2) -> list[Tensor]:
    """Update every layer with tokens of its own; returns all that attention reads."""
    read: list[Tensor] = []
    for layer_idx in range(len(cache)):
        start = cache.get_seq_length(layer_idx)
        kwargs = {"cache_position": torch.arange(start, start + count)}
        key, value = tokens(count, 1000 * seed + layer_idx, batch)
        read += cache.update(key, value, layer_idx, cache_kwargs=kwargs)
    return read


def same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def mask_sizes(cache: Any, count: int, layer_idx: int) -> tuple[int, int]:
    start = cache.get_seq_length(layer_idx)
    asked = torch.arange(start, start + count) if MASK_TAKES_POSITIONS else count
    return tuple(cache.get_mask_sizes(asked, layer_idx))


# --- call by call -------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize(
    "counts",
    [(2, 1), (WINDOW, 1, 1), (WINDOW - 1, 1, 1), (9, 1, 1), (3, 3, 1), (9, 2, 5, 1), (1,) * 7],
    ids=["below the window", "at it", "one below it", "long prompt", "across it", "several", "one by one"],
)
def test_update_returns_what_the_stock_cache_does(name: str, counts: tuple[int, ...]) -> None:
    stock, ours = pair(name)
    assert any(stock.is_sliding) == (name != "full")
    for seed, count in enumerate(counts):
        for layer_idx in range(len(stock)):
            assert mask_sizes(ours, count, layer_idx) == mask_sizes(stock, count, layer_idx)
        expected = [mask_sizes(ours, count, i)[0] for i in range(len(ours))]
        read = put(ours, count, seed)
        same(read, put(stock, count, seed))
        assert [x.shape[2] for x in read[::2]] == expected
        for layer_idx in range(len(stock)):
            assert ours.get_seq_length(layer_idx) == stock.get_seq_length(layer_idx)


@every_model
def test_an_empty_cache_says_so(name: str) -> None:
    stock, ours = pair(name)
    assert len(ours) == len(stock)
    for _ in range(2):
        assert [ours.get_seq_length(i) for i in range(len(ours) + 1)] == [0] * (len(ours) + 1)
        assert (ours.is_initialized, ours.is_compileable) == (False, False)
        assert ours.is_sliding == stock.is_sliding
        put(ours, 3)
        assert ours.is_initialized
        assert ours.get_seq_length() == 3
        ours.reset()


def test_an_early_initialized_cache_is_still_empty() -> None:
    stock, ours = pair()
    for cache in (stock, ours):
        cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
        assert cache.is_initialized
        assert cache.get_seq_length() == 0
    same(put(ours, 3), put(stock, 3))


def test_reset_then_update_returns_the_new_tokens_only() -> None:
    used, fresh = pair()[1], pair()[1]
    put(used, 6, seed=1)
    used.reset()
    for seed in (2, 3):
        same(put(used, 2, seed), put(fresh, 2, seed))


@pytest.mark.parametrize("argument", [-1, -3, -7, -20, 0])
@every_model
def test_crop_removes_what_the_stock_cache_does(name: str, argument: int) -> None:
    stock, ours = pair(name)
    for cache in (stock, ours):
        put(cache, 7 if name == "full" else WINDOW - 1)  # the stock cache refuses to crop a full window
        cache.crop(argument)
    for layer_idx in range(len(stock)):
        assert ours.get_seq_length(layer_idx) == stock.get_seq_length(layer_idx)
    same(put(ours, 2, seed=1), put(stock, 2, seed=1))


def test_a_crop_frees_pages_and_a_reset_their_memory() -> None:
    ours = pair()[1]
    put(ours, 400)
    held, nbytes = ours.num_pages_held, ours.nbytes
    ours.crop(-390)
    assert (held, ours.num_pages_held, ours.nbytes) == (2 * 100, 2 * 3, nbytes)
    put(ours, 390)
    assert ours.nbytes == nbytes
    ours.crop(-390)
    loaded = pickle.loads(pickle.dumps(ours))  # noqa: S301
    assert loaded.nbytes == ours.num_pages_held * 4 * ours.nbytes_per_token
    ours.reset()
    assert (ours.num_pages_held, ours.nbytes) == (0, 0)


@pytest.mark.skipif(not hasattr(Cache, "activate_past_recording"), reason="this release records no past")
@every_model
def test_drafts_are_taken_back_from_full_windows(name: str) -> None:
    both = pair(name, page_size=1)  # a larger page would hold on to what the window has evicted
    for cache in both:
        cache.activate_past_recording()
    for counts, accepted in [((9,), 9), ((3,), 1), ((2, 3, 2), 0), ((5,), 5), ((70, 90), 3), ((1,), 1)]:
        for seed, count in enumerate(counts):
            told = [mask_sizes(both[1], count, i)[0] for i in range(len(both[1]))]
            theirs, mine = (put(cache, count, seed) for cache in both)
            assert [x.shape[2] for x in mine[::2]] == told
            # Some releases return more than they told when nothing is cropped in between.
            same(mine, [x[:, :, -y.shape[2] :] for x, y in zip(theirs, mine, strict=True)])
        for cache in both:
            cache.crop(accepted - sum(counts))
        assert both[1].get_seq_length() == both[0].get_seq_length()


@pytest.mark.parametrize("argument", [3, 7, 30])
def test_crop_to_a_length_is_for_releases_that_have_it(argument: int) -> None:
    stock, ours = pair()
    put(stock, 7), put(ours, 7)
    if CROP_KEEPS:
        stock.crop(argument), ours.crop(argument)
        assert ours.get_seq_length() == min(argument, 7)
    else:
        with pytest.raises(ValueError, match="tokens_to_remove must be at most 0"):
            ours.crop(argument)
    same(put(ours, 2, seed=1), put(stock, 2, seed=1))


@every_model
def test_rows_keep_their_past_when_reordered_between_updates(name: str) -> None:
    stock, ours = pair(name)
    for seed, rows in enumerate([[1, 0, 2], [2, 2, 0], [0, 0, 0], [1, 2, 1]]):
        same(put(ours, 5 - seed, seed, batch=3), put(stock, 5 - seed, seed, batch=3))
        for cache in (stock, ours):
            cache.reorder_cache(torch.tensor(rows))
    same(put(ours, 1, 9, batch=3), put(stock, 1, 9, batch=3))


@every_model
def test_a_prompt_can_be_repeated_grown_and_selected(name: str) -> None:
    stock, ours = pair(name)
    for cache in (stock, ours):
        put(cache, 6)
        cache.batch_repeat_interleave(3)
        put(cache, 3, seed=1, batch=6)
        cache.batch_select_indices(torch.tensor([5, 1]))
    same(put(ours, 1, seed=2), put(stock, 1, seed=2))


CHANGES: dict[str, Callable[[KVCache], object]] = {
    "update": lambda cache: put(cache, 2, seed=5),
    "crop, then update": lambda cache: (cache.crop(-2), put(cache, 2, seed=5)),
    "reset, then update": lambda cache: (cache.reset(), put(cache, 2, seed=5)),
    "reorder, then update": lambda cache: (cache.reorder_cache(torch.tensor([1, 1])), put(cache, 2, seed=5)),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("changed", [0, 1], ids=["original", "copy"])
@every_model
def test_copies_do_not_see_each_other(name: str, change: Callable[[KVCache], object], changed: int) -> None:
    stock, ours = pair(name)
    put(stock, 3), put(ours, 3)
    both = ours, copy.deepcopy(ours)
    change(both[changed])
    same(put(both[1 - changed], 1, seed=1), put(stock, 1, seed=1))


def test_a_frozen_prefix_and_its_copy_are_told_apart() -> None:
    _, ours = pair()
    put(ours, 6)
    other = copy.deepcopy(ours.freeze())
    with pytest.raises(StateError, match="frozen"):
        ours.batch_select_indices(torch.tensor([0]))
    put(other, 1)
    assert (ours.get_seq_length(), other.get_seq_length()) == (6, 7)


# --- in a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [8, 2, 1], ids=["MHA", "GQA", "MQA"])
def test_any_number_of_key_heads_gives_the_stock_logits(kv_heads: int) -> None:
    model = small_model("LlamaConfig", num_attention_heads=8, num_key_value_heads=kv_heads)
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(4))
    inputs, cache = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, KVCache.for_model(model)
    stock, ours = generate(model, inputs, DynamicCache(config=model.config)), generate(model, inputs, cache)
    assert torch.equal(ours.sequences, stock.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), rtol=1e-4, atol=1e-4)
    assert cache.layers[0].keys.shape[1] == kv_heads


def test_gptj_in_bfloat16_gives_the_stock_tokens() -> None:
    names = {"num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers", "num_attention_heads"}
    config = {name: value for name, value in SMALL.items() if name not in names}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        transformers.GPTJConfig(**config, n_embd=32, n_layer=3, n_head=4, rotary_dim=4, n_positions=64)
    )
    model = model.to(torch.bfloat16).eval()
    ids = torch.randint(3, 99, (1, 7), generator=torch.Generator().manual_seed(4))
    results = [
        generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache).sequences
        for cache in (DynamicCache(config=model.config), KVCache.for_model(model, page_size=4))
    ]
    assert torch.equal(results[0], results[1])
    assert len(set(results[0][0].tolist())) > 10


def test_a_batch_continues_as_each_of_its_rows() -> None:
    model, lengths = make_model(), [6, 15, 2]
    inputs = make_prompts(lengths)
    batch = generate(model, inputs, KVCache.for_model(model, page_size=4))
    for row, length in enumerate(lengths):
        own = {name: x[row : row + 1, -length:] for name, x in inputs.items()}
        alone = generate(model, own, KVCache.for_model(model, page_size=4))
        assert torch.equal(batch.sequences[row, 15:], alone.sequences[0, length:])
        for together, single in zip(batch.logits, alone.logits, strict=True):
            torch.testing.assert_close(together[row], single[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("kv", "tolerance"), [("float32", 1e-5), ("int8:g16", 1e-2)])
def test_extra_left_padding_changes_no_logits(attention: str, kv: str, tolerance: float) -> None:
    model, inputs = make_model(attention), make_prompts([9, 4])
    wider = {name: torch.cat([torch.zeros_like(x), x], dim=1) for name, x in inputs.items()}
    results = [
        generate(model, given, KVCache.for_model(model, kv=kv, page_size=4)) for given in (inputs, wider)
    ]
    assert torch.equal(results[0].sequences[:, 9:], results[1].sequences[:, 18:])
    narrow, wide = (torch.stack(result.logits) for result in results)
    assert (wide - narrow).norm() / narrow.norm() < tolerance


def test_beam_search_moves_beams_and_scores_as_the_stock_cache() -> None:
    model, inputs = make_model(), make_prompts([8, 5])
    stock, ours = (
        model.generate(
            **inputs, past_key_values=cache, do_sample=False, num_beams=4, num_return_sequences=2,
            max_new_tokens=12, return_dict_in_generate=True, output_scores=True,
        )
        for cache in (DynamicCache(config=model.config), KVCache.for_model(model, page_size=4))
    )  # fmt: skip
    assert any(len(set(beams) - {-1}) > 1 for beams in stock.beam_indices.tolist())
    assert torch.equal(ours.sequences, stock.sequences)
    assert torch.equal(ours.beam_indices, stock.beam_indices)
    torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv", list(EXACT))
def test_a_copied_prompt_serves_several_questions(kv: str) -> None:
    model, prompt = make_model(), make_prompts([10])
    cache = KVCache.for_model(model, kv=kv, page_size=4)
    with torch.no_grad():
        model(**prompt, past_key_values=cache, use_cache=True)
    for seed in (1, 2):
        question = make_prompts([5], seed=seed)
        inputs = {name: torch.cat([prompt[name], question[name]], dim=1) for name in prompt}
        expected = generate(model, inputs, EXACT[kv](config=model.config)).sequences
        assert torch.equal(generate(model, inputs, copy.deepcopy(cache)).sequences, expected)
    assert cache.get_seq_length() == 10


def test_generation_keeps_codes_that_are_as_near_as_they_can_be() -> None:
    model, inputs = make_model(), make_prompts([12])
    cache = KVCache.for_model(model, kv="int8:g16")
    out = generate(model, inputs, cache)
    assert out.past_key_values is cache
    with torch.no_grad():
        exact = model(out.sequences[:, :-1], use_cache=True).past_key_values.layers[0].keys
    error = (cache.layers[0].keys - exact).abs()
    step = exact.abs().amax(dim=-1, keepdim=True) / 127
    assert error.any()
    # Beside half a step: the scale, and its product with a code of up to 127, are rounded to float16.
    assert (error <= (0.5 + 2 * 127 / 2**11) * step + 1e-6).all()
