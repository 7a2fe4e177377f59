"""Models that see images: the stock tokens, also where text attends to all of a prefix."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import SMALL, WINDOW
from torch import Tensor
from transformers import AutoModelForImageTextToText, Cache, DynamicCache

from kvloom.integrations.transformers import KVCache

IMAGE = 98  # the token that an image's features take the place of
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 32,
}
SIGLIP = TOWER | {"model_type": "siglip_vision_model"}
PALI = {"vision_config": SIGLIP, "image_token_index": IMAGE, "projection_dim": 32, "hidden_size": 32}
# Of old, a stock window cannot go back, and one mask served layers of every window.
OLD = {} if "tokens_to_remove" in inspect.signature(Cache.crop).parameters else {"sliding_window": 64}
# Name: config class, its arguments, how many tokens an image takes.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "PaliGemma": (
        "PaliGemmaConfig",
        PALI | {"text_config": SMALL | {"model_type": "gemma", "head_dim": 8}},
        16,
    ),
    "PaliGemma2": (
        "PaliGemmaConfig",
        PALI | {"text_config": SMALL | WINDOW | OLD | {"model_type": "gemma2"}},
        16,
    ),
    "Gemma3": (
        "Gemma3Config",
        {
            "text_config": SMALL | WINDOW | {"model_type": "gemma3_text", "sliding_window_pattern": 2},
            "vision_config": SIGLIP,
            "image_token_index": IMAGE,
            "mm_tokens_per_image": 4,
        },
        4,
    ),
    "Llava": (
        "LlavaConfig",
        {
            "text_config": SMALL | {"model_type": "llama"},
            "vision_config": TOWER | {"model_type": "clip_vision_model"},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        16,
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLConfig",
        {
            "text_config": SMALL
            | {
                "model_type": "qwen2_5_vl_text",
                "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "out_hidden_size": 32,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": IMAGE,
            "vision_start_token_id": 96,
            "vision_end_token_id": 97,
        },
        4,
    ),
}
NAMES = pytest.mark.parametrize("name", list(FAMILIES))
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}
# Of old, scaled dot product attention leaves the soft cap out.
STOCK = {"PaliGemma2": "eager"}


def vision_model(name: str) -> Any:
    """A random model of the family."""
    config, arguments, _ = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        getattr(transformers, config)(**arguments), attn_implementation=STOCK.get(name, "sdpa")
    )
    return model.eval()


def prompts(name: str, model: Any, rows: int) -> dict[str, Tensor]:
    """An image and 9 tokens for each row; the second row has one token less and is padded on the left."""
    num_image = FAMILIES[name][2]
    rng = torch.Generator().manual_seed(1)
    text = torch.randint(3, 95, (rows, 9), generator=rng)
    text[0, 5:] = text[0, :4]  # something to look up
    ids = torch.cat([text[:, :2], torch.full((rows, num_image), IMAGE), text[:, 2:]], dim=1)
    mask = torch.ones_like(ids)
    ids[1:, 0], mask[1:, 0] = SMALL["pad_token_id"], 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    is_image = (ids == IMAGE).long()
    if name == "Qwen2.5-VL":
        ids[:, 1] = 96
        inputs["pixel_values"] = torch.randn(rows * 16, 3 * 2 * 4 * 4, generator=rng)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]]).repeat(rows, 1)
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            inputs["mm_token_type_ids"] = is_image
    else:
        inputs["pixel_values"] = torch.randn(rows, 3, 16, 16, generator=rng)
    if name == "Gemma3":
        inputs["token_type_ids"] = is_image
    if name.startswith("PaliGemma"):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs


def continued(model: Any, cache: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    """What ``generate`` returns, with the logits of every step."""
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12} | options
    options |= {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, past_key_values=cache, **options)


def expect_same(actual: Any, expected: Any) -> None:
    assert torch.equal(actual.sequences, expected.sequences)
    for ours, stock in zip(actual.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


def caches(model: Any) -> list[tuple[str, Any]]:
    """Attention and cache, in every mixture that has something of ours."""
    config = model.config.get_text_config(decoder=True)
    return [
        (config._attn_implementation, lambda: KVCache.for_model(model, page_size=4)),
        ("kvloom", lambda: KVCache.for_model(model, page_size=4)),
        ("kvloom", lambda: DynamicCache(config=config)),
    ]


@pytest.mark.parametrize("mode", list(MODES))
@NAMES
def test_images_and_text_give_the_stock_tokens_and_logits(name: str, mode: str) -> None:
    model = vision_model(name)
    inputs = prompts(name, model, rows=1 if mode == "prompt lookup" else 2)
    mixtures, config = caches(model), model.config.get_text_config()
    try:
        stock = continued(model, DynamicCache(config=config), inputs, **MODES[mode])
    except ValueError as error:  # a stock window of old
        assert "Cannot `crop`" in str(error)
        stock = continued(model, DynamicCache(config=config), inputs)
        mixtures = mixtures[:2]
    for attention, cache in mixtures:
        model.set_attn_implementation(attention)
        expect_same(continued(model, cache(), inputs, **MODES[mode]), stock)


@NAMES
def test_a_second_turn_gives_the_stock_tokens_and_logits(name: str) -> None:
    """Its tokens come behind stored ones, all in one step."""
    model = vision_model(name)
    inputs = prompts(name, model, rows=1)
    question = torch.randint(3, 95, (1, 6), generator=torch.Generator().manual_seed(2))

    def two_turns(cache: Any) -> tuple[Any, Any]:
        first = continued(model, cache, inputs)
        ids = torch.cat([first.sequences, question], dim=1)
        return first, continued(model, cache, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    stock = two_turns(DynamicCache(config=model.config.get_text_config()))
    for attention, cache in caches(model):
        model.set_attn_implementation(attention)
        for actual, expected in zip(two_turns(cache()), stock, strict=True):
            expect_same(actual, expected)


@NAMES
def test_a_residual_window_of_the_whole_text_gives_the_stock_tokens_and_logits(name: str) -> None:
    """Also where a prefix sees all of itself, beyond a window that is shorter."""
    model = vision_model(name)
    inputs = prompts(name, model, rows=2)
    stock = continued(model, DynamicCache(config=model.config.get_text_config()), inputs)
    model.set_attn_implementation("kvloom")
    expect_same(continued(model, KVCache.for_model(model, "int4:g2,recent=64"), inputs), stock)


@NAMES
def test_steps_of_several_tokens_give_the_stock_logits(name: str) -> None:
    model = vision_model(name)
    inputs = prompts(name, model, rows=1)
    steps = torch.randint(3, 95, (1, 9), generator=torch.Generator().manual_seed(3)).split([5, 1, 3], dim=1)

    def logits(cache: Any) -> Tensor:
        with torch.no_grad():
            found = [model(**inputs, past_key_values=cache, use_cache=True).logits]
            return torch.cat([*found, *(model(x, past_key_values=cache).logits for x in steps)], dim=1)

    stock = logits(DynamicCache(config=model.config.get_text_config()))
    for attention, cache in caches(model):
        model.set_attn_implementation(attention)
        torch.testing.assert_close(logits(cache()), stock, rtol=1e-4, atol=1e-4)
