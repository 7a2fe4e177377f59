"""What a chat asks for reaches the model's chat template, or is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from oracles.serving import TEMPLATE, Served

from kvloom.errors import ArgumentError
from kvloom.serving.protocol.messages import Chat
from kvloom.serving.protocol.wanted import Wanted

READS_ALL = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}no thoughts\n{% endif %}"
    "{% for m in messages %}# {{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}: "
    "{% if m.reasoning_content is string and loop.last %}{{ m.reasoning_content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.path }})"
    "{% endfor %}{{ m['content'] }}\n{% endfor %}"
)
DROPS_OTHER_ROLES = (
    "{% for m in messages %}{% if m.role in ('user', 'system') %}{{ m.content }}\n"
    "{% elif m.tool_calls %}{{ m.tool_calls | tojson }}{% elif m.role == 'assistant' %}{{ m | tojson }}"
    "{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "list files"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/tmp"}'}}
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}


def ask(server: Served, **fields: Any) -> tuple[int, str]:
    """Status, and the error or the text of an answer of one token."""
    body = {"messages": [USER], "max_tokens": 1, **fields}
    status, answer = server.send("POST", "/v1/chat/completions", json.dumps(body).encode())
    read = json.loads(answer)
    return status, read["error"]["message"] if "error" in read else read["choices"][0]["message"]["content"]


def rendered(server: Served, **fields: Any) -> str:
    """The text that the template makes of a request that is not refused."""
    tokenizer = server.session.tokenizer
    chat = Chat.of(json.loads(json.dumps(fields)))
    chat.expect_read(tokenizer)
    return str(tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False, **chat.options))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [TOOL]}, "tools must be left out, as the model's chat template does not read it"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking must be left out"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking must be left out"),
        ({"messages": [{**USER, "name": "ada"}]}, "messages[0].name must be left out"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages[1].tool_calls must be"),
        (
            {"max_completion_tokens": 2},
            "max_tokens must be left out beside max_completion_tokens of 2, got 1",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options must be left out where stream is not"),
        ({"stream_options": {}, "stream": False}, "stream_options must be left out where stream is not"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation must be"),
    ],
)
def test_what_the_template_or_the_answer_would_leave_out_is_named(
    server: Served, fields: dict[str, Any], words: str
) -> None:
    status, message = ask(server, **fields)
    assert status == 400 and words in message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "messages[0].content must be a text, or parts of type 'text', got none"),
        ({"role": "user", "content": None}, "messages[0].content must be a text"),
        ({"role": "user", "content": []}, "messages[0].content must be a text"),
        (
            {"role": "user", "content": 3},
            "messages[0].content must be a text, or parts of type 'text', got 3",
        ),
        ({"role": "assistant"}, "messages[0].content must be a text"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content must be a text"),
        (
            {**USER, "image_url": {"url": "x"}},
            "messages[0] must have fields that are supported, got 'image_url'",
        ),
        ({**USER, "input_audio": {"data": ""}}, "got 'input_audio'"),
        ({**USER, "refusal": "no"}, "got 'refusal'"),
        ({**USER, "name": 3}, "messages[0].name must be a string, got 3"),
        ({**USER, "tool_calls": [CALL]}, "messages[0].tool_calls must be in messages of role 'assistant'"),
        ({**USER, "tool_call_id": "call_1"}, "messages[0].tool_call_id must be in messages of role 'tool'"),
        (
            {**USER, "reasoning_content": "hm"},
            "messages[0].reasoning_content must be in messages of role 'assistant' alone",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}],
            },
            "messages[0].content[1] must be a part of type 'text', got 'image_url'",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "got 'input_audio'"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0] must be a part of type 'text', got 'x'"),
        (
            {"role": "user", "content": [{"type": "text", "text": 1}]},
            "content[0] must have a type and a text",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "image_url": "y"}]},
            "messages[0].content[0] must have a type and a text alone",
        ),
        ({"role": "assistant", "tool_calls": 3}, "messages[0].tool_calls must be a list, got 3"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0] must have a function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "ls", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments must be a JSON object, got '{'",
        ),
        ({"role": 3, "content": "x"}, "messages[0] must be an object with a role"),
        ("hello", "messages[0] must be an object with a role, got 'hello'"),
    ],
)
def test_a_message_that_is_none_is_named_with_its_place(
    server: Served, message: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.session.tokenizer, "chat_template", READS_ALL)
    status, said = ask(server, messages=[message])
    assert status == 400 and words in said


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": {}}, None),
        ({"tools": "ls"}, "tools must be a list, got 'ls'"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0] must have type 'function' and a function with a name",
        ),
        ({"tools": [{**TOOL, "function": {}}]}, "tools[0] must have type 'function'"),
        (
            {"tools": [{"type": "function", "function": {"name": "ls", "strict": True}}]},
            "tools[0].function.strict must be left out unless tool_choice is 'required' or",
        ),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs must be an object with"),
        ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs must be an object with"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs must be an object with"),
        ({"max_completion_tokens": 1}, None),
        ({"stream_options": None}, None),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
        ({"tools": []}, None),
    ],
)
def test_tools_and_options_are_checked(server: Served, fields: dict[str, Any], words: str | None) -> None:
    status, message = ask(server, **fields)
    assert (status == 200) if words is None else (status == 400 and words in message)


def test_a_template_that_reads_a_field_gets_it(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.session.tokenizer, "chat_template", READS_ALL)
    said = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [CALL]}
    messages = [
        {"role": "user", "name": "ada", "content": [{"type": "text", "text": x} for x in ("list", "files")]},
        said,
        {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
        {"role": "assistant", "content": "one file", "reasoning_content": "hm "},
    ]
    text = "# user (ada): list files\n# assistant: ls(/tmp)\n# tool: a.py\n# assistant: hm one file\n"
    assert rendered(server, messages=messages) == text
    assert rendered(server, messages=[USER], tools=[TOOL]) == "tool ls\n# user: list files\n"
    for thinking, first in ((True, ""), (False, "no thoughts\n")):
        options = {"enable_thinking": thinking}
        assert (
            rendered(server, messages=[USER], chat_template_kwargs=options) == f"{first}# user: list files\n"
        )
    both = [USER, {**said, "content": "I look. "}]
    assert rendered(server, messages=both).endswith("# assistant: ls(/tmp)I look. \n")


def test_a_role_that_the_template_skips_is_refused(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.session.tokenizer, "chat_template", DROPS_OTHER_ROLES)
    with pytest.raises(ArgumentError, match=r"messages\[1\].content must be left out.* role is 'developer'"):
        rendered(server, messages=[USER, {"role": "developer", "content": "be brief"}])
    # What the model said comes back as the template has it.
    answered = {"role": "assistant", "content": "files", "reasoning_content": "hm"}
    calling = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    assert '"files"' in rendered(server, messages=[USER, answered])
    assert "I look" not in rendered(server, messages=[USER, calling])


def test_a_message_of_an_answer_may_be_sent_back(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "import os\n",
        "fields": {
            "thinking": {"open": "import ", "close": "\n", "content": "text"},
            "content": {"content": "text"},
        },
    }
    with server.client() as client:
        options: dict[str, Any] = {"model": "bundled", "max_tokens": 4}
        for response_template in (None, template):
            monkeypatch.setattr(
                server.session.tokenizer, "response_template", response_template, raising=False
            )
            messages: list[Any] = [USER]
            message = client.chat.completions.create(messages=messages, **options).choices[0].message
            assert hasattr(message, "reasoning_content") is (response_template is not None)
            messages += [message, USER]
            assert client.chat.completions.create(messages=messages, **options).choices
        with pytest.raises(openai.BadRequestError, match="tools must be left out"):
            client.chat.completions.create(messages=[USER], tools=[TOOL], **options)  # type: ignore[list-item]


def test_tools_may_have_a_template_of_their_own(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = {"default": TEMPLATE, "tool_use": READS_ALL}
    monkeypatch.setattr(server.session.tokenizer, "chat_template", templates)
    assert rendered(server, messages=[USER], tools=[TOOL]).startswith("tool ls\n")
    assert rendered(server, messages=[USER]) == "# user: list files\n"


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for", "{{ messages.x.y }}"])
def test_what_a_template_raises_is_a_400(
    server: Served, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.session.tokenizer, "chat_template", template)
    status, message = ask(server)
    assert status == 400 and message.startswith("messages must be what the model's chat template takes")


def test_both_names_of_the_length_are_read() -> None:
    def wanted(**fields: int) -> int | None:
        return Wanted.of({"messages": [], **fields}, "chat", None).max_tokens

    assert wanted() is None
    assert wanted(max_tokens=3) == wanted(max_completion_tokens=3) == 3
    assert wanted(max_tokens=3, max_completion_tokens=3) == 3
