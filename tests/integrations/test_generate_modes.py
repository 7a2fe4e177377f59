"""Every way of generating gives the same tokens as transformers' own cache of the same values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracles.language_models import (
    FakeQuantCache,
    FakeQuantCache2,
    FakeQuantCache4,
    generate,
    make_model,
    make_prompts,
)
from oracles.pairs import in_turn
from torch import Tensor
from transformers import DynamicCache

from kvloom.errors import ArgumentError, OutOfPages, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache

STOCK: dict[str, Any] = {
    "float32": DynamicCache,
    "int8:g16": FakeQuantCache,
    "int4:g16,rotate=none,recent=0": FakeQuantCache4,
    "int2:g16,rotate=none,recent=0": FakeQuantCache2,
}
NAMES = list(STOCK)
KINDS = pytest.mark.parametrize("kv", NAMES)

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_p": 0.95},
    "returned sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "returned beams": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant_model": "small"},
    "chunked prefill": {"prefill_chunk_size": 4},
}
ONE_ROW = ("prompt lookup", "assisted")


def ours(model: Any, kv: str, page_size: int = 4) -> KVCache:
    return KVCache.for_model(model, kv=kv, page_size=page_size)


def continue_with(model: Any, inputs: dict[str, Tensor], cache: Any, **options: Any) -> list[list[int]]:
    """New tokens of ``generate`` with a fixed seed."""
    options = {"max_new_tokens": 12, "do_sample": False} | options
    if options.get("assistant_model") == "small":
        options["assistant_model"] = make_model()
    torch.manual_seed(3)
    return model.generate(**inputs, past_key_values=cache, **options).tolist()


def prefill(model: Any, inputs: dict[str, Tensor], cache: Any) -> Any:
    with torch.no_grad():
        model(**inputs, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize(("mode", "kv"), in_turn([*MODES], NAMES))
def test_mode_gives_the_stock_tokens(mode: str, kv: str) -> None:
    model = make_model()
    inputs = make_prompts([17] if mode in ONE_ROW else [11, 5, 14])
    if mode in ONE_ROW:  # something to look up
        inputs["input_ids"][0, 9:] = inputs["input_ids"][0, :8]
    expected = continue_with(model, inputs, STOCK[kv](config=model.config), **MODES[mode])
    assert continue_with(model, inputs, ours(model, kv), **MODES[mode]) == expected


@KINDS
def test_continuing_a_filled_cache_gives_the_stock_tokens(kv: str) -> None:
    model, inputs = make_model(), make_prompts([21, 21])
    start = {name: x[:, :10] for name, x in inputs.items()}
    results = [
        continue_with(model, inputs, prefill(model, start, cache))
        for cache in (STOCK[kv](config=model.config), ours(model, kv))
    ]
    assert results[0] == results[1]


@KINDS
def test_forks_of_a_prefix_continue_as_if_they_had_read_it_themselves(kv: str) -> None:
    model, prefix = make_model(), make_prompts([13])
    shared = prefill(model, prefix, ours(model, kv)).freeze()
    num_pages = shared.num_pages_held
    for seed in range(1, 4):
        question = make_prompts([6], seed=seed)
        inputs = {name: torch.cat((prefix[name], question[name]), dim=1) for name in prefix}
        fresh = prefill(model, prefix, ours(model, kv))
        assert continue_with(model, inputs, shared.fork()) == continue_with(model, inputs, fresh)
        assert shared.get_seq_length() == 13
    assert shared.num_pages_held == num_pages


@KINDS
def test_two_forks_do_not_see_each_other(kv: str) -> None:
    model, prefix = make_model(), make_prompts([6])  # the second page is half full
    first = prefill(model, prefix, ours(model, kv))
    second = first.fork()
    before = [second.layers[i].keys for i in range(3)]
    prefill(model, make_prompts([5], seed=1) | {"attention_mask": torch.ones(1, 11)}, first)
    assert (first.get_seq_length(), second.get_seq_length()) == (11, 6)
    assert all(torch.equal(second.layers[i].keys, before[i]) for i in range(3))
    assert all(torch.equal(first.layers[i].keys[:, :, :6], before[i]) for i in range(3))


def test_a_fork_moves_no_keys_or_values() -> None:
    model = make_model()
    cache = prefill(model, make_prompts([40]), ours(model, "int8:g16"))
    nbytes, num_pages = cache.nbytes, cache.num_pages_held
    forks = [cache.fork() for _ in range(50)]
    assert all(fork.nbytes == nbytes for fork in forks)
    assert cache.num_pages_held == num_pages


def test_pages_of_a_dropped_fork_are_given_back() -> None:
    model = make_model()
    cache = prefill(model, make_prompts([6]), ours(model, "float32"))
    fork = prefill(model, make_prompts([9], seed=1) | {"attention_mask": torch.ones(1, 15)}, cache.fork())
    assert cache.num_pages_held > 2
    del fork
    assert cache.num_pages_held == 2


@KINDS
def test_deepcopy_is_a_fork(kv: str) -> None:
    model, inputs = make_model(), make_prompts([9])
    cache = prefill(model, inputs, ours(model, kv))
    other = copy.deepcopy(cache)
    longer = {name: torch.cat((x, x[:, :4]), dim=1) for name, x in inputs.items()}
    assert continue_with(model, longer, other) == continue_with(model, longer, cache.fork())
    assert cache.get_seq_length() == 9


@KINDS
def test_rows_can_be_repeated_selected_and_reordered(kv: str) -> None:
    model, inputs = make_model(), make_prompts([7, 7])
    stock, cache = (prefill(model, inputs, c) for c in (STOCK[kv](config=model.config), ours(model, kv)))
    for verb, argument in (
        ("batch_repeat_interleave", 3),
        ("reorder_cache", torch.tensor([5, 0, 1, 1, 4, 3])),
        ("batch_select_indices", torch.tensor([0, 3, 4])),
    ):
        getattr(stock, verb)(argument)
        getattr(cache, verb)(argument)
        size = stock.layers[0].keys.shape[0]
        tokens = torch.arange(3, 3 + size).unsqueeze(1)
        with torch.no_grad():
            logits = [model(tokens, past_key_values=c, use_cache=True).logits for c in (stock, cache)]
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(cache.layers, stock.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)


def test_rows_can_be_selected_by_a_mask() -> None:
    model = make_model()
    cache = prefill(model, make_prompts([5, 5, 5]), ours(model, "float32"))
    keys = cache.layers[1].keys
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert torch.equal(cache.layers[1].keys, keys[[0, 2]])


def test_unknown_rows_are_refused() -> None:
    model = make_model()
    cache = prefill(model, make_prompts([5, 5]), ours(model, "float32"))
    with pytest.raises(ArgumentError, match="rows must be in"):
        cache.reorder_cache(torch.tensor([0, 2]))
    assert cache.num_rows == 2


@KINDS
def test_crop_then_growing_again_gives_the_stock_logits(kv: str) -> None:
    model, inputs = make_model(), make_prompts([18])
    stock, cache = (prefill(model, inputs, c) for c in (STOCK[kv](config=model.config), ours(model, kv)))
    for c in (stock, cache):
        c.crop(-7)
        c.crop(-2)
    tail = inputs["input_ids"][:, 3:12]
    with torch.no_grad():
        logits = [model(tail, past_key_values=c, use_cache=True).logits for c in (stock, cache)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    assert cache.get_seq_length() == stock.get_seq_length() == 18


def test_crop_takes_a_tensor() -> None:
    model, inputs = make_model(), make_prompts([9])
    cache = prefill(model, inputs, ours(model, "float32"))
    cache.crop(torch.tensor(-4))
    with torch.no_grad():
        logits = model(inputs["input_ids"][:, 5:], past_key_values=cache, use_cache=True).logits
        expected = model(inputs["input_ids"]).logits[:, 5:]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("verb", ["update", "crop", "reset", "reorder_cache", "batch_repeat_interleave"])
def test_a_frozen_cache_refuses_change(verb: str) -> None:
    model, inputs = make_model(), make_prompts([5])
    cache = prefill(model, inputs, ours(model, "float32")).freeze()
    before = cache.layers[0].keys
    arguments = {"crop": (-1,), "reorder_cache": (torch.tensor([0]),), "batch_repeat_interleave": (2,)}
    with pytest.raises(StateError, match="frozen"):
        if verb == "update":
            prefill(model, inputs, cache)
        else:
            getattr(cache, verb)(*arguments.get(verb, ()))
    assert torch.equal(cache.layers[0].keys, before)


def test_a_layer_refuses_what_concerns_all_of_them() -> None:
    model = make_model()
    cache = prefill(model, make_prompts([5]), ours(model, "float32"))
    with pytest.raises(UnsupportedError, match="call the cache"):
        cache.layers[0].reorder_cache(torch.tensor([0]))


def test_beams_share_the_pages_of_the_prompt() -> None:
    model, inputs = make_model(), make_prompts([64])
    cache = prefill(model, inputs, KVCache.for_model(model, page_size=4))
    cache.batch_repeat_interleave(8)
    assert cache.num_pages_held == 16
    prefill(model, make_prompts([1] * 8, seed=1) | {"attention_mask": torch.ones(8, 65)}, cache)
    assert cache.num_pages_held == 16 + 8


def test_a_bounded_cache_that_is_full_is_left_as_it_was() -> None:
    model, inputs = make_model(), make_prompts([14])
    cache = prefill(model, inputs, KVCache.for_model(model, page_size=4, max_tokens=16))
    keys = cache.layers[2].keys
    with pytest.raises(OutOfPages, match="max_tokens"):
        prefill(model, make_prompts([3], seed=1) | {"attention_mask": torch.ones(1, 17)}, cache)
    assert cache.get_seq_length() == 14
    assert torch.equal(cache.layers[2].keys, keys)


def test_greedy_generation_survives_a_page_size_larger_than_the_text() -> None:
    model, inputs = make_model(), make_prompts([3, 9])
    stock = generate(model, inputs, None)
    assert torch.equal(
        generate(model, inputs, ours(model, "float32", page_size=512)).sequences, stock.sequences
    )
