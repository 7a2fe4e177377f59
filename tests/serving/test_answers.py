"""What OpenAI's own client gets: the tokens of ``generate``, whole and in pieces."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from oracles.batching import alone
from oracles.serving import PROMPT, Served

from kvloom.integrations.transformers import KVCache, load_model
from kvloom.models import bundled_model_path


def expected(text: str, new_tokens: int) -> str:
    """What ``generate`` gives with a cache of the same kind, from a model of its own."""
    model, tokenizer = load_model(bundled_model_path(), progress=False)
    cache = KVCache.for_model(model.float(), kv="int8")
    return str(tokenizer.decode(alone(model, tokenizer(text).input_ids, new_tokens, cache)))


def text_of(stream: Any) -> str:
    return "".join(choice.text for chunk in stream for choice in chunk.choices)


def test_a_completion_has_the_tokens_of_generate_from_int8_pages(client: openai.OpenAI) -> None:
    text = expected(PROMPT, 12)
    options: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "max_tokens": 12}
    whole = client.completions.create(**options)
    assert whole.choices[0].text == text and whole.choices[0].finish_reason == "length"
    assert text_of(client.completions.create(**options, stream=True)) == text
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(client.completions.create, **options) for _ in range(8)]
    assert {answer.result().choices[0].text for answer in answers} == {text}


def test_usage_counts_tokens_that_were_found(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "bundled", "prompt": "# usage\n" + PROMPT, "max_tokens": 4}
    first, second = (client.completions.create(**options).usage for _ in range(2))
    assert first is not None and second is not None
    assert second.prompt_tokens == first.prompt_tokens > 32 and second.completion_tokens == 4
    assert second.prompt_tokens_details is not None
    found = second.prompt_tokens_details.cached_tokens
    assert found is not None and found % 16 == 0 and 0 <= second.prompt_tokens - found <= 16
    *_, last = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert last.usage == second and last.choices == []


def test_usage_is_counted_in_each_chunk_for_those_who_ask(client: openai.OpenAI) -> None:
    """As load generators do, which vLLM's servers have this for."""
    always = {"include_usage": True, "continuous_usage_stats": True}
    options: dict[str, Any] = {"model": "bundled", "stream": True, "stream_options": always}
    chat = [{"role": "user", "content": "list files"}]
    for chunks in (
        [*client.completions.create(**options, prompt=PROMPT, max_tokens=4)],
        [*client.chat.completions.create(**options, messages=chat, max_completion_tokens=4)],
    ):
        usages: list[Any] = [chunk.usage for chunk in chunks]
        counts = [usage.completion_tokens for usage in usages]
        assert counts == sorted(counts) and counts[-1] == 4 and len(set(counts)) == 1 + 4 - (counts[0] == 1)
        assert len({usage.prompt_tokens for usage in usages}) == 1


def test_chats_go_through_the_template(client: openai.OpenAI) -> None:
    text = expected("# user: list files\nimport os\n", 10)
    options: dict[str, Any] = {
        "model": "bundled",
        "messages": [{"role": "user", "content": "list files"}],
        "max_completion_tokens": 10,
    }
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == text and whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_model_without_a_template_says_what_to_do(
    client: openai.OpenAI, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.session.tokenizer, "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="serve --chat-template F"):
        client.chat.completions.create(model="bundled", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_comes_from_a_stop_on(client: openai.OpenAI, server: Served, stream: bool) -> None:
    options: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "max_tokens": 40}
    text = client.completions.create(**options).choices[0].text
    stop = text[20:26]
    answer = client.completions.create(**options, stop=["never in a text", stop], stream=stream)
    if stream:
        chunks = list(answer)
        assert chunks[-1].choices[0].finish_reason == "stop"
        given = "".join(chunk.choices[0].text for chunk in chunks)
    else:
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens < 40
        given = answer.choices[0].text
    assert given == text[: text.index(stop)]
    server.until(active=0, running=0)


def test_each_request_is_sampled_by_its_own_seed_whatever_runs_beside_it(client: openai.OpenAI) -> None:
    def ask(seed: int, temperature: float = 1.0) -> str:
        answer = client.completions.create(
            model="bundled", prompt=PROMPT, max_tokens=12, seed=seed, temperature=temperature, top_p=0.9
        )
        return answer.choices[0].text

    apart = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        beside = [pool.submit(ask, seed % 4) for seed in range(8)]
        greedy = pool.submit(ask, 0, 0.0)
    assert [x.result() for x in beside] == apart * 2
    assert len(set(apart)) == 4 and greedy.result() not in apart


def test_several_answers_share_the_prompt_and_differ(client: openai.OpenAI, server: Served) -> None:
    before = server.session.report()
    options: dict[str, Any] = {"model": "bundled", "prompt": "# several\n" + PROMPT, "max_tokens": 8}
    answer = client.completions.create(**options, n=3, temperature=1.0, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage is not None and answer.usage.completion_tokens == 24
    found = server.session.report().tokens_found - before.tokens_found
    assert found >= 2 * (answer.usage.prompt_tokens - 16)
    streamed = ["", "", ""]
    for chunk in client.completions.create(**options, n=3, temperature=1.0, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]


def test_logprobs_are_the_models_own(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "max_tokens": 5}
    greedy = client.completions.create(**options, logprobs=3).choices[0].logprobs
    hot = client.completions.create(**options, logprobs=3, temperature=2.0, seed=1).choices[0].logprobs
    assert greedy is not None and hot is not None and greedy.token_logprobs and hot.top_logprobs
    assert greedy.top_logprobs and greedy.top_logprobs[0] == pytest.approx(hot.top_logprobs[0], abs=1e-3)
    best = [max(top.values()) for top in greedy.top_logprobs]
    assert greedy.token_logprobs == pytest.approx(best) and all(len(x) == 3 for x in greedy.top_logprobs)
    assert greedy.text_offset and greedy.text_offset[0] == 0 and len(greedy.text_offset) == 5
    chat = client.chat.completions.create(
        model="bundled",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 3
    assert [x.logprob for x in logprobs.content] == [x.top_logprobs[0].logprob for x in logprobs.content]
    assert "".join(x.token for x in logprobs.content) == chat.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_tool_calls_are_told_from_the_text(
    client: openai.OpenAI, server: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = {  # "thinking" is what every version of transformers knows it as
        "defaults": {"role": "assistant"},
        "start_anchor": "import os\n",
        "fields": {
            "thinking": {"open": "import ", "close": "\n", "content": "text"},
            "content": {"content": "text"},
        },
    }
    options: dict[str, Any] = {
        "model": "bundled",
        "messages": [{"role": "user", "content": "list files"}],
        "max_tokens": 4,
    }
    text = client.chat.completions.create(**options).choices[0].message.content
    assert text and text.startswith("import sys\nimport")
    monkeypatch.setattr(server.session.tokenizer, "response_template", template, raising=False)
    answer = client.chat.completions.create(**options, stream=stream)
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    content = "".join(part.content or "" for part in parts)
    assert reasoning.startswith("sys") and "sys" not in content


def test_the_model_is_listed_and_another_is_not_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bundled"]
    with pytest.raises(openai.NotFoundError, match="model must be 'bundled'"):
        client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 3}, "temperature must be a number from 0 to 2, got 3"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": float("nan")}, "top_p must be a number from 0 to 1"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"n": 17}, "n must be an integer of at least 1 and at most 16"),
        ({"seed": True}, "seed must be an integer"),
        ({"stop": ["a"] * 5}, "stop must be at most 4 texts"),
        ({"stop": [""]}, "stop must be texts of 1 to 1000 characters"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": 100_000}, "max_tokens must be at most 4096"),
        ({"best_of": 2}, "best_of must be left out"),
        ({"logprobs": 6}, "logprobs must be an integer of at least 0 and at most 5"),
        ({"nonsense": 1}, "'nonsense' is no field that is supported"),
        ({"cache_salt": 3}, "cache_salt must be a string"),
        (
            {"stream_options": {"x": 1}},
            "stream_options must be an object of include_usage, continuous_usage_stats",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats must be left out where include_usage is not true",
        ),
        ({"prompt": ""}, "the prompt must be at least one token"),
        ({"prompt": [1, -1]}, "the prompt must be token ids from 0 to 2047"),
        ({"prompt": [1, 2049]}, "the model's embedding has 2048 rows, got 2049"),
        ({"prompt": [1, "a"]}, "prompt must be a text, a list of token ids, or a list of those"),
        ({"prompt": [3] * 5000}, "the prompt must be at most"),
        ({"prompt": "\ud800"}, "the request must be JSON in UTF-8"),
    ],
)
def test_what_is_not_served_is_a_sentence(server: Served, change: dict[str, Any], words: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1, **change}).encode()
    status, answer = server.send("POST", "/v1/completions", body)
    assert status == 400 and words in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"null", b"[" * 100_000, b'{"messages": []}', b'{"messages": [{}]}', b"\xff"]
)
def test_what_is_no_request_is_a_sentence(server: Served, body: bytes) -> None:
    status, answer = server.send("POST", "/v1/chat/completions", body)
    assert status == 400 and json.loads(answer)["error"]["message"]
    assert server.session.alive
