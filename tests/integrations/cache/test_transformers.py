"""``generate()`` through a kvloom cache gives the tokens and logits of transformers' own cache."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from core.spellings import BAD, ODD
from oracles.language_models import NEW_TOKENS, generate, make_model, make_prompts

from kvloom.core.entries import CODES
from kvloom.errors import ArgumentError, KVError, OutOfPages
from kvloom.integrations.transformers import STORAGE, KVCache, KVPool, enable, load_model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [[1], [9], [5, 12, 1], [16, 16], [33, 2, 17, 8]])
def test_float_cache_gives_the_stock_tokens_and_logits(attention: str, lengths: list[int]) -> None:
    model, inputs = make_model(attention), make_prompts(lengths)
    stock = generate(model, inputs, None)
    ours = generate(model, inputs, KVCache.for_model(model, page_size=4))
    assert torch.equal(ours.sequences, stock.sequences)
    assert len(set(stock.sequences[0, -NEW_TOKENS:].tolist())) > NEW_TOKENS // 2
    for expected, actual in zip(stock.logits, ours.logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_tokens_do_not_depend_on_page_size(page_size: int) -> None:
    model, inputs = make_model(), make_prompts([7, 13])
    stock = generate(model, inputs, None)
    ours = generate(model, inputs, KVCache.for_model(model, page_size=page_size))
    assert torch.equal(ours.sequences, stock.sequences)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_keeps_the_models_dtype(dtype: torch.dtype) -> None:
    model, inputs = make_model(dtype=dtype), make_prompts([6, 11])
    cache = KVCache.for_model(model)
    ours = generate(model, inputs, cache)
    assert torch.equal(ours.sequences, generate(model, inputs, None).sequences)
    assert cache.nbytes_per_token == 3 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("kv", "nbytes_per_token"),
    [
        ("float32", 768),
        ("float16", 384),
        ("bfloat16", 384),
        ("int8:g16", 216),
        ("int4:g16,recent=0", 120),
        ("int2:g16,recent=0", 72),
    ],
)
def test_cache_takes_the_bytes_it_promises(kv: str, nbytes_per_token: int) -> None:
    model = make_model()
    cache = KVCache.for_model(model, kv=kv)
    assert cache.nbytes == 0
    generate(model, make_prompts([9, 4]), cache)
    assert cache.nbytes_per_token == nbytes_per_token
    num_tokens = 2 * (9 + NEW_TOKENS - 1)
    assert num_tokens * nbytes_per_token <= cache.nbytes <= 3 * num_tokens * nbytes_per_token


def test_continuing_from_a_filled_cache_equals_one_long_prompt() -> None:
    model, inputs = make_model(), make_prompts([21])
    cache = KVCache.for_model(model)
    with torch.no_grad():
        model(inputs["input_ids"][:, :10], past_key_values=cache)
    assert cache.get_seq_length() == 10
    assert torch.equal(generate(model, inputs, cache).sequences, generate(model, inputs, None).sequences)


def test_crop_rolls_back() -> None:
    model, inputs = make_model(), make_prompts([12])
    cache = KVCache.for_model(model)
    with torch.no_grad():
        model(inputs["input_ids"], past_key_values=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 7
        out = model(inputs["input_ids"][:, 7:], past_key_values=cache)
        expected = model(inputs["input_ids"])
    torch.testing.assert_close(out.logits, expected.logits[:, 7:], rtol=1e-5, atol=1e-5)


def test_reset_serves_another_batch_size() -> None:
    model, cache = make_model(), None
    cache = KVCache.for_model(model)
    for lengths in ([5, 9], [4]):
        inputs = make_prompts(lengths)
        assert torch.equal(generate(model, inputs, cache).sequences, generate(model, inputs, None).sequences)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.nbytes == 0


def test_layers_can_be_read_as_tensors() -> None:
    model, inputs = make_model(), make_prompts([6])
    cache = KVCache.for_model(model)
    assert cache.layers[0].keys is None
    with torch.no_grad():
        stock = model(**inputs, use_cache=True).past_key_values
        model(**inputs, past_key_values=cache)
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_bounded_cache_refuses_more_tokens() -> None:
    model, inputs = make_model(), make_prompts([20])
    with pytest.raises(OutOfPages, match="max_tokens"):
        generate(model, inputs, KVCache.for_model(model, max_tokens=32))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"page_size": 0}, "page_size"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(KVError, match=name) as error:
        KVCache.for_model(make_model(), **options)
    assert isinstance(error.value, ValueError)


MAKE: dict[str, Callable[..., object]] = {
    "KVCache": KVCache.for_model,
    "static": partial(KVCache.for_model, max_tokens=32, static=True),
    "KVPool": partial(KVPool.for_model, max_tokens=32),
    "enable": enable,
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_how_keys_and_values_are_kept_is_refused_by_name(make: Callable[..., object]) -> None:
    model = make_model("sdpa")
    for text in [*BAD, *ODD]:
        for name in ("kv", "values"):
            with pytest.raises(ArgumentError, match=f"^{name} must (be one of|have a group of a multiple)"):
                make(model, **{name: text})
    with pytest.raises(ArgumentError, match=r"^kv must be one of .*, got None"):
        make(model, None)
    assert not model._forward_pre_hooks  # of enable


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_group_that_does_not_divide_the_head_dim_is_refused_by_name(make: Callable[..., object]) -> None:
    model = make_model()
    for options, name, text in (
        ({"kv": "int8:g24"}, "kv", "int8:g24"),
        ({"kv": "int8:g64"}, "kv", "int8:g64"),
        ({"kv": "int8:g16", "values": "int4:g12"}, "values", "int4:g12"),
        ({"values": "int4:g64"}, "values", "int4:g64"),
    ):
        message = f"{name} must have a group that divides the head dim 16, got '{text}'"
        with pytest.raises(ArgumentError, match=f"^{message}$"):
            make(model, **options)


def test_each_side_has_a_group_of_its_own() -> None:
    model = make_model()
    for values, nbytes in (("int4:g4,recent=0", 8 + 4 * 2), ("int2:g16,recent=0", 4 + 2)):
        cache = KVCache.for_model(model, "int8:g16", values=values)
        generate(model, make_prompts([9]), cache)
        assert cache.nbytes_per_token == 3 * 2 * ((16 + 2) + nbytes)


def test_every_storage_kind_is_accepted() -> None:
    model = make_model()
    for kv in STORAGE:
        assert len(KVCache.for_model(model, kv=f"{kv}:g16" if kv in CODES else kv)) == 3


def test_loading_a_missing_folder_names_it() -> None:
    with pytest.raises(ArgumentError, match="no-such-folder"):
        load_model("no-such-folder")
