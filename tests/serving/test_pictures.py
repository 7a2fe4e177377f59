"""Chats with pictures: answers of ``generate``, and pages that the same pictures alone find."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

import openai
import pytest
from oracles.vision import (
    BEFORE,
    BEHIND,
    FAMILIES,
    ONE,
    OTHER,
    SMALL,
    Eyes,
    Seeing,
    cached,
    data_url,
    expect_stock,
    seeing,
    served_seeing,
    shown,
    stock_answer,
    tokens_of,
)
from PIL import Image


@pytest.fixture(scope="module", params=FAMILIES)
def eyes(request: pytest.FixtureRequest) -> Iterator[tuple[Seeing, Eyes]]:
    """A model, and a server of one with the same weights."""
    with served_seeing(seeing(request.param), max_answers=32) as server:
        assert server.session.pictures is not None
        yield seeing(request.param), server


@pytest.fixture(scope="module")
def llava() -> Iterator[tuple[Seeing, Eyes]]:
    """The same of one family, with keys."""
    with served_seeing(seeing("llava"), api_keys=("one", "two"), max_body_bytes=1 << 20) as server:
        yield seeing("llava"), server


def test_answers_are_those_of_generate_and_pictures_are_found(eyes: tuple[Seeing, Eyes]) -> None:
    stock, server = eyes
    content = [BEFORE, ONE, BEHIND]
    expected = stock_answer(stock, content, 6)
    for num_found in (0, expected[2] - 1):
        answer = server.ask(shown(*content), extra_body={"cache_salt": "first"})
        expect_stock(answer, expected)
        assert cached(answer) == num_found


def test_another_picture_finds_what_is_before_it_alone(eyes: tuple[Seeing, Eyes]) -> None:
    stock, server = eyes
    tokens, first, _ = tokens_of(stock, [BEFORE, ONE, BEHIND])
    assert tokens == tokens_of(stock, [BEFORE, OTHER, BEHIND])[0]
    answers = []
    for image, num_found in ((ONE, 0), (OTHER, first), (OTHER, len(tokens) - 1), (ONE, len(tokens) - 1)):
        content = [BEFORE, image, BEHIND]
        answers.append(server.ask(shown(*content), extra_body={"cache_salt": "other"}))
        expect_stock(answers[-1], stock_answer(stock, content, 6))
        assert cached(answers[-1]) == num_found
    said = [[x.logprob for x in answer.choices[0].logprobs.content] for answer in answers[:2]]
    assert said[0] != pytest.approx(said[1], abs=1e-3)


def test_a_picture_is_found_with_another_question(eyes: tuple[Seeing, Eyes]) -> None:
    stock, server = eyes
    salt = {"cache_salt": "question"}
    server.ask(shown(BEFORE, ONE, BEHIND), extra_body=salt)
    content = [BEFORE, ONE, " How large is it, and why?"]
    texts = [tokens_of(stock, x)[0] for x in ([BEFORE, ONE, BEHIND], content)]
    num_same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))])
    assert num_same > tokens_of(stock, content)[2]
    answer = server.ask(shown(*content), extra_body=salt)
    assert cached(answer) == num_same
    expect_stock(answer, stock_answer(stock, content, 6))


def test_two_pictures_are_found_in_their_order_alone(eyes: tuple[Seeing, Eyes]) -> None:
    stock, server = eyes
    salt = {"cache_salt": "two"}
    orders = [(ONE, SMALL), (SMALL, ONE), (ONE, OTHER), (ONE, SMALL)]
    for i, (one, other) in enumerate(orders):
        content = [BEFORE, one, " and ", other, BEHIND]
        answer = server.ask(shown(*content), extra_body=salt)
        expect_stock(answer, stock_answer(stock, content, 6))
        tokens, first, _ = tokens_of(stock, content)
        assert cached(answer) == (0, first, first, len(tokens) - 1)[i]


def test_chats_of_text_are_answered_by_the_session(eyes: tuple[Seeing, Eyes]) -> None:
    stock, server = eyes
    expected = stock_answer(stock, ["hello " * 40], 6)
    for num_found in (0, expected[2] // 16 * 16):
        answer = server.ask([{"role": "user", "content": "hello " * 40}])
        expect_stock(answer, expected)
        assert cached(answer) == num_found
    with server.client() as client:
        answer = client.completions.create(model="eyes", prompt="import os", max_tokens=4)
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_a_streamed_answer_is_the_whole_one(llava: tuple[Seeing, Eyes]) -> None:
    _, server = llava
    messages = shown(BEFORE, ONE, BEHIND)
    whole = server.ask(messages, "one", max_tokens=12)
    chunks = [
        *server.ask(messages, "one", max_tokens=12, stream=True, stream_options={"include_usage": True})
    ]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert len(chunks) > 6
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert cached(chunks[-1]) == whole.usage.prompt_tokens - 1


def test_a_second_turn_finds_the_first(eyes: tuple[Seeing, Eyes]) -> None:
    _, server = eyes
    salt = {"cache_salt": "turns"}
    messages = shown(BEFORE, ONE, BEHIND)
    first = server.ask(messages, extra_body=salt)
    messages += [
        {"role": "assistant", "content": "a picture"},
        {"role": "user", "content": "of what?"},
    ]
    second = server.ask(messages, extra_body=salt)
    cold = server.ask(messages, extra_body={"cache_salt": "turns, cold"})
    assert cached(cold) == 0
    assert first.usage.prompt_tokens - 20 < cached(second) <= first.usage.prompt_tokens
    assert [x.token for x in second.choices[0].logprobs.content] == [
        x.token for x in cold.choices[0].logprobs.content
    ]


def test_company_changes_no_answer(eyes: tuple[Seeing, Eyes]) -> None:
    stock, server = eyes
    contents: list[list[str | Image.Image]] = [
        [BEFORE, ONE, BEHIND],
        ["hello " * 40],
        [OTHER, BEHIND],
        ["hello " * 20],
        [BEFORE, OTHER, SMALL, BEHIND],
        [BEFORE],
    ]
    expected = [stock_answer(stock, content, 6) for content in contents]
    with ThreadPoolExecutor(12) as threads:
        answers = [*threads.map(lambda content: server.ask(shown(*content)), contents * 2)]
    for answer, stock_says in zip(answers, expected * 2, strict=True):
        expect_stock(answer, stock_says)
    server.until_idle()
    server.chats.pool.check()


def test_each_key_and_salt_has_pages_of_its_own(llava: tuple[Seeing, Eyes]) -> None:
    _, server = llava
    messages = shown(BEFORE, SMALL, BEHIND)
    server.ask(messages, "one")
    for key, salt in (("two", ""), ("one", "a"), ("two", "a"), ("one", "b")):
        options = {"cache_salt": salt} if salt else {}
        found = [cached(server.ask(messages, key, extra_body=options)) for _ in range(2)]
        assert found[0] == 0 < found[1]


def test_sampling_and_several_answers(llava: tuple[Seeing, Eyes]) -> None:
    _, server = llava
    messages = shown(BEFORE, ONE, BEHIND)
    answers = [server.ask(messages, "one", n=3, seed=5, temperature=1.0, max_tokens=8) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert len({*texts[0]}) == 3
    alone = server.ask(messages, "one", seed=6, temperature=1.0, max_tokens=8)
    assert alone.choices[0].message.content == texts[0][1]
    greedy = server.ask(messages, "one", max_tokens=8)
    tokens = [x.token for x in greedy.choices[0].logprobs.content]
    text = greedy.choices[0].message.content
    stopped = server.ask(messages, "one", max_tokens=8, stop=[text[3:5]])
    assert stopped.choices[0].message.content == text[:3]
    assert stopped.choices[0].finish_reason == "stop"
    [token] = server.session.tokenizer.convert_tokens_to_ids(
        server.session.tokenizer.tokenize(tokens[0], add_special_tokens=False)
    )
    for options in ({"logit_bias": {str(token): -100}}, {"extra_body": {"stop_token_ids": [token]}}):
        other = server.ask(messages, "one", max_tokens=8, **options)
        said = [x.token for x in other.choices[0].logprobs.content]
        assert (tokens[0] not in said) if "logit_bias" in options else (said == tokens[:1])


def test_an_answer_with_a_structure(llava: tuple[Seeing, Eyes]) -> None:
    _, server = llava
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "size", "schema": schema}}
    answer = server.ask(shown(BEFORE, ONE, BEHIND), "one", response_format=format, max_tokens=40)
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content)["size"] in ("small", "large")


def test_responses_take_pictures(llava: tuple[Seeing, Eyes]) -> None:
    _, server = llava
    chat = server.ask(shown(BEFORE, ONE, BEHIND), "one")
    parts = [
        {"type": "input_text", "text": BEFORE},
        {"type": "input_image", "image_url": data_url(ONE), "detail": "auto"},
        {"type": "input_text", "text": BEHIND},
    ]
    with server.client("one") as client:
        answer = client.responses.create(
            model="eyes", input=[{"role": "user", "content": parts}], max_output_tokens=6, temperature=0
        )
        assert answer.output_text == chat.choices[0].message.content
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == chat.usage.prompt_tokens - 1
        parts[1]["image_url"] = "https://example.org/a.png"
        with pytest.raises(openai.BadRequestError, match="nothing is fetched"):
            client.responses.create(model="eyes", input=[{"role": "user", "content": parts}])


def test_a_jpeg_and_a_webp_are_what_they_decode_to(llava: tuple[Seeing, Eyes]) -> None:
    _, server = llava
    salt = {"cache_salt": "formats"}
    turned = Image.Exif()
    turned[0x0112] = 3  # by half a turn
    lossless = {"lossless": True, "exact": True}
    for url, is_known in (
        (data_url(ONE), False),
        (data_url(ONE, "WEBP", **lossless), True),
        (data_url(ONE.rotate(180), "WEBP", exif=turned, **lossless), True),
        (data_url(ONE.convert("RGBA")), True),
        (data_url(ONE, "JPEG"), False),
        (data_url(ONE, "JPEG"), True),
    ):
        messages = shown(BEFORE, ONE, BEHIND)
        messages[0]["content"][1]["image_url"]["url"] = url
        answer = server.ask(messages, "one", extra_body=salt)
        assert (cached(answer) == answer.usage.prompt_tokens - 1) == is_known


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_pages_of_codes(llava: tuple[Seeing, Eyes], kv: str) -> None:
    """With codes, the picture is found, and the answer is that behind what was computed."""
    with served_seeing(seeing("llava"), kv) as server:
        first, again = (server.ask(shown(BEFORE, ONE, BEHIND)) for _ in range(2))
    assert cached(first) == 0
    assert cached(again) == again.usage.prompt_tokens - 1
    assert [x.token for x in first.choices[0].logprobs.content] == [
        x.token for x in again.choices[0].logprobs.content
    ]
