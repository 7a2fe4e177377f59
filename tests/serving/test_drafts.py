"""A server with drafts gives the answers of one without, and counts what was drafted."""

from __future__ import annotations

import argparse
import io
import json
import re
import urllib.request
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import openai
import pytest
from oracles.serving import Served, serve, served
from serving.test_models import other_model

from kvloom.cli import main
from kvloom.integrations.transformers import load_model
from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.models import bundled_model_path
from kvloom.serving.options import add_options


@pytest.fixture(autouse=True)
def _steps_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are as long as they can be, whatever steps take on this machine."""
    monkeypatch.setattr(Costs, "note", lambda self, num_tokens, seconds: None)


CODE = 'def area(width, height):\n    return width * height\n\n\nPAIRS = {"a": 1, "b": 2, "c": 3}\n'
COPY = CODE * 3 + CODE[:30]
KEYS = ("identifier_of_the_customer", "name_of_the_product")
SCHEMA = {"type": "object", "properties": {key: {"type": "boolean"} for key in KEYS}, "required": [*KEYS]}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "seed": 4, "n": 2},
    "penalties": {"temperature": 0.5, "seed": 1, "frequency_penalty": 0.3, "logit_bias": {"30": 1}},
    "a stop": {"stop": ["height\n"]},
    "no end": {
        "extra_body": {"ignore_eos": True, "min_p": 0.05, "repetition_penalty": 1.05},
        "temperature": 1.0,
    },
    "json": {
        "extra_body": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        }
    },
}


def answered(server: Served) -> tuple[dict[str, Any], list[Any]]:
    """Choices of all requests, whole and streamed, and the usage of those that are whole."""
    found, usage = dict[str, Any](), []
    with server.client() as client:
        for name, fields in ASKED.items():
            fields = {
                "model": "bundled",
                "prompt": COPY,
                "max_tokens": 32,
                "logprobs": 2,
                "seed": 9,
                **fields,
            }
            whole = client.completions.create(**fields)
            found[name] = [x.model_dump() for x in whole.choices]
            usage.append(whole.usage)
            if name not in ("sampled", "a stop"):
                continue
            chunks = client.completions.create(**fields, stream=True)
            texts: dict[int, str] = {}
            for chunk in chunks:
                for x in chunk.choices:
                    texts[x.index] = texts.get(x.index, "") + x.text
            assert [texts[i] for i in sorted(texts)] == [x["text"] for x in found[name]]
    return found, usage


def test_answers_are_those_without() -> None:
    with served("int4") as server:
        expected, without = answered(server)
    assistant, _ = load_model(bundled_model_path())
    for drafts in ("lookup", assistant):
        with served("int4", drafts=drafts) as server:
            found, usage = answered(server)
            report = server.session.report()
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
                metrics = answer.read().decode()
        assert found == expected
        assert all(x.completion_tokens_details is None for x in without)
        assert [(x.prompt_tokens, x.completion_tokens) for x in usage] == [
            (x.prompt_tokens, x.completion_tokens) for x in without
        ]
        details = [x.completion_tokens_details for x in usage if x.completion_tokens_details is not None]
        accepted = sum(x.accepted_prediction_tokens for x in details)
        rejected = sum(x.rejected_prediction_tokens for x in details)
        assert 0 < accepted < report.tokens_accepted  # those of streams, too
        assert accepted + rejected < report.tokens_drafted
        for name in ("drafted", "accepted", "assisted"):
            pattern = rf'^kvloom_{name}_tokens_total{{model="bundled"}} (.*)$'
            [count] = re.findall(pattern, metrics, re.MULTILINE)
            assert float(count) >= getattr(report, f"tokens_{name}")  # the last stream may still run
    assert assistant.config._attn_implementation == "sdpa"


def test_the_option_takes_nothing_lookup_or_a_folder(tmp_path: Path) -> None:
    other_model().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bundled_model_path() / name).read_bytes())
    parser = argparse.ArgumentParser()
    add_options(parser)
    given = {(): None, ("--drafts",): "lookup", ("--drafts", "lookup"): "lookup"}
    for arguments, drafts in given.items():
        assert parser.parse_args(["model", *arguments]).drafts == drafts

    def ask(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            client.completions.create(model="x", prompt=COPY, max_tokens=8, temperature=0.5)
        with urllib.request.urlopen(f"{url[:-3]}/metrics") as answer:
            assert re.search(r"^kvloom_assistant_bytes\S* \S+$", answer.read().decode(), re.MULTILINE)

    model = str(bundled_model_path())
    assert serve(ask, model, "--name", "x", "--drafts", str(tmp_path)) == (0, "")


def test_an_assistant_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other_model().save_pretrained(tmp_path)
    text = (bundled_model_path() / "tokenizer.json").read_text()
    vocabulary = json.loads(text)
    tokens = vocabulary["model"]["vocab"]
    first, second = sorted(tokens, key=tokens.get)[-2:]
    tokens[first], tokens[second] = tokens[second], tokens[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    config = (bundled_model_path() / "tokenizer_config.json").read_bytes()
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    said = io.StringIO()
    with redirect_stderr(said):
        assert main(["serve", str(bundled_model_path()), "--drafts", str(tmp_path)]) == 2
    assert "--drafts must be a model with the tokenizer of the other, got" in said.getvalue()


def test_a_request_may_refuse_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    with served(drafts="lookup") as server:
        with server.client() as client:
            asked: dict[str, Any] = {"model": "bundled", "prompt": COPY, "max_tokens": 24}
            expected = client.completions.create(**asked)
            report = server.session.report()
            found = client.completions.create(**asked, extra_body={"drafts": False})
            assert server.session.report().tokens_drafted == report.tokens_drafted > 0
            with pytest.raises(openai.BadRequestError, match="drafts must be true or false, got 1"):
                client.completions.create(**asked, extra_body={"drafts": 1})
        assert found.choices == expected.choices
        assert found.usage is not None and found.usage.completion_tokens_details is None
        url = f"http://127.0.0.1:{server.port}/v1"
        few = ("--requests", "3", "--clients", "3", "--words", "8", "--new-tokens", "48", "--seed", "1")
        assert main(["check-answers", "--url", url, *few, "--json"]) == 0
    check = json.loads(capsys.readouterr().out)
    assert check["checked"] == 3 and check["accepted"] > 0
    words = f"with {check['accepted']} drafted tokens, are those of each request alone and without drafts"
    assert words in check["says"]


def test_keys_of_a_schema_are_drafted() -> None:
    """What a grammar forces is no question to the model, be there anything like it in the text or not."""
    asked: dict[str, Any] = {"model": "bundled", "prompt": "x", "max_tokens": 60, **ASKED["json"]}
    with served(drafts="lookup") as server, server.client() as client:
        answer = client.completions.create(**asked)
        report = server.session.report()
    assert [*json.loads(answer.choices[0].text)] == [*KEYS]
    assert report.tokens_accepted >= 5
    assert answer.usage is not None and report.steps <= answer.usage.completion_tokens - 5
