"""``kvloom check-answers`` against real servers: answers among others are those alone, or it says so."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from oracles.serving import Served, served

from kvloom.cli import main
from kvloom.errors import UnsupportedError
from kvloom.serving.answer_check import Answer, AnswerCheck, check_answers
from kvloom.serving.check_command import BOUNDS

FEW = ("--requests", "6", "--clients", "4", "--system", "24", "--words", "7", "--new-tokens", "6")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_keys=("secret",), max_answers=4) as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_API_KEY", "secret")


def check(server: Served, *options: str) -> int:
    return main(["check-answers", "--url", f"http://127.0.0.1:{server.port}/v1", *options])


def test_answers_in_company_are_those_alone_to_the_bit(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.session.report()
    assert check(server, *FEW, "--json") == 0
    result, after = json.loads(capsys.readouterr().out), server.session.report()
    behind = result["behind_found"]
    assert result["says"] == (
        f"6 answers, {behind} of them behind a prefix that was found, "
        "are those of each request alone, to the bit"
    )
    counts = ("refused", "checked", "other_tokens", "other_logprobs", "other_behind_found", "largest")
    assert [result[name] for name in counts] == [0, 6, 0, 0, 0, 0.0]
    assert 2 <= behind <= 5  # those after the first four; alone nothing is found
    assert after.tokens_found - before.tokens_found == 16 * behind


def test_answers_that_company_changes_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    with served(api_keys=("secret",), kv="auto", batch_invariant=False) as other:
        assert check(other, *FEW, "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["checked"] == 6 and result["other_logprobs"] > 0 and 0 < result["largest"] < 1e-3


def test_what_follows_a_found_prefix_has_the_bits_that_it_has_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a residual window, too."""
    with served(api_keys=("secret",), kv="int4", max_answers=8) as other:
        for system, most in (("0", 0), ("64", 5)):
            options = ("--requests", "6", "--clients", "1", "--system", system, "--words", "24")
            assert check(other, *options, "--new-tokens", "6", "--json") == 0
            result = json.loads(capsys.readouterr().out)
            assert (result["checked"], result["behind_found"]) == (6, most)


def test_requests_without_a_place_are_counted_and_a_seed_repeats_the_texts(
    server: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    compare = AnswerCheck.compare

    def seen(self: AnswerCheck, company: Answer, alone: Answer) -> None:
        asked[-1].append(company.prompt)
        compare(self, company, alone)

    monkeypatch.setattr(AnswerCheck, "compare", seen)
    for clients in ("12", "1"):
        asked.append([])
        options = ("--requests", "12", "--clients", clients, "--new-tokens", "20", "--seed", "5")
        assert check(server, *options) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"{12 - len(asked[0])} more were refused" in said[0] and 4 <= len(asked[0]) < 12
    assert "refused" not in said[1] and len(set(asked[1])) == 12 and {*asked[0]} < {*asked[1]}


def test_the_last_bit_of_a_log_probability_is_compared_and_a_line_says_so(
    server: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add, seen = Answer.add, list[Answer]()

    def changed(self: Answer, chunk: Any) -> None:
        add(self, chunk)
        if not seen:  # the first chunk of one answer in company
            seen.append(self)
            self.logprobs[0] = math.nextafter(self.logprobs[0], -math.inf)

    monkeypatch.setattr(Answer, "add", changed)
    assert check(server, *FEW) == 1
    shown = capsys.readouterr().out
    assert "of 6 answers 0 have other tokens than alone, 1 other log probabilities, by " in shown


def test_differences_are_counted() -> None:
    alone, counted = Answer("", 3, ["a", "b", "c"], [-1.0, -2.0, -3.0]), AnswerCheck()
    for tokens, logprobs in (
        (["a", "b", "c"], [-1.0, -2.0, -3.0]),
        (["a", "b", "c"], [-1.0, -2.25, -3.0]),
        (["a", "x", "c"], [-1.125, -9.0, -9.0]),
        (["a", "b"], [-1.0, -2.0]),
    ):
        counted.compare(Answer("", 3, tokens, logprobs, len(tokens) - 2), alone)
    assert (counted.checked, counted.other_tokens, counted.other_logprobs, counted.largest) == (4, 2, 3, 0.25)
    assert (counted.behind_found, counted.other_behind_found) == (3, 2)
    assert str(counted).startswith("of 4 answers 2 have other tokens than alone, 3 other log probabilities")
    assert "2 of these follow a prefix that was found" in str(counted)


@pytest.mark.parametrize("num_with", [0, 1])
@pytest.mark.parametrize("logprobs", [None, SimpleNamespace(tokens=[], token_logprobs=[])])
def test_a_server_without_log_probabilities_is_not_called_right(logprobs: Any, num_with: int) -> None:
    """Be it that there are none among others, or alone."""
    given = [SimpleNamespace(tokens=["b"], token_logprobs=[0.0])] * num_with + [logprobs] * 2

    async def create(**asked: Any) -> AsyncIterator[SimpleNamespace]:
        choice = SimpleNamespace(logprobs=given.pop(0), text="b")

        async def chunks() -> AsyncIterator[SimpleNamespace]:
            yield SimpleNamespace(choices=[choice], usage=None)

        return chunks()

    client: Any = SimpleNamespace(completions=SimpleNamespace(create=create))
    with pytest.raises(UnsupportedError, match="must give log probabilities of completions, got none"):
        asyncio.run(check_answers(client, "any", ["a"], 1, 1))


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_path_of_the_api_may_be_left_out(server: Served, path: str) -> None:
    options = ("--requests", "1", "--system", "0", "--words", "4", "--new-tokens", "1")
    assert main(["check-answers", "--url", f"http://127.0.0.1:{server.port}{path}", *options]) == 0


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "localhost", "", "ftp://localhost/v1", "http://", "http://a:b/v1", "http://a?b"]
)
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-answers", "--url", url]) == 2
    said = capsys.readouterr().err
    assert said == f"kvloom: --url must be such as http://127.0.0.1:8000/v1, got {url!r}\n"


@pytest.mark.parametrize("option", BOUNDS)
def test_numbers_that_cannot_be_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = option.replace("_", "-")
    for value in ("-1", "1" + "0" * 30):
        assert main(["check-answers", f"--{name}={value}"]) == 2
        assert capsys.readouterr().err.startswith(f"kvloom: --{name} must be from ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-key", "wrong"], "no server answers at http://127.0.0.1"),
        (["--model", "other", "--requests", "1"], "a request was not answered: Error code: 404"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(
    server: Served, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(server, *options) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


class Another(BaseHTTPRequestHandler):
    """A server that is none of models."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        kind = "text/html" if self.body.startswith(b"<") else "application/json"
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize("body", [b'{"object": "list", "data": []}', b"<html>", b"{}"])
def test_a_server_that_lists_no_model_is_a_sentence(
    body: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Another, "body", body)
    with ThreadingHTTPServer(("127.0.0.1", 0), Another) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}/v1"
        assert main(["check-answers", "--url", url]) == 2
        other.shutdown()
    assert capsys.readouterr().err == (
        f"kvloom: --url must be of a server that lists a model, got none at {url}\n"
    )


@pytest.mark.parametrize("words", [[], ["serve"], ["serve", "--rate", "1,2", "--plot", "f.svg"]])
def test_the_load_generator_says_what_replaces_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert "`guidellm run` measures a server, see docs/serving.md" in capsys.readouterr().err
