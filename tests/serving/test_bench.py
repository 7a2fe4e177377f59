"""``kvloom bench serve`` against a real server: what it counts is what the server counted."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oracles.serving import Served, served

from kvloom.cli import main
from kvloom.errors import UnsupportedError
from kvloom.serving.answer_check import Answer, AnswerCheck, check_answers
from kvloom.serving.bench import BOUNDS
from kvloom.serving.load import percentiles
from kvloom.serving.workloads import Conversation, Turn, repeated

TRACE = [
    {"timestamp": 0, "input_length": 1500, "output_length": 64, "hash_ids": [1, 2, 3]},
    {"timestamp": 200, "input_length": 1536, "output_length": 96, "hash_ids": [1, 2, 4]},
    {"timestamp": 400, "input_length": 600, "output_length": 1, "hash_ids": [1, 5]},
    {"timestamp": 99999, "input_length": 1, "output_length": 1, "hash_ids": [6]},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_keys=("secret",), max_answers=4) as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_API_KEY", "secret")


def bench(server: Served, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What ``--json`` prints."""
    url = f"http://127.0.0.1:{server.port}/v1"
    assert main(["bench", "serve", "--url", url, "--json", *options]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_shared_prompt_is_found_by_all_but_the_first(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.session.report()
    options = ("--requests", "6", "--clients", "2", "--system", "64", "--words", "8", "--new-tokens", "5")
    result = bench(server, capsys, *options)
    after = server.session.report()
    assert (result["scenario"], result["model"], result["clients"]) == ("shared", "bundled", 2)
    assert (result["ended"], result["refused"], result["failed"]) == (6, 0, 0)
    assert result["prompt_tokens"] == after.tokens_asked - before.tokens_asked
    found = after.tokens_found - before.tokens_found
    assert result["hit_rate"] == pytest.approx(found / result["prompt_tokens"]) and found >= 5 * 64
    assert 6 <= result["new_tokens"] <= 30
    for name in ("first_token_ms", "between_tokens_ms"):
        assert 0 < result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]


def test_each_run_has_texts_of_its_own_unless_a_seed_is_said(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--requests", "4", "--clients", "1", "--system", "64", "--words", "64", "--new-tokens", "1")
    first, second = (bench(server, capsys, *options) for _ in range(2))
    assert first["seed"] != second["seed"] and first["note"] is second["note"] is None
    assert first["repeat_rate"] == second["repeat_rate"] == 3 * 64 / (4 * 128)
    for run in (first, second):
        assert abs(run["hit_rate"] - run["repeat_rate"]) < 0.05
    again = bench(server, capsys, *options, "--seed", str(first["seed"]))
    assert again["seed"] == first["seed"] and again["hit_rate"] > 0.8
    assert again["note"].startswith("more was found than this run repeats: the server keeps pages of a run")


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_path_of_the_api_may_be_left_out(
    server: Served, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--json", "--requests", "1", "--system", "0", "--words", "4", "--new-tokens", "1"]
    assert main(["bench", "serve", "--url", f"http://127.0.0.1:{server.port}{path}", *options]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] == 1


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "localhost", "", "ftp://localhost/v1", "http://", "http://a:b/v1", "http://a?b"]
)
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", url]) == 2
    said = capsys.readouterr().err
    assert said == f"kvloom: --url must be such as http://127.0.0.1:8000/v1, got {url!r}\n"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1" + "0" * 30])
@pytest.mark.parametrize("option", [name.replace("_", "-") for name in BOUNDS])
def test_numbers_that_cannot_be_are_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if option == "system" and value == "0":
        value = "-2"  # no system prompt is one
    if option not in ("scale", "speed") and value in ("nan", "inf"):
        with pytest.raises(SystemExit):  # argparse's own refusal
            main(["bench", "serve", f"--{option}={value}"])
        assert f"argument --{option}: invalid int value" in capsys.readouterr().err
    else:
        assert main(["bench", "serve", f"--{option}={value}"]) == 2
        assert capsys.readouterr().err.startswith(f"kvloom: --{option} must be from ")


def test_a_turn_of_a_chat_finds_the_turns_before_it(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--scenario", "chat", "--requests", "5", "--turns", "3", "--clients", "1")
    result = bench(server, capsys, *options, "--system", "8", "--words", "40", "--new-tokens", "4")
    assert result["ended"] == 5 and result["hit_rate"] > 0.3


def test_a_trace_is_replayed_smaller_and_faster(
    server: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    options = (
        "--scenario",
        "trace",
        "--trace",
        str(file),
        "--requests",
        "3",
        "--scale",
        "16",
        "--speed",
        "2",
    )
    result = bench(server, capsys, *options)
    assert result["ended"] == 3 and result["new_tokens"] <= 4 + 6 + 1
    assert result["seconds"] >= 0.2  # the third one is asked for after 0.4 s, at twice the speed
    assert result["hit_rate"] >= (64 + 32 - 32) / (94 + 96 + 38)


def test_a_trace_whose_shared_blocks_are_scaled_below_a_page_says_so(
    server: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [0, 2 * x + 1, 2 * x + 2]}
        for x in range(6)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--scenario", "trace", "--trace", str(file), "--clients", "1", "--scale")
    small, large = bench(server, capsys, *options, "64"), bench(server, capsys, *options, "16")
    assert small["repeat_rate"] == large["repeat_rate"] == pytest.approx(5 / 18)
    assert small["hit_rate"] == 0 and "512 tokens of the trace are 8 words at --scale 64" in small["note"]
    assert large["hit_rate"] == pytest.approx(5 / 18, abs=0.05) and large["note"] is None


def test_a_trace_that_repeats_little_says_so_too(
    server: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As the first minutes of Mooncake's conversations."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 6144, "output_length": 1, "hash_ids": [0, *range(x, x + 11)]}
        for x in (1, 12)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = bench(server, capsys, "--scenario", "trace", "--trace", str(file), "--clients", "1")
    assert result["repeat_rate"] == pytest.approx(1 / 24) and result["hit_rate"] == 0
    assert "512 tokens of the trace are 8 words at --scale 64" in result["note"]


def test_what_a_run_repeats_is_counted_in_words() -> None:
    def share(*turns: tuple[str, ...]) -> float:
        return repeated([Conversation(tuple(Turn((piece,), 2) for piece in each)) for each in turns])

    assert share() == share((" a b c",)) == share((" a b c",), (" d",)) == 0
    assert share((" a b c",), (" a b c",)) == 0.5
    assert (
        share((" a b c", " d")) == 5 / 9
    )  # the second prompt has the first one and its answer of two tokens
    assert share((" a b c", " d"), (" a b c", " d")) == (5 + 3 + 5) / 18  # answers are not alike
    pieces = [Turn((" a", " b", *rest), 1) for rest in ((), (" c",), (" d",))]
    assert repeated([Conversation((turn,)) for turn in pieces]) == 4 / 8


def test_refused_requests_are_counted_and_a_table_is_printed(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{server.port}/v1"
    options = ("--requests", "12", "--clients", "12", "--system", "300", "--new-tokens", "40")
    assert main(["bench", "serve", "--url", url, *options]) == 0
    out = capsys.readouterr().out
    assert "bundled: shared, 12 clients" in out and "0 failed" in out and " 0 refused" not in out
    assert "new tokens per second" in out and "p99" in out and "% with --seed " in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scenario", "trace"], "--trace must be given with --scenario trace"),
        (["--trace", "x"], "--trace must be given with --scenario trace, and with no other"),
        (["--scenario", "trace", "--trace", "/nowhere"], "--trace must be a file of JSON lines"),
        (["--scenario", "trace", "--trace", os.devnull], "no request was answered"),
        (["--scenario", "trace", "--trace", __file__], 'block_size, got \'"""``kvloom bench'),
        (["--api-key", "wrong"], "no server answers at http://127.0.0.1"),
        (["--model", "other", "--requests", "1"], "no request was answered: Error code: 404"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    server: Served, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{server.port}/v1"
    assert main(["bench", "serve", "--url", url, *options]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([]) == {"p50": 0, "p90": 0, "p99": 0}
    assert percentiles([0.003]) == {"p50": 3, "p90": 3, "p99": 3}
    assert percentiles([x / 1000 for x in range(100, 0, -1)]) == {"p50": 50, "p90": 90, "p99": 99}


CHECKED = ("--requests", "6", "--clients", "4", "--system", "24", "--words", "7", "--new-tokens", "6")


def test_answers_in_company_are_those_alone_to_the_bit(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.session.report().tokens_found
    result = bench(server, capsys, *CHECKED, "--check-answers")
    assert result["ended"] == 6 and result["hit_rate"] > 0
    found = server.session.report().tokens_found - before
    assert found == round(result["hit_rate"] * result["prompt_tokens"])  # alone nothing was found
    assert result["answers"] == {
        "checked": 6,
        "other_tokens": 0,
        "other_logprobs": 0,
        "other_behind_found": 0,
        "largest": 0.0,
        "says": "6 answers are those of each request alone, to the bit",
    }


def test_answers_that_company_changes_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    with served(api_keys=("secret",), kv="auto", batch_invariant=False) as other:
        url = f"http://127.0.0.1:{other.port}/v1"
        status = main(["bench", "serve", "--url", url, "--json", *CHECKED, "--check-answers"])
        answers = json.loads(capsys.readouterr().out)["answers"]
    assert status == 1 and answers["checked"] == 6
    assert answers["other_logprobs"] > 0 and 0 < answers["largest"] < 1e-3


def test_some_of_the_answers_are_checked(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for asked, checked in (("1", 1), ("4", 4), ("7", 6)):
        assert bench(server, capsys, *CHECKED, "--check-answers", asked)["answers"]["checked"] == checked


def test_what_follows_a_found_prefix_has_the_bits_that_it_has_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a residual window, too."""
    answers = {}
    with served(api_keys=("secret",), kv="int4", max_answers=8) as other:
        url = f"http://127.0.0.1:{other.port}/v1"
        for system in ("0", "64"):
            options = ["--requests", "6", "--system", system, "--words", "24", "--new-tokens", "6"]
            main(["bench", "serve", "--url", url, "--json", *options, "--check-answers"])
            report = json.loads(capsys.readouterr().out)
            assert (report["hit_rate"] > 0.3) == (system == "64")
            answers[system] = report["answers"]
    for found in answers.values():
        assert found["checked"] == 6 and found["other_logprobs"] == 0


def test_what_differs_behind_a_found_prefix_is_told_apart() -> None:
    check, alone = AnswerCheck(), Answer("a", 1, ["b"], [-1.0])
    for num_found, logprob in ((0, -1.5), (16, -1.25), (16, -1.0)):
        check.compare(Answer("a", 1, ["b"], [logprob], num_found), alone)
    assert (check.other_logprobs, check.other_behind_found, check.largest) == (2, 1, 0.5)
    assert "1 of these follow a prefix that was found" in str(check)


@pytest.mark.parametrize("company", [0.0, None])
@pytest.mark.parametrize("logprobs", [None, SimpleNamespace(tokens=[], token_logprobs=[])])
def test_a_server_without_log_probabilities_is_not_called_right(logprobs: Any, company: float | None) -> None:
    """Be it of streams that there are none, or of answers that are whole."""

    async def create(**asked: Any) -> SimpleNamespace:
        given = logprobs if company is not None else SimpleNamespace(tokens=["b"], token_logprobs=[0.0])
        return SimpleNamespace(choices=[SimpleNamespace(logprobs=given, text="b")])

    streamed = SimpleNamespace(tokens=["b"], token_logprobs=[company]) if company is not None else logprobs
    answer = Answer("a", 1)
    answer.add(SimpleNamespace(logprobs=streamed, text="b"))
    client: Any = SimpleNamespace(completions=SimpleNamespace(create=create))
    with pytest.raises(UnsupportedError, match="must give log probabilities of completions, got none"):
        asyncio.run(check_answers(client, "any", [answer]))


def test_the_last_bit_of_a_log_probability_is_compared_and_a_line_says_so(
    server: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add, seen = Answer.add, list[Answer]()

    def changed(self: Answer, choice: Any) -> None:
        add(self, choice)
        if not seen:  # the first chunk of one answer in company
            seen.append(self)
            self.logprobs[0] = math.nextafter(self.logprobs[0], -math.inf)

    monkeypatch.setattr(Answer, "add", changed)
    url = f"http://127.0.0.1:{server.port}/v1"
    assert main(["bench", "serve", "--url", url, *CHECKED, "--check-answers"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "of 6 answers 0 have other tokens than alone, 1 other log probabilities, by " in shown


def test_differences_are_counted() -> None:
    alone = Answer("", 3, ["a", "b", "c"], [-1.0, -2.0, -3.0])
    check = AnswerCheck()
    for tokens, logprobs in (
        (["a", "b", "c"], [-1.0, -2.0, -3.0]),
        (["a", "b", "c"], [-1.0, -2.25, -3.0]),
        (["a", "x", "c"], [-1.125, -9.0, -9.0]),
        (["a", "b"], [-1.0, -2.0]),
    ):
        check.compare(Answer("", 3, tokens, logprobs, len(tokens) - 2), alone)
    assert check.other_behind_found == 2
    assert (check.checked, check.other_tokens, check.other_logprobs, check.largest) == (4, 2, 3, 0.25)
    assert str(check).startswith("of 4 answers 2 have other tokens than alone, 3 other log probabilities")
