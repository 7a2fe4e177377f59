"""``/v1/responses`` for OpenAI's own client: the text of a chat, whole and in events; nothing is stored."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from oracles.serving import TEMPLATE, Served, served
from pydantic import BaseModel, Field

from kvloom.serving.endpoints.response_items import Output
from kvloom.serving.protocol.readers import ReasoningText, ToolCall
from kvloom.serving.protocol.response_request import chat_of

OPTIONS: dict[str, Any] = {"model": "bundled", "input": "list files", "max_output_tokens": 12}
USER = {"role": "user", "content": "list files"}
SEES_ALL = (
    "{% for m in messages %}# {{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}) "
    "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}import os\n{% endif %}"
)
THINKING = {
    "defaults": {"role": "assistant"},
    "start_anchor": "import os\n",
    "fields": {
        "thinking": {"open": "import ", "close": "\n", "content": "text"},
        "content": {"content": "text"},
    },
}


def chat_text(client: openai.OpenAI, messages: list[Any], **fields: Any) -> str:
    fields = {"max_tokens": 12, **fields}
    answer = client.chat.completions.create(model="bundled", messages=messages, **fields)
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.5, "top_p": 0.9, "extra_body": {"seed": 4}}])
def test_a_response_has_the_text_of_the_chat(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    text = chat_text(client, [USER], **fields)
    response = client.responses.create(**OPTIONS, **fields)
    assert response.output_text == text and response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.object, response.model, response.store) == ("response", "bundled", False)
    assert response.temperature == fields.get("temperature", 0)
    brief = client.responses.create(**OPTIONS, instructions="be brief", **fields)
    messages = [{"role": "system", "content": "be brief"}, USER]
    assert brief.output_text == chat_text(client, messages, **fields) and brief.instructions == "be brief"


def test_an_answer_that_ends_is_completed(client: openai.OpenAI) -> None:
    fields = {"logit_bias": {"1": 100}, "min_tokens": 3}
    response = client.responses.create(**OPTIONS, extra_body=fields)
    assert response.status == "completed" and response.incomplete_details is None
    assert response.usage is not None and response.usage.output_tokens == 4
    empty = client.responses.create(**OPTIONS, extra_body={"logit_bias": {"1": 100}})
    assert empty.output_text == "" and [item.type for item in empty.output] == ["message"]


def test_usage_is_that_of_the_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "usage " * 40}]
    chats = [
        client.chat.completions.create(model="bundled", messages=messages, max_tokens=12).usage  # type: ignore[arg-type]
        for _ in range(2)
    ]
    usage = client.responses.create(**{**OPTIONS, "input": messages}).usage
    assert usage is not None and chats[1] is not None and chats[1].prompt_tokens_details is not None
    assert usage.input_tokens == chats[1].prompt_tokens and usage.output_tokens == 12
    assert usage.total_tokens == chats[1].total_tokens
    assert usage.input_tokens_details.cached_tokens == chats[1].prompt_tokens_details.cached_tokens > 0


def test_a_stream_is_the_response_in_events(client: openai.OpenAI) -> None:
    whole = client.responses.create(**OPTIONS)
    events = [*client.responses.create(**OPTIONS, stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert {*kinds[4:-4]} == {"response.output_text.delta"}
    last: Any = events[-1]
    assert "".join(getattr(event, "delta", "") for event in events) == whole.output_text
    assert last.response.output_text == whole.output_text and last.response.usage == whole.usage
    done: Any = events[-4]
    assert done.text == whole.output_text


def test_the_clients_own_stream_and_parsing_follow_it(client: openai.OpenAI) -> None:
    class File(BaseModel):
        name: str = Field(max_length=6)
        kind: Literal["file", "folder"]

    options = {**OPTIONS, "max_output_tokens": 200}
    parsed = client.responses.parse(**options, text_format=File)
    assert isinstance(parsed.output_parsed, File) and parsed.status == "completed"
    with client.responses.stream(**options, text_format=File) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed and "".join(deltas) == parsed.output_text
    any_object = client.responses.create(**options, text={"format": {"type": "json_object"}})
    assert any_object.output_text.startswith("{")


def test_an_output_may_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(**OPTIONS)
    asked: list[Any] = [USER, *first.output, {"role": "user", "content": "and more"}]
    second = client.responses.create(**{**OPTIONS, "input": asked})
    messages = [USER, {"role": "assistant", "content": first.output_text}]
    assert second.output_text == chat_text(client, [*messages, {"role": "user", "content": "and more"}])
    parts = [{"type": "input_text", "text": "list files"}]
    third = client.responses.create(**{**OPTIONS, "input": [{"role": "user", "content": parts}]})
    assert third.output_text == first.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_an_item_before_the_message_and_comes_back(
    client: openai.OpenAI, server: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.session.tokenizer, "response_template", THINKING, raising=False)
    drawn: dict[str, Any] = {"temperature": 1, "extra_body": {"seed": 2}}  # one import, and then none
    options: dict[str, Any] = {"model": "bundled", "messages": [USER], "max_tokens": 12, **drawn}
    message: Any = client.chat.completions.create(**options).choices[0].message
    answer: Any = client.responses.create(**OPTIONS, **drawn, stream=stream)
    response = [*answer][-1].response if stream else answer
    assert [item.type for item in response.output][:2] == ["reasoning", "message"]
    assert response.output[0].content[0].text == message.reasoning_content != ""
    assert response.output_text == message.content
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    monkeypatch.setattr(server.session.tokenizer, "chat_template", SEES_ALL)
    sent = [x.model_dump() for x in response.output]
    made = chat_of({"input": [USER, *sent, USER]})["messages"]
    assert [x["role"] for x in made] == ["user", "assistant", "user"]
    assert made[1]["reasoning_content"] == message.reasoning_content
    assert client.responses.create(**{**OPTIONS, "input": [USER, *sent, USER]}).output
    monkeypatch.setattr(server.session.tokenizer, "chat_template", TEMPLATE)


def test_what_a_model_calls_without_tools_is_an_item() -> None:
    """A model may call what it was not offered; the client is told."""
    output = Output()
    events = [
        x for item in (ReasoningText("hm"), "I ", "look.", ToolCall("ls", "{}")) for x in output.add(item)
    ]
    events += output.end(is_whole=True)
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call"]
    assert all(item["status"] == "completed" for item in output.items)
    assert [x["output_index"] for x in events if x["type"].endswith("item.done")] == [0, 1, 2]
    added = [x["item"] for x in events if x["type"] == "response.output_item.added"]
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], ""]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_says_so(stream: bool) -> None:
    with served(max_seconds=0.3) as server, server.client() as client:
        options = {**OPTIONS, "max_output_tokens": 1800, "temperature": 2, "extra_body": {"seed": 3}}
        if stream:
            last: Any = [*client.responses.create(**options, stream=True)][-1]
            assert last.type == "response.failed" and last.response.status == "failed"
            assert last.response.error.message == "the answer took too long"
        else:
            with pytest.raises(openai.APIStatusError, match="the answer took too long") as refused:
                client.responses.create(**options)
            assert refused.value.status_code == 408
        server.until(running=0, active=0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"store": True}, "store must be left out, as it is not supported, got True"),
        ({"previous_response_id": "resp_1"}, "'previous_response_id' is no field that is supported"),
        ({"tools": [{"type": "web_search"}]}, "tools must be left out, as it is not supported"),
        ({"tool_choice": "required"}, "tool_choice must be left out"),
        ({"background": True}, "background must be left out"),
        ({"reasoning": {"effort": "low"}}, "reasoning must be left out"),
        ({"truncation": "auto"}, "truncation must be left out"),
        ({"include": ["reasoning.encrypted_content"]}, "include must be left out"),
        ({"top_logprobs": 2}, "top_logprobs must be left out"),
        ({"max_tokens": 3}, "'max_tokens' is no field that is supported"),
        ({"n": 2}, "'n' is no field that is supported"),
        ({"max_output_tokens": 0}, "max_output_tokens must be an integer of at least 1"),
        ({"max_output_tokens": 9999}, "max_output_tokens must be at most 4096"),
        ({"temperature": 3}, "temperature must be a number from 0 to 2"),
        ({"instructions": 3}, "instructions must be a string"),
        ({"input": None}, "input must be a text, or a list of at least one message"),
        ({"input": []}, "input must be a text, or a list of at least one message"),
        ({"input": ["x"]}, "input[0] must be a message, or the reasoning before one, got 'str'"),
        ({"input": [{"type": "function_call_output"}]}, "input[0] must be a message"),
        ({"input": [{"content": "x"}]}, "input[0] must have a role, got None"),
        ({"input": [{**USER, "name": "ada"}]}, "input[0] must have fields that are supported, got 'name'"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content must be a text or a list of parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0] must be a part of type 'input_text' or 'output_text' or 'text'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "content[0].text must be a string",
        ),
        ({"input": [{"type": "reasoning", "content": []}, USER]}, None),
        (
            {"input": [USER, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}]},
            "input must have a message of the assistant after its reasoning",
        ),
        ({"text": {"verbosity": "low"}}, "text must be an object with a format alone"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format must have type 'text', 'json_object', or"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            "text.format.schema must be one that is supported",
        ),
    ],
)
def test_what_is_not_supported_is_named(server: Served, fields: dict[str, Any], words: str | None) -> None:
    body = json.dumps({**OPTIONS, "max_output_tokens": 1, **fields}).encode()
    status, answer = server.send("POST", "/v1/responses", body)
    assert (status, words) == (200, None) or status == 400
    assert words is None or words in json.loads(answer)["error"]["message"]


def test_nothing_is_kept(client: openai.OpenAI) -> None:
    response = client.responses.create(**OPTIONS)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
