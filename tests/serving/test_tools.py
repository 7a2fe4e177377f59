"""Answers that must be calls of tools: names are those of the request, arguments of its schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from oracles.serving import Served, served

from kvloom.serving.protocol.readers import ToolCall
from kvloom.serving.protocol.structured import Grammars
from kvloom.serving.protocol.tools import CallsText, ForcedCalls

TEMPLATE = (
    "{% for tool in tools or [] %}# tool {{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}import os\n{% endif %}"
)


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, **fields, **({} if parameters is None else {"parameters": parameters})}
    return {"type": "function", "function": function}


FLAGS = {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2}
LS = tool(
    "ls",
    {
        "type": "object",
        "properties": {"path": {"enum": ["/tmp", "."]}, "flags": FLAGS},
        "required": ["path", "flags"],
        "additionalProperties": False,
        "$defs": {"flag": {"enum": ["-l", "-a"]}},
    },
    strict=True,
)
CUT = tool(
    'cut "it"',  # the same definition by another meaning
    {
        "properties": {"flag": {"$ref": "#/$defs/flag"}},
        "required": ["flag"],
        "additionalProperties": False,
        "$defs": {"flag": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
)
NOW = tool("now")
TOOLS = {x["function"]["name"]: x for x in (LS, CUT, NOW)}
OPTIONS: dict[str, Any] = {
    "model": "bundled",
    "messages": [{"role": "user", "content": "list files"}],
    "max_tokens": 900,
    "tools": [*TOOLS.values()],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        running.session.tokenizer.chat_template = TEMPLATE
        yield running


def ask(client: openai.OpenAI, stream: bool = False, **fields: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, reason of the end, and calls of an answer."""
    answer = client.chat.completions.create(**{**OPTIONS, **fields}, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    parts = [choice.delta if stream else choice.message for choice in choices]
    calls = [call.function for part in parts for call in part.tool_calls or []]
    ids = [call.id for part in parts for call in part.tool_calls or []]
    assert len(set(ids)) == len(ids)
    text = "".join(part.content or "" for part in parts)
    return text, choices[-1].finish_reason, [(call.name, call.arguments) for call in calls]


def expect_valid(name: str, arguments: str) -> None:
    schema = TOOLS[name]["function"].get("parameters", {"properties": {}, "additionalProperties": False})
    jsonschema.validate(json.loads(arguments), {"type": "object", **schema})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [*TOOLS])
def test_a_named_function_is_called_with_arguments_of_its_schema(
    client: openai.OpenAI, name: str, stream: bool
) -> None:
    for temperature in (0.0, 1.5):
        text, reason, calls = ask(
            client,
            stream,
            temperature=temperature,
            seed=1,
            tool_choice={"type": "function", "function": {"name": name}},
        )
        assert text == "" and reason == "tool_calls" and [x for x, _ in calls] == [name]
        expect_valid(*calls[0])


@pytest.mark.parametrize(("stream", "seeds"), [(False, [0]), (True, [1, 2])])
def test_where_a_call_is_required_there_are_some(
    client: openai.OpenAI, stream: bool, seeds: list[int]
) -> None:
    seen: set[str] = set()
    for seed in seeds:
        text, reason, calls = ask(client, stream, temperature=2, seed=seed, tool_choice="required")
        assert text == "" and reason == "tool_calls" and 1 <= len(calls) <= 16
        for call in calls:
            expect_valid(*call)
        seen |= {name for name, _ in calls}
        one = ask(client, temperature=2, seed=seed, tool_choice="required", parallel_tool_calls=False)[2]
        assert len(one) == 1
        expect_valid(*one[0])
    assert len(seen) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_has_no_room_is_cut_and_says_so(client: openai.OpenAI, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "ls"}}
    text, reason, calls = ask(client, stream, max_tokens=2, tool_choice=named)
    assert (text, reason) == ("", "length") and calls[0][0] == "ls" and calls[0][1].startswith("{")
    text, reason, calls = ask(client, stream, max_tokens=2, tool_choice="required")
    assert text.startswith("[{") and (reason, calls) == ("length", [])


def test_the_model_decides_where_nothing_is_forced(client: openai.OpenAI) -> None:
    free = {**OPTIONS, "max_tokens": 8, "tools": [CUT, NOW]}
    texts = [
        client.chat.completions.create(**free, **choice).choices[0].message.content
        for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True})
    ]
    assert texts[0] == texts[1] == texts[3] and all(texts)


def test_what_was_called_is_read_as_it_was_written() -> None:
    """Nothing is lost: quotes in names, letters that are not ASCII."""
    calls = ForcedCalls.of({**OPTIONS, "tool_choice": "required"})
    assert calls is not None
    reader = CallsText(calls)
    text = (
        '[{"name": "cut \\"it\\"", "parameters": {"flag": 3}}, {"name": "ls", "parameters": {"path": "€"}}]'
    )
    assert [x for piece in (text[:20], text[20:]) for x in reader.feed(piece)] == []
    assert reader.end() == [ToolCall('cut "it"', '{"flag": 3}'), ToolCall("ls", '{"path": "€"}')]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"tool_choice": "any"},
            "tool_choice must be 'none', 'auto', 'required', or a function with its name",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be 'none', 'auto', 'required', or"),
        ({"tool_choice": {"type": "custom", "function": {"name": "ls"}}}, "tool_choice must be 'none'"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice must name one of the tools, ls, cut \"it\", now, got 'rm'",
        ),
        ({"tool_choice": "required", "tools": []}, "tool_choice must be left out without tools"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos must be left out where tool_choice is"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format must be left out where tool_choice is 'required'",
        ),
        ({"tools": [LS]}, "tools[0].function.strict must be left out unless tool_choice is 'required' or"),
        ({"tools": [NOW], "parallel_tool_calls": False}, "parallel_tool_calls must be left out unless"),
        ({"parallel_tool_calls": 3}, "parallel_tool_calls must be true or false"),
        (
            {"tool_choice": "required", "tools": [tool("x", {"properties": {"y": {"not": {}}}})]},
            'failed to compile JSON schema: Unimplemented keys: ["not"]',
        ),
        (
            {
                "tool_choice": {"type": "function", "function": {"name": "x"}},
                "tools": [NOW, tool("x", {"properties": {"y": {"not": {}}}})],
            },
            "tools[1].function.parameters must be one that is supported",
        ),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 3}}]}, "must be an object"),
    ],
)
def test_what_cannot_be_chosen_is_named(client: openai.OpenAI, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**OPTIONS, "extra_body": fields})
    assert words in str(error.value)


def test_parameters_that_are_too_deep_are_a_sentence(server: Served) -> None:
    parameters = b'{"items":' * 700 + b"{}" + b"}" * 700
    for choice in (b'"required"', b'{"type": "function", "function": {"name": "x"}}'):
        body = (
            b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": ' + choice + b', "tools": '
            b'[{"type": "function", "function": {"name": "x", "parameters": ' + parameters + b"}}]}"
        )
        status, answer = server.send("POST", "/v1/chat/completions", body)
        assert status == 400 and b"recursion" in answer


def test_many_tools_become_a_grammar(server: Served) -> None:
    many = [tool(f"tool_{i}", LS["function"]["parameters"]) for i in range(128)]
    calls = ForcedCalls.of({"tools": many, "tool_choice": "required"})
    assert calls is not None
    grammars: Grammars = server.session.grammars
    matcher = grammars.matcher(calls.structure)
    text = '[{"name": "tool_127", "parameters": {"path": ".", "flags": ["-a"]}}]'
    tokens = server.session.tokenizer(text, add_special_tokens=False).input_ids
    assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
