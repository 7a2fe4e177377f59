"""Answers of a JSON schema or another grammar: each that ends is one, in any company."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pytest
import torch
from oracles.serving import PROMPT, Served, served
from pydantic import BaseModel, Field

import kvloom.serving
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import load_model
from kvloom.models import bundled_model_path
from kvloom.serving.protocol.structured import Grammar, Grammars, json_grammar

TOKENIZER = load_model(bundled_model_path(), progress=False)[1]
EOS = 1
OPTIONS: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "max_tokens": 300}
CHAT: dict[str, Any] = {"model": "bundled", "messages": [{"role": "user", "content": "list files"}]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "bb", None, 3]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "leaf": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "pair": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
            "required": ["left", "right"],
            "additionalProperties": False,
        },
    },
    "anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/pair"}],
}
DATE = {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])$"}
CONST = {"type": "array", "prefixItems": [{"const": 'say "no"\n€'}, {"type": "null"}], "items": False}
SCHEMAS = [PERSON, TREE, DATE, {**CONST, "minItems": 2}]


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def ask(client: openai.OpenAI, schema: dict[str, Any] | None = None, **fields: Any) -> str:
    extra = {} if schema is None else {"response_format": format_of(schema)}
    choice = client.completions.create(**{**OPTIONS, **fields, "extra_body": extra}).choices[0]
    assert schema is None or choice.finish_reason == "stop"
    return choice.text


def test_answers_of_several_schemas_beside_free_ones_are_all_valid(client: openai.OpenAI) -> None:
    free = ask(client, max_tokens=40)
    cases = [(schema, t) for schema in SCHEMAS for t in (0.0, 1.0, 2.0)]
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(ask, client, schema, temperature=t, seed=i) for i, (schema, t) in enumerate(cases)
        ]
        beside = [pool.submit(ask, client, max_tokens=40) for _ in range(3)]
    texts = [x.result() for x in asked]
    for (schema, _), text in zip(cases, texts, strict=True):
        jsonschema.validate(json.loads(text), schema)
    assert {x.result() for x in beside} == {free}
    # In company as alone.
    for i in (0, 2, 5):
        assert ask(client, cases[i][0], temperature=cases[i][1], seed=i) == texts[i]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_gets_json(client: openai.OpenAI, stream: bool) -> None:
    options = {**CHAT, "max_tokens": 300, "temperature": 1.5, "seed": 3}
    answer = client.chat.completions.create(**options, response_format=format_of(PERSON), stream=stream)  # type: ignore[call-overload]
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text, reason = "".join(x.delta.content or "" for x in chunks), chunks[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    jsonschema.validate(json.loads(text), PERSON)
    assert reason == "stop"


def test_any_object_is_one(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            **CHAT, max_tokens=100, temperature=1, seed=seed, response_format={"type": "json_object"}
        )
        choice = answer.choices[0]
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)
        else:
            assert (choice.message.content or "").startswith("{")


class Person(BaseModel):
    """What a client makes a schema of."""

    name: str = Field(max_length=6)
    kind: Literal["x", "y"]
    scores: list[bool] = Field(max_length=2)


def test_the_clients_own_parsing_gets_its_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**CHAT, max_tokens=300, response_format=Person)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Person) and len(parsed.name) <= 6 and parsed.kind in ("x", "y")


def test_an_answer_that_has_no_room_is_cut_and_says_so(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        **{**OPTIONS, "max_tokens": 3, "extra_body": {"response_format": format_of(PERSON)}}
    )
    assert answer.choices[0].finish_reason == "length"


def test_several_answers_have_a_grammar_each(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        **{
            **OPTIONS,
            "prompt": [PROMPT, "import sys\n"],
            "extra_body": {"response_format": format_of(PERSON)},
        },
        n=3,
        temperature=1.5,
        seed=1,
    )
    assert len(answer.choices) == 6 and len({choice.text for choice in answer.choices}) > 1
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.text), PERSON)


def test_a_structure_outlives_a_preemption() -> None:
    prompts = [f"# {number}\n{PROMPT}" for number in range(4)]
    schema = {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 1}
    with served() as roomy, roomy.client() as client:
        apart = [ask(client, schema, prompt=prompt, max_tokens=120) for prompt in prompts]
    with served(config={"num_blocks": 12}) as narrow, narrow.client() as client:
        with ThreadPoolExecutor(4) as pool:
            together = [pool.submit(ask, client, schema, prompt=x, max_tokens=120) for x in prompts]
        assert [x.result() for x in together] == apart
        assert narrow.session.report().preemptions > 0
    for text in apart:
        jsonschema.validate(json.loads(text), schema)


def test_prefixes_are_found_whatever_an_answer_has_to_be(client: openai.OpenAI) -> None:
    prompt = "# found\n" + PROMPT
    found = []
    for schema in (None, PERSON, TREE):
        extra = {} if schema is None else {"response_format": format_of(schema)}
        asked = {**OPTIONS, "prompt": prompt, "max_tokens": 2, "extra_body": extra}
        usage = client.completions.create(**asked).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        found.append(usage.prompt_tokens_details.cached_tokens)
    assert found == [0, *[(len(TOKENIZER(prompt).input_ids) - 1) // 16 * 16] * 2]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"choice": ["yes", 'no\n"x" €', "ye"]}, 'yes|no\n"x" €|ye'),
        ({"regex": "[a-c]{3,5}X"}, "[a-c]{3,5}X"),
        ({"json": DATE}, '"20[0-9]{2}-(0[1-9]|1[0-2])"'),
        ({"json": {"const": 1}, "regex": None}, "1"),
    ],
)
def test_vllms_structures_are_read(
    client: openai.OpenAI, asked: dict[str, Any], pattern: str, temperature: float
) -> None:
    answer = client.completions.create(
        **OPTIONS, temperature=temperature, seed=2, extra_body={"structured_outputs": asked}
    ).choices[0]
    assert re.fullmatch(pattern, answer.text) and answer.finish_reason == "stop"


@pytest.mark.parametrize("schema", SCHEMAS)
def test_whatever_is_drawn_is_valid(schema: dict[str, Any]) -> None:
    """Without a model: each token that is let through is drawn as often as any other."""
    grammars, draw = Grammars(TOKENIZER, [EOS], 2100), torch.Generator().manual_seed(0)
    structure = json_grammar("schema", schema)
    matcher, prompt = grammars.matcher(structure), [7, 8, 9]
    for _ in range(12):
        grammar, tokens = Grammar(structure, matcher.deep_copy(), len(prompt), [EOS]), list(prompt)
        while tokens[-1] != EOS:
            scores = grammar(torch.tensor([tokens]), torch.zeros(1, 2100))
            assert scores.isfinite().any() and not scores[0, len(TOKENIZER) :].isfinite().any()
            tokens.append(int(torch.multinomial(scores[0].softmax(0), 1, generator=draw)))
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens[3:-1])), schema)


def test_fewer_logits_than_tokens_are_masked_as_they_are() -> None:
    structure = json_grammar("schema", {"const": 5})
    grammar = Grammar(structure, Grammars(TOKENIZER, [EOS], 100).matcher(structure), 1, [EOS])
    scores = grammar(torch.tensor([[7]]), torch.zeros(1, 100))
    assert [TOKENIZER.decode([i]) for i in scores[0].isfinite().nonzero().flatten().tolist()] == ["5"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format must have type 'text', 'json_object', or"),
        ({"response_format": "json"}, "response_format must have type"),
        ({"response_format": {"type": "json_schema"}}, "response_format must have type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema must be an object, got None",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema must be an object with a name and a schema",
        ),
        ({"response_format": format_of({"not": {}})}, 'got one that is not: Unimplemented keys: ["not"]'),
        ({"response_format": format_of({"not": {}, "x-guidance": {"lenient": True}})}, 'keys: ["not"]'),
        ({"response_format": format_of({"type": "nonsense"})}, "Invalid type: nonsense"),
        ({"response_format": format_of({"$ref": "http://localhost/x"})}, "is not present in a registry"),
        ({"response_format": format_of({"enum": []})}, "response_format.json_schema.schema must be one that"),
        ({"response_format": format_of(PERSON), "min_tokens": 2}, "min_tokens must be left out beside"),
        ({"response_format": format_of(PERSON), "ignore_eos": True}, "ignore_eos must be left out beside"),
        ({"structured_outputs": {}}, "structured_outputs must have one of json"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs must have one of json"),
        ({"structured_outputs": {"json": {}, "regex": "x"}}, "structured_outputs must have one of json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs must have one of json"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs must have one of json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex must be one that is supported"),
        (
            {"structured_outputs": {"regex": "x"}, "response_format": {"type": "json_object"}},
            "response_format must be left out beside structured_outputs",
        ),
    ],
)
def test_what_cannot_be_a_structure_is_named(
    server: Served, client: openai.OpenAI, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**{**OPTIONS, "extra_body": fields})
    assert words in str(error.value)
    assert server.session.alive and not server.session.readers and server.session.num_placed == 0


def test_a_schema_that_is_too_deep_is_a_sentence(server: Served) -> None:
    schema = b'{"items":' * 700 + b"{}" + b"}" * 700
    body = b'{"prompt": "a", "structured_outputs": {"json": ' + schema + b"}}"
    status, answer = server.send("POST", "/v1/completions", body)
    assert status == 400 and b"structured_outputs.json must be a JSON schema" in answer


def test_a_grammar_that_is_too_much_ends_its_request_alone(server: Served, client: openai.OpenAI) -> None:
    asked = {"structured_outputs": {"regex": "(a{1000}){1000}"}}
    free = ask(client, max_tokens=20)
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(ask, client, max_tokens=20)
        with pytest.raises(openai.BadRequestError, match="regex has become too much to follow: lexer error"):
            client.completions.create(**{**OPTIONS, "extra_body": asked})
        assert beside.result() == free
    with pytest.raises(openai.APIError, match="regex has become too much to follow"):
        list(client.completions.create(**{**OPTIONS, "extra_body": asked}, stream=True))
    server.until(running=0, active=0)
    assert server.session.alive and not server.session.readers


def test_without_its_package_or_an_end_token_it_is_refused(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ArgumentError, match="schema must be left out, as the model's generation config has no"
    ):
        Grammars(TOKENIZER, [], 2048).matcher(json_grammar("schema", {}))
    monkeypatch.setattr(kvloom.serving, "find_spec", lambda name: None)
    for asked in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "x"}}):
        with pytest.raises(openai.BadRequestError, match="this needs llguidance: pip install llguidance"):
            client.completions.create(**{**OPTIONS, "extra_body": asked})
