"""Small models that see, with random weights, processors and a chat template, and what they must answer."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, ContinuousBatchingConfig, DynamicCache
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from kvloom.integrations.transformers import load_model
from kvloom.models import bundled_model_path
from kvloom.serving.answering.picture_chats import PictureChats
from kvloom.serving.answering.session import ServingSession
from kvloom.serving.endpoints.models import Model
from kvloom.serving.settings import Settings
from oracles.serving import Served, running

TEXT: dict[str, Any] = {
    "vocab_size": 2064,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.3,
}
MARKS = {
    "llava": ("<image>", ["<image>"]),
    "gemma3": ("<start_of_image>", ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]),
    "idefics3": ("<image>", ["<fake_token_around_image>", "<image>", "<end_of_utterance>"]),
    "qwen2_5_vl": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    ),
}
FAMILIES = list(MARKS)
"""Plain; with windows, and pictures that see all of themselves; in tiles; with positions in three axes."""


@dataclass
class Eyes(Served):
    """A running server of a model that sees."""

    clients: dict[str, openai.OpenAI]

    @property
    def chats(self) -> PictureChats:
        """What computes chats with pictures."""
        assert self.session.pictures is not None
        return self.session.pictures

    def until_idle(self) -> None:
        """Wait until nothing is computed, and what was computed can be found."""
        while self.chats.num_taken or self.session.num_taken:
            time.sleep(0.005)

    def ask(self, messages: Any, key: str = "none", **options: Any) -> Any:
        """A chat, six likeliest tokens with their log probabilities if nothing else is said."""
        if key not in self.clients:
            self.clients[key] = self.client(key)
        options = {"max_tokens": 6, "temperature": 0, "logprobs": True} | options
        return self.clients[key].chat.completions.create(model="eyes", messages=messages, **options)


@dataclass
class Seeing:
    """A model that sees, and its folder's other parts."""

    model: Any
    tokenizer: Any
    processor: Any


class _QwenProcessor(transformers.Qwen2VLProcessor):  # type: ignore[misc]
    """Without videos, whose processor needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        return type(argument)


def seeing(family: str) -> Seeing:
    """A model of random weights, with the bundled model's tokens and those for pictures."""
    _, tokenizer = load_model(bundled_model_path(), progress=False)
    mark, special = MARKS[family]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = (
        "{% for message in messages %}# {{ message['role'] }}: {% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + mark + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n"
        "{% endfor %}{% if add_generation_prompt %}import os\n{% endif %}"
    )
    ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    config, processor = _PARTS[family](ids, tokenizer)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for weight in model.parameters():
        if not weight.any() and weight.ndim > 1:  # of Gemma 3, which would see nothing
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return Seeing(model, tokenizer, processor)


def _llava(ids: dict[str, int], tokenizer: Any) -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=ids["<image>"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    options = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, transformers.LlavaProcessor(images, tokenizer, **options)


def _gemma3(ids: dict[str, int], tokenizer: Any) -> tuple[Any, Any]:
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer._set_model_specific_special_tokens(names)
    config = transformers.Gemma3Config(
        text_config=TEXT | {"model_type": "gemma3_text", "sliding_window": 24, "sliding_window_pattern": 2},
        vision_config=TOWER | {"model_type": "siglip_vision_model"},
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        mm_tokens_per_image=4,
    )
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return config, transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)


def _idefics3(ids: dict[str, int], tokenizer: Any) -> tuple[Any, Any]:
    config = transformers.Idefics3Config(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER,
        image_token_id=ids["<image>"],
        scale_factor=2,
    )
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return config, transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)


def _qwen2_5_vl(ids: dict[str, int], tokenizer: Any) -> tuple[Any, Any]:
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT
        | {"model_type": "qwen2_5_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.3,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    size = {"shortest_edge": 64, "longest_edge": 1024}
    return config, _QwenProcessor(Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size), tokenizer)


_PARTS = {"llava": _llava, "gemma3": _gemma3, "idefics3": _idefics3, "qwen2_5_vl": _qwen2_5_vl}


@contextmanager
def served_seeing(
    parts: Seeing, kv: str = "auto", picture_tokens: int = 2048, **options: Any
) -> Iterator[Eyes]:
    """A server of a model that sees, by the name ``eyes``; ``options`` are of ``Settings``."""
    settings = Settings(port=0, **options)
    config = ContinuousBatchingConfig(page_size=16, num_blocks=256)
    session = ServingSession(
        parts.model,
        parts.tokenizer,
        settings,
        config,
        kv=kv,
        processor=parts.processor,
        picture_tokens=picture_tokens,
    )
    with running([Model(("eyes",), session)], settings) as port:
        eyes = Eyes(session, port, settings, {})
        yield eyes
        for client in eyes.clients.values():
            client.close()


def picture(seed: int, size: tuple[int, int] = (24, 16)) -> Image.Image:
    """A picture of noise, so that two differ everywhere."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_url(image: Image.Image, format: str = "PNG", **options: Any) -> str:
    """A picture in a URL."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return f"data:image/{format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def shown(*parts: str | Image.Image) -> list[dict[str, Any]]:
    """One message of the user, of texts and pictures."""
    content: list[dict[str, Any]] = [
        {"type": "text", "text": x}
        if isinstance(x, str)
        else {"type": "image_url", "image_url": {"url": data_url(x)}}
        for x in parts
    ]
    return [{"role": "user", "content": content}]


def _inputs(parts: Seeing, content: Sequence[str | Image.Image]) -> Any:
    """What the processor makes of one message of the user."""
    template = [{"type": "text", "text": x} if isinstance(x, str) else {"type": "image"} for x in content]
    text = parts.tokenizer.apply_chat_template(
        [{"role": "user", "content": template}], tokenize=False, add_generation_prompt=True
    )
    images = [x for x in content if not isinstance(x, str)]
    return parts.processor(text=[text], images=images or None, add_special_tokens=False, return_tensors="pt")


def tokens_of(parts: Seeing, content: Sequence[str | Image.Image]) -> tuple[list[int], int, int]:
    """The tokens of a chat, and where the first and the last one is that stands for a picture."""
    tokens = _inputs(parts, content)["input_ids"][0].tolist()
    config, names = parts.model.config, ("image_token_id", "image_token_index", "vision_start_token_id")
    marks = {getattr(config, name, None) for name in names} | {getattr(config, "vision_end_token_id", None)}
    where = [i for i, token in enumerate(tokens) if token in marks]
    return tokens, where[0], where[-1]


def stock_answer(
    parts: Seeing, content: Sequence[str | Image.Image], num_tokens: int
) -> tuple[list[str], list[float], int]:
    """What ``generate`` says with a stock cache: tokens, their log probabilities, tokens of the prompt."""
    inputs = _inputs(parts, content)
    out = parts.model.generate(
        **inputs,
        past_key_values=DynamicCache(config=parts.model.config.get_text_config()),
        do_sample=False,
        max_new_tokens=num_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    num_prompt = inputs["input_ids"].shape[1]
    tokens = out.sequences[0, num_prompt:]
    logprobs = torch.cat(out.logits).log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return parts.tokenizer.batch_decode(tokens[:, None]), chosen.tolist(), num_prompt


def expect_stock(answer: Any, stock: tuple[list[str], list[float], int]) -> None:
    """The tokens of a stock cache, with its log probabilities up to the order of float32's sums."""
    tokens, logprobs, num_prompt = stock
    said = answer.choices[0].logprobs.content
    assert [x.token for x in said] == tokens
    assert [x.logprob for x in said] == pytest.approx(logprobs, abs=1e-4)
    assert answer.usage.prompt_tokens == num_prompt


def cached(answer: Any) -> int:
    """Tokens of the prompt that were found."""
    return int(answer.usage.prompt_tokens_details.cached_tokens)


BEFORE, BEHIND = "Look at this, with some words before it: ", " What is it?"
ONE, OTHER = picture(1), picture(2)
SMALL = picture(3, (8, 8))
