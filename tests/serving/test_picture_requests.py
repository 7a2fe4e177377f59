"""Chats with pictures: what is refused before it is computed, who goes away, and a folder that is served."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from oracles.serving import serve
from oracles.vision import (
    BEFORE,
    BEHIND,
    ONE,
    OTHER,
    SMALL,
    Eyes,
    Seeing,
    cached,
    data_url,
    expect_stock,
    picture,
    seeing,
    served_seeing,
    shown,
    stock_answer,
)
from PIL import Image
from transformers import ContinuousBatchingConfig

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import load_model
from kvloom.serving.answering.picture_chats import picture_chats
from kvloom.serving.answering.session import ServingSession
from kvloom.serving.answering.vision import processor_of
from kvloom.serving.settings import Settings


@pytest.fixture(scope="module")
def llava() -> Iterator[tuple[Seeing, Eyes]]:
    """A model, and a server of one with the same weights."""
    with served_seeing(seeing("llava"), api_keys=("one", "two"), max_body_bytes=1 << 20) as server:
        yield seeing("llava"), server


def png_head(width: int, height: int) -> str:
    """The beginning of a picture of any size."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    data += struct.pack(">I", 99) + b"IDAT" + bytes(20)
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def moving(format: str) -> str:
    file = io.BytesIO()
    ONE.save(file, format, save_all=True, append_images=[OTHER])
    return f"data:image/{format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


WHOLE = data_url(ONE)
NAME = r"messages\[0\]\.content\[1\]\.image_url"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "remote": ({"url": "https://example.org/a.png"}, rf"{NAME}\.url must be data:TYPE;base64"),
    "a file": ({"url": "file:///etc/passwd"}, rf"{NAME}\.url must be data:"),
    "another type": ({"url": WHOLE.replace("png", "svg+xml")}, rf"{NAME}\.url must be data:"),
    "no url": ({}, rf"{NAME}\.url must be data:"),
    "no text": ({"url": 3}, rf"{NAME}\.url must be data:"),
    "detail": ({"url": WHOLE, "detail": "high"}, rf"{NAME}\.detail must be 'auto'"),
    "a field": ({"url": WHOLE, "size": 3}, rf"{NAME} must have fields that are supported, got 'size'"),
    "no base64": ({"url": WHOLE + "?"}, rf"{NAME} must be a whole PNG, JPEG or WebP"),
    "cut": ({"url": WHOLE[: len(WHOLE) // 8 * 4]}, rf"{NAME} must be a whole PNG, JPEG or WebP"),
    "nothing": ({"url": "data:image/png;base64,"}, rf"{NAME} must be a whole PNG, JPEG or WebP"),
    "a GIF": ({"url": data_url(ONE, "GIF").replace("gif", "png")}, rf"{NAME} must be a whole PNG"),
    "moving": ({"url": moving("WEBP")}, rf"{NAME} must be one picture, got 2 frames"),
    "a moving PNG": ({"url": moving("PNG")}, rf"{NAME} must be one picture, got 2 frames"),
    "many pixels": ({"url": png_head(8192, 8192)}, rf"{NAME} must be small enough .* got 8192 x 8192"),
    "a bomb": ({"url": png_head(60000, 60000)}, rf"{NAME} must be "),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_picture_that_is_none_is_refused_by_name(llava: tuple[Seeing, Eyes], case: str) -> None:
    _, server = llava
    image, match = REFUSED[case]
    messages = shown(BEFORE, ONE, BEHIND)
    messages[0]["content"][1]["image_url"] = image
    expect_refused(server, messages, match)


def test_what_is_too_much_is_refused(llava: tuple[Seeing, Eyes]) -> None:
    _, server = llava
    expect_refused(server, shown(*[SMALL] * 17), "messages must have at most 16 pictures, got 17")
    big = shown(ONE, Image.new("RGB", (4096, 4096)), Image.new("RGB", (4096, 4096)))
    expect_refused(server, big, r"messages\[0\]\.content\[2\]\.image_url must be small enough")
    expect_refused(server, shown(*[ONE, "word " * 3000]), "the prompt must be at most 2047 tokens")
    expect_refused(server, shown(ONE), "at most 2048 tokens together", max_tokens=2040)
    expect_refused(server, shown(picture(1, (2000, 2000))), "1048576 bytes", status=413)


def test_texts_do_not_stand_for_pictures(llava: tuple[Seeing, Eyes]) -> None:
    _, server = llava
    for text in ("<image>", "an <image> more"):
        expect_refused(
            server, shown(ONE, text), r"messages\[0\]\.content\[1\]\.text must be without '<image>'"
        )
    messages = [*shown(ONE), {"role": "user", "name": "<image>", "content": "x"}]
    expect_refused(server, messages, "messages")
    expect_refused(
        server,
        shown(ONE),
        "X-Session-Id must be left out",
        extra_headers={"X-Session-Id": "agent"},
    )
    body = json.dumps({"messages": shown(ONE)}).encode()
    status, said = server.send("POST", "/tokenize", body, "one")
    assert status == 400 and b"messages[0].content[0].image_url must be left out here" in said


def expect_refused(server: Eyes, messages: Any, match: str, status: int = 400, **options: Any) -> None:
    """Refused, and nothing computed."""
    before = server.chats.pool.report()["tokens_asked"], server.session.num_new
    with pytest.raises(openai.APIStatusError, match=match) as caught:
        server.ask(messages, "one", **options)
    assert caught.value.status_code == status
    assert (server.chats.pool.report()["tokens_asked"], server.session.num_new) == before
    assert server.session.num_taken == 0


def test_who_goes_away_is_computed_no_longer() -> None:
    messages, options = shown(BEFORE, ONE), {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with served_seeing(seeing("llava")) as server:
        with closing(server.ask(messages, stream=True, **options)) as stream:
            for _ in zip(range(4), stream, strict=False):
                pass
        server.until_idle()
        pages = server.chats.pool.report()
        assert pages["active"] == 0
        answer = server.ask(messages)
        num_prompt = answer.usage.prompt_tokens
        assert cached(answer) == num_prompt - 1  # what was computed is kept
        assert num_prompt < pages["evictable"] < 1900


def test_pages_give_way(llava: tuple[Seeing, Eyes]) -> None:
    stock = llava[0]
    with served_seeing(seeing("llava"), picture_tokens=96) as server:
        for seed in range(8):
            content: list[str | Image.Image] = [BEFORE, picture(seed), BEHIND]
            expect_stock(server.ask(shown(*content)), stock_answer(stock, content, 6))
        server.until_idle()
        server.chats.pool.check()
        with pytest.raises(openai.BadRequestError, match="the prompt must be at most 95 tokens, got 1"):
            server.ask(shown(*[ONE] * 6))


def test_a_model_that_goes_on_otherwise_behind_pictures_answers_text_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = seeing("llava")

    def change(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1.5 if output.shape[1] > 4 else 1.0)  # otherwise with few tokens

    parts.model.model.language_model.layers[0].mlp.register_forward_hook(change)
    assert picture_chats(parts.model, parts.tokenizer, parts.processor, 256) is None
    assert "logits after a picture that was found must be those computed without it" in caplog.text


def test_pack_only_is_refused(llava: tuple[Seeing, Eyes]) -> None:
    parts = seeing("llava")
    with pytest.raises(ArgumentError, match="pack must be other than 'only' for a model that takes pictures"):
        ServingSession(
            parts.model,
            parts.tokenizer,
            Settings(port=0),
            ContinuousBatchingConfig(page_size=16, num_blocks=16),
            pack="only",
            processor=parts.processor,
        )


def test_a_folder_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts, content = seeing("llava"), [BEFORE, ONE, BEHIND]
    tokens = stock_answer(parts, content, 6)[0]
    parts.model.save_pretrained(tmp_path)
    parts.processor.save_pretrained(tmp_path)

    def ask(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="eyes", messages=shown(*content), max_tokens=6, temperature=0, logprobs=True
            )
            text = client.completions.create(model="eyes", prompt="import", max_tokens=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None and text.choices[0].text
        assert [x.token for x in logprobs.content] == tokens

    assert serve(ask, str(tmp_path), "--name", "eyes", "--picture-tokens", "512")[0] == 0
    (tmp_path / "processor_config.json").write_text("{}")
    model, _ = load_model(tmp_path, progress=False)
    assert processor_of(model, tmp_path) is None
    assert "the model answers chats of text alone, without pictures" in caplog.text
