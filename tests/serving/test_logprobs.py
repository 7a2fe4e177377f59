"""What an answer says of each token: which count, where they begin in the text, and their bytes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.serving import PROMPT, Served
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvloom.integrations.transformers import load_model
from kvloom.integrations.transformers.session.choices.sampling import LogProb
from kvloom.models import bundled_model_path
from kvloom.serving.endpoints.shapes import chat_logprobs, text_logprobs
from kvloom.serving.protocol.text import Echo, TextStream

TOKENIZER = load_model(bundled_model_path(), progress=False)[1]
OPTIONS: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "max_tokens": 40, "logprobs": 2}


def ask(client: openai.OpenAI, stream: bool, **options: Any) -> SimpleNamespace:
    """Text, usage and log probabilities of an answer, whole or put together."""
    if not stream:
        answer = client.completions.create(**OPTIONS | options)
        choice, usage, pieces = answer.choices[0], answer.usage, [answer.choices[0].logprobs]
        text, reason = choice.text, choice.finish_reason
    else:
        chunks = [
            *client.completions.create(
                **OPTIONS | options, stream=True, stream_options={"include_usage": True}
            )
        ]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        usage, pieces = chunks[-1].usage, [choice.logprobs for choice in choices if choice.logprobs]
        text, reason = "".join(choice.text for choice in choices), choices[-1].finish_reason
    assert usage is not None
    return SimpleNamespace(
        text=text,
        reason=reason,
        num_new=usage.completion_tokens,
        tokens=[x for piece in pieces for x in piece.tokens or []],
        offsets=[x for piece in pieces for x in piece.text_offset or []],
        chosen=[x for piece in pieces for x in piece.token_logprobs or []],
        likeliest=[x for piece in pieces for x in piece.top_logprobs or []],
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_tokens_count_up_to_the_one_that_completes_a_stop(
    client: openai.OpenAI, server: Served, stream: bool, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(client, stream=False)
    assert whole.num_new == 40 and "".join(whole.tokens) == whole.text
    stop = whole.text[20:26]
    if at_once:  # as beside neighbors: much was computed before anything is read
        router = server.session.manager.output_router
        deliver = router.deliver_batch
        monkeypatch.setattr(
            router, "deliver_batch", lambda outputs: deliver([x for x in outputs if x.is_finished()])
        )
    answer = ask(client, stream, stop=[stop])
    assert answer.reason == "stop" and answer.text == whole.text[: whole.text.index(stop)]
    count = next(i for i in range(40) if stop in "".join(whole.tokens[:i]))
    assert answer.num_new == count < 40
    assert answer.tokens == whole.tokens[:count]
    assert answer.offsets == whole.offsets[:count]
    assert answer.chosen == pytest.approx(whole.chosen[:count], abs=1e-4)
    assert len(answer.likeliest) == count


def test_offsets_are_those_of_the_text_while_it_is_held_back(client: openai.OpenAI) -> None:
    whole = ask(client, stream=False)
    for start in (4, 11, 23):  # the answer begins each stop, and does not end it
        streamed = ask(client, stream=True, stop=[whole.text[start : start + 12] + "\0"])
        assert streamed.text == whole.text and streamed.offsets == whole.offsets
    for token, offset in zip(whole.tokens, whole.offsets, strict=True):
        assert whole.text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_log_probabilities_of_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    """What tokens had when they were chosen they have again in a prompt, of which nothing is found."""
    options = {**OPTIONS, "max_tokens": 1, "temperature": 0, "stream": stream}
    first = client.completions.create(**{**OPTIONS, "temperature": 0}).choices[0]
    prompts = [PROMPT + first.text, PROMPT, "\n"]
    texts, offsets = [""] * 6, [list[int]() for _ in range(6)]
    tokens, chosen, likeliest = ([list[Any]() for _ in range(6)] for _ in range(3))
    more = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(**{**options, "prompt": prompts}, **more, echo=True, n=2)
    usage = None
    for part in answer if stream else [answer]:
        usage = part.usage or usage
        for choice in part.choices:
            i, texts[choice.index] = choice.index, texts[choice.index] + choice.text
            if choice.logprobs is not None:
                tokens[i] += choice.logprobs.tokens
                chosen[i] += choice.logprobs.token_logprobs
                likeliest[i] += choice.logprobs.top_logprobs
                offsets[i] += choice.logprobs.text_offset
    assert usage.completion_tokens == 6 and usage.prompt_tokens_details.cached_tokens == 0
    for i, text in enumerate(texts):
        ids, count = TOKENIZER(prompts[i // 2]).input_ids, len(tokens[i])
        assert text.startswith(prompts[i // 2]) and "".join(tokens[i]) == text and count == len(ids) + 1
        assert offsets[i] == [len("".join(tokens[i][:k])) for k in range(count)]
        assert chosen[i][0] is None is likeliest[i][0]
        for own, best in zip(chosen[i][1:], likeliest[i][1:], strict=True):
            assert len(best) == 2 and max(best.values()) >= own
        assert chosen[i] == pytest.approx(chosen[i // 2 * 2], abs=1e-4)
    start = len(TOKENIZER(PROMPT).input_ids)
    assert tokens[0][start:-1] == first.logprobs.tokens
    assert chosen[0][start:-1] == pytest.approx(first.logprobs.token_logprobs, abs=1e-4)
    assert chosen[2][1:start] == pytest.approx(chosen[0][1:start], abs=1e-4)
    again = client.completions.create(**{**OPTIONS, "logprobs": None}, echo=True)
    assert again.usage.prompt_tokens_details.cached_tokens == (start - 1) // 16 * 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_is_scored(client: openai.OpenAI, stream: bool) -> None:
    asked = ask(client, stream, echo=True, max_tokens=1)
    alone = ask(client, stream, echo=True, max_tokens=0)
    assert alone.text == PROMPT and alone.num_new == 0 and alone.reason == "length"
    assert alone.tokens == asked.tokens[:-1] and alone.offsets == asked.offsets[:-1]
    assert alone.chosen[1:] == pytest.approx(asked.chosen[1:-1], abs=1e-4)
    with pytest.raises(openai.BadRequestError, match="max_tokens must be an integer of at least 1, got 0"):
        ask(client, stream, max_tokens=0)


def test_an_echo_begins_behind_what_texts_begin_with() -> None:
    tokens = TOKENIZER("import os", add_special_tokens=False).input_ids
    whole = Echo.of(TOKENIZER, [0, *tokens], "import os")
    assert whole.offsets == [0, *Echo.of(TOKENIZER, tokens, "import os").offsets]
    assert whole.offsets[:2] == [0, 0] and whole.offsets[-1] < len("import os")


def entries(tokenizer: Any, tokens: list[int]) -> list[dict[str, Any]]:
    logprobs = [LogProb(-1.0, (token,), (-1.0,)) for token in tokens]
    content: list[dict[str, Any]] = chat_logprobs(tokenizer, tokens, logprobs)["content"]
    assert [x["top_logprobs"][0]["bytes"] for x in content] == [x["bytes"] for x in content]
    json.dumps(content)
    return content


@given(text=st.text("ab ä€😀\n", max_size=12), num_at_once=st.sampled_from([1, 3, 100]))
def test_parts_of_characters_have_their_bytes_and_the_offset_of_the_character(
    text: str, num_at_once: int
) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    parts = [bytes(x["bytes"]) for x in entries(TOKENIZER, tokens)]
    assert b"".join(parts) == text.encode()
    stream = TextStream(TOKENIZER, [])
    for start in range(0, len(tokens), num_at_once):
        stream.feed(tokens[start : start + num_at_once])
    assert stream.offsets == [len(b"".join(parts[:i]).decode("utf-8", "ignore")) for i in range(len(parts))]


def test_parts_of_characters_of_byte_fallback_have_their_bytes() -> None:
    vocabulary = {"<unk>": 0, "▁a": 1, "�": 2} | {f"<0x{x:02X}>": 3 + x for x in range(256)}
    backend = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokens = [1, 2, *(3 + x for x in "€".encode())]
    assert [bytes(x["bytes"]) for x in entries(tokenizer, tokens)] == [
        b" a",
        "\ufffd".encode(),
        b"\xe2",
        b"\x82",
        b"\xac",
    ]


def test_parts_of_characters_that_are_likeliest_together_keep_their_names_apart() -> None:
    parts = TOKENIZER("€", add_special_tokens=False).input_ids
    assert len(parts) == 3
    logprobs = [LogProb(-1.0, tuple(parts), (-1.0, -2.0, -3.0))]
    shown = text_logprobs(TOKENIZER, parts[:1], logprobs, [0])
    assert shown["tokens"] == [r"bytes:\xe2"]
    assert shown["top_logprobs"] == [
        {r"bytes:\xe2": -1.0, r"bytes:\x82": -2.0, r"bytes:\xac": -3.0},
    ]
