"""Layers of a decoder that attend to a picture, beside those that attend to the text: Mllama."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, MllamaConfig, MllamaForConditionalGeneration

from kvloom import plan
from kvloom.errors import KVError, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, enable
from kvloom.integrations.transformers.attention.crossed import CrossStates
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT

PICTURE = 98


def mllama() -> Any:
    config = MllamaConfig(
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_global_layers": 1,
            "attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 32,
            "intermediate_layers_indices": [0], "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]],
        },
        text_config={
            "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1, 3],
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
            "rope_scaling": {"rope_type": "default"},
        },
        image_token_index=PICTURE,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "gate" in name and x.numel() == 1:
                x.fill_(0.7)  # otherwise no layer would add what it sees
            elif x.ndim > 1 and "norm" not in name:
                x.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    return model


def inputs(num_rows: int = 2, *, pictures: int = 1, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, PICTURE, (num_rows, 9), generator=generator)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pictures:
        ids[:, :pictures] = PICTURE
        ones = torch.ones(num_rows, pictures, dtype=torch.int64)
        found["pixel_values"] = torch.randn(num_rows, pictures, 1, 3, 28, 28, generator=generator)
        found |= {"aspect_ratio_ids": ones, "aspect_ratio_mask": ones[..., None]}
        seen = torch.ones(num_rows, 9, pictures, 1, dtype=torch.int64)
        for n in range(1, pictures):  # a picture is not seen by the tokens before it
            seen[:, :n, n] = 0
        found["cross_attention_mask"] = seen
    return found


def answer(model: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    tokens: Tensor = model.generate(
        **given, **{"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False} | options
    )
    return tokens


@pytest.mark.parametrize("pictures", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("how", ["cache", "enabled"])
def test_a_picture_is_seen_after_the_first_forward(how: str, options: dict[str, Any], pictures: int) -> None:
    model, given = mllama(), inputs(pictures=pictures)
    expected = answer(model, given, **options)
    if how == "enabled":
        enable(model)
    else:
        options = options | {CACHE_ARGUMENT: KVCache.for_model(model, page_size=4)}
    assert torch.equal(answer(model, given, **options), expected)


def test_another_picture_is_another_answer() -> None:
    """What the test above would not notice, it could not show."""
    model, given = mllama(), inputs()
    other = given | {"pixel_values": given["pixel_values"].flip(0)}
    assert not torch.equal(answer(model, given), answer(model, other))


@pytest.mark.compile
def test_steps_of_a_static_cache_compile() -> None:
    """The model asks every layer for the size of its keys."""
    model, given = mllama(), inputs()
    new = {"max_new_tokens": 3, "min_new_tokens": 3}
    expected = answer(model, given, **new)
    compilation = CompileConfig(backend="eager", fullgraph=False, mode=None)
    compilation._compile_all_devices = True
    cache = KVCache.for_model(model, static=True, max_tokens=32)
    torch._dynamo.reset()
    found = answer(model, given, compile_config=compilation, **new, **{CACHE_ARGUMENT: cache})
    torch._dynamo.reset()
    assert torch.equal(found, expected)


def test_a_crop_of_the_text_leaves_the_picture() -> None:
    model, given = mllama(), inputs()
    cache, after = KVCache.for_model(model, page_size=4), torch.tensor([[5, 6], [7, 8]])
    with torch.no_grad():
        model(**given, **{CACHE_ARGUMENT: cache})
        mask = given["cross_attention_mask"][:, :2]
        logits = []
        for _ in range(2):
            logits.append(model(after, cross_attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits)
            cache.crop(-2)
    assert torch.equal(*logits)


def test_no_refusal_names_a_class_of_this_library(caplog: pytest.LogCaptureFixture) -> None:
    model, internal = mllama(), re.compile("CrossLayer|KVCacheLayer|PagedLayer|FixedLayer|PackedOnly")
    with caplog.at_level(logging.WARNING, logger="kvloom"):
        cache = KVCache.for_model(model, max_tokens=64, static=True)
    assert not caplog.text  # all layers are in pages
    calls: list[Any] = [
        lambda: KVPool.for_model(model, max_tokens=64),
        lambda: cache.crop([-1, 0]),
        lambda: plan(model.config, context=64),
    ]
    with torch.no_grad():
        model(**inputs(), **{CACHE_ARGUMENT: cache})
    for call in calls:
        with pytest.raises(KVError) as told:
            call()
        assert not internal.search(str(told.value)), told.value


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_beams_share_the_keys_of_a_picture(kv: str, num_beams: int) -> None:
    """And attention reads them in place: ``gather`` would raise."""
    model, given = mllama(), inputs()
    cache, states = answered(model, given, kv, num_beams)
    assert len(given["input_ids"]) * num_beams == cache.num_rows
    one, _ = answered(model, given, kv, 1)
    assert cache._encoder.nbytes == one._encoder.nbytes > 0
    assert cache.nbytes > cache._encoder.nbytes
    assert states.shape[0] == cache.num_rows


def answered(model: Any, given: dict[str, Tensor], kv: str, num_beams: int) -> tuple[Any, Any]:
    """The cache of an answer, and the keys of a picture in it."""
    enable(model, kv, page_size=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CrossStates, "gather", None)
        found = answer(model, given, num_beams=num_beams, return_dict_in_generate=True)
    cache: Any = found.past_key_values  # type: ignore[attr-defined]
    return cache, cache.layers[1].keys


def second_question() -> dict[str, Tensor]:
    """Text with a picture behind text with another, and what it sees of both."""
    given = inputs(pictures=2, seed=5)
    new = {name: given[name][:, :1] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
    return given | new | {"attention_mask": torch.ones(2, 18, dtype=torch.int64)}


def two_questions(model: Any, cache: Any, *, copied: Any = lambda cache: cache) -> Tensor:
    """Tokens of an answer about two pictures, of which the second comes with the second question."""
    with torch.no_grad():
        model(**inputs(), **{CACHE_ARGUMENT: cache}, use_cache=True)
        cache = copied(cache)
        found = [model(**second_question(), **{CACHE_ARGUMENT: cache}, use_cache=True).logits]
        mask = torch.ones(2, 1, 2, 1, dtype=torch.int64)
        for _ in range(3):
            token = found[-1][:, -1:].argmax(-1)
            step = {"input_ids": token, "cross_attention_mask": mask, CACHE_ARGUMENT: cache}
            found.append(model(**step, use_cache=True).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("attention", ["kvloom", "sdpa"])
def test_pictures_of_a_later_question_follow_the_first(attention: str) -> None:
    model = mllama()
    expected = two_questions(model, DynamicCache(config=model.config.get_text_config()))
    model.set_attn_implementation(attention)
    copies = [lambda x: x, lambda x: x.fork(), copy.deepcopy, lambda x: x.snapshot().fork()]
    for copied in copies:
        found = two_questions(model, KVCache.for_model(model, page_size=4), copied=copied)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["kvloom", "sdpa"])
def test_rows_share_a_picture_until_another_differs(attention: str) -> None:
    model = mllama()
    model.set_attn_implementation(attention)
    cache: Any = KVCache.for_model(model, page_size=4)
    torch.manual_seed(0)
    same, others = torch.randn(1, 2, 5, 8).expand(3, -1, -1, -1), torch.randn(3, 2, 5, 8)
    for number in (1, 3):
        cache.update(same, same, number)
    assert cache.num_pages_held == 2  # of 5 tokens of one row
    cache.batch_select_indices(torch.tensor([2, 1, 0]))
    for number in (1, 3):
        keys, values = cache.update(others, others, number)
        both = torch.cat([same, others], 2)
        assert torch.equal(keys + 0, both)
        assert torch.equal(values + 0, both)
    assert cache.num_pages_held == 9
    fork = cache.fork()
    cache.batch_select_indices(torch.tensor([1]))
    assert torch.equal(cache.layers[3].keys + 0, both[1:2])
    assert torch.equal(fork.layers[3].keys + 0, both)


@pytest.mark.parametrize("attention", ["kvloom", "sdpa"])
@pytest.mark.parametrize("order", [[2, 0, 1], [1, 1, 0], [2, 1]])
def test_another_picture_follows_rows_in_any_order(attention: str, order: list[int]) -> None:
    model = mllama()
    model.set_attn_implementation(attention)
    cache: Any = KVCache.for_model(model, page_size=4)
    torch.manual_seed(0)
    first, second = torch.randn(2, 3, 2, 5, 8).unbind(0)
    second = second[: len(order)]
    for number in (1, 3):
        cache.update(first, -first, number)
    cache.reorder_cache(torch.tensor(order))
    both = torch.cat([first[order], second], 2)
    for number in (1, 3):
        keys, values = cache.update(second, -second, number)
        assert torch.equal(keys + 0, both)
        assert torch.equal(values + 0, -both)
    cache.layers[1].keys = both.flip(0)
    assert torch.equal(cache.layers[1].keys + 0, both.flip(0))


def test_a_picture_of_a_broken_forward_is_removed_with_its_text() -> None:
    model = mllama()
    expected = two_questions(model, KVCache.for_model(model, page_size=4))
    cache: Any = KVCache.for_model(model, page_size=4)

    def broken(cache: Any) -> Any:
        last = model.model.language_model.layers[3]
        handle = last.register_forward_pre_hook(_raise)
        with pytest.raises(OSError, match="broken"):
            model(**second_question(), **{CACHE_ARGUMENT: cache}, use_cache=True)
        handle.remove()
        with pytest.raises(StateError, match="layers must have one length"):
            cache.update(torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8), 1)
        cache.crop(-9)
        return cache

    assert torch.equal(two_questions(model, cache, copied=broken), expected)


def _raise(*args: Any) -> None:
    raise OSError("broken")


def test_rows_lose_different_numbers_of_tokens_beside_a_picture() -> None:
    model, given = mllama(), inputs()
    cache = KVCache.for_model(model, page_size=4)
    with torch.no_grad():
        model(**given, **{CACHE_ARGUMENT: cache}, use_cache=True)
    number = cache.layers[1].get_seq_length()
    cache.crop([-1, 0])
    assert (cache.get_seq_length(), cache.layers[1].get_seq_length()) == (9, number)


def test_a_pool_refuses_it() -> None:
    with pytest.raises(
        UnsupportedError, match="got keys and values of pictures in MllamaForConditionalGeneration"
    ):
        KVPool.for_model(mllama(), max_tokens=64)
