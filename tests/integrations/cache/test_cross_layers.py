"""Layers of a decoder that attend to a picture, beside those that attend to the text: Mllama."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, MllamaConfig, MllamaForConditionalGeneration

from kvloom import plan
from kvloom.errors import KVError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, enable
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


def inputs(num_rows: int = 2, *, picture: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, PICTURE, (num_rows, 9), generator=generator)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if picture:
        ids[:, 0] = PICTURE
        ones = torch.ones(num_rows, 1, dtype=torch.int64)
        found["pixel_values"] = torch.randn(num_rows, 1, 1, 3, 28, 28, generator=generator)
        found |= {"aspect_ratio_ids": ones, "aspect_ratio_mask": ones[..., None]}
        found["cross_attention_mask"] = ones[:, :, None, None].expand(-1, 9, -1, -1).contiguous()
    return found


def answer(model: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    tokens: Tensor = model.generate(
        **given, **{"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False} | options
    )
    return tokens


@pytest.mark.parametrize("picture", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("how", ["cache", "enabled"])
def test_a_picture_is_seen_after_the_first_forward(how: str, options: dict[str, Any], picture: bool) -> None:
    model, given = mllama(), inputs(picture=picture)
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
    assert "2 of 4 layers keep transformers' own storage: {'keys and values of pictures': 2}" in caplog.text
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


def test_a_pool_refuses_it() -> None:
    with pytest.raises(
        UnsupportedError, match="got keys and values of pictures in MllamaForConditionalGeneration"
    ):
        KVPool.for_model(mllama(), max_tokens=64)
