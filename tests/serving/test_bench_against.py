"""``kvloom bench serve`` of two servers, and at rates: both are asked the same, and a plot shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from oracles.serving import Served, served

from kvloom.cli import main
from kvloom.serving.chart import chart
from kvloom.serving.session import ServingSession
from kvloom.serving.workloads import arriving, chats

SMALL = ("--system", "32", "--words", "8", "--new-tokens", "3")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_keys=("secret",)) as running:
        yield running


@pytest.fixture(scope="module")
def other() -> Iterator[Served]:
    with served(kv="auto", api_keys=("other",)) as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_API_KEY", "secret")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[ServingSession, list[Any]]:
    """What each session was asked, in the order in which it was."""
    prompts: dict[ServingSession, list[Any]] = {}
    ask = ServingSession.ask

    def seen(self: ServingSession, name: str, tokens: Any, *others: Any, **options: Any) -> Any:
        prompts.setdefault(self, []).append(tokens)
        return ask(self, name, tokens, *others, **options)

    monkeypatch.setattr(ServingSession, "ask", seen)
    return prompts


def url_of(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}/v1"


def bench(server: Served, other: Served, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What is printed of both."""
    both = ("--url", url_of(server), "--against", url_of(other), "--against-key", "other")
    assert main(["bench", "serve", *both, *options]) == 0
    return capsys.readouterr().out


def test_two_servers_are_asked_the_same_texts(
    server: Served, other: Served, asked: dict[ServingSession, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--requests", "6", "--clients", "1", *SMALL, "--json")
    runs = json.loads(bench(server, other, capsys, *options))["runs"]
    assert [run["url"] for run in runs] == [url_of(server), url_of(other)]
    assert asked[server.session] == asked[other.session] and len(asked[server.session]) == 6
    for run in runs:
        assert (run["ended"], run["clients"], run["rate"]) == (6, 1, None)
    assert len({run["prompt_tokens"] for run in runs}) == len({run["seed"] for run in runs}) == 1


def test_both_are_a_column_of_the_table(
    server: Served, other: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    said = bench(server, other, capsys, "--requests", "2", "--clients", "1", *SMALL)
    for running in (server, other):
        assert f"bundled at 127.0.0.1:{running.port}" in said
    (line,) = (line for line in said.splitlines() if "requests per second" in line)
    assert len(re.findall(r"\d+\.\d\d", line)) == 2


def test_each_rate_is_a_run_with_texts_and_times_of_its_own(
    server: Served,
    other: Served,
    asked: dict[ServingSession, list[Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    options = ("--requests", "5", "--rate", "10,40", "--seed", "7", *SMALL, "--json")
    runs = json.loads(bench(server, other, capsys, *options, "--plot", str(tmp_path / "plot.svg")))["runs"]
    urls = [url_of(server), url_of(other)]
    assert [(run["rate"], run["url"]) for run in runs] == [(r, u) for r in (10, 40) for u in urls]
    for i, run in enumerate(runs):
        assert run["ended"] == 5 and run["clients"] is None
        times = [x.seconds for x in arriving(chats(5, 1, 32, 8, 3, 7 + i // 2), run["rate"], 7 + i // 2)]
        assert run["seconds"] >= times[-1]
        assert run["note"] is None  # no run finds the texts of another
    first, second = (sorted(asked[x.session], key=str) for x in (server, other))
    assert first == second and len({tuple(tokens) for prompts in first for tokens in prompts}) == 10
    texts = set(ElementTree.parse(tmp_path / "plot.svg").getroot().itertext())
    assert {f"127.0.0.1:{x.port}" for x in (server, other)} | {"10/s", "40/s"} <= texts


def test_at_a_rate_nobody_waits_for_the_answers_before(
    server: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, running = ServingSession.ask, list[int]()

    def seen(self: ServingSession, *others: Any, **options: Any) -> Any:
        running.append(len(self.readers))
        return ask(self, *others, **options)

    monkeypatch.setattr(ServingSession, "ask", seen)
    options = ("--requests", "6", "--rate", "1000", *SMALL[:-1], "60", "--json")
    assert main(["bench", "serve", "--url", url_of(server), *options]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] == 6
    assert max(running) >= 3  # six requests come within hundredths of a second, and take tenths of one


def test_rates_are_lines_of_a_table(
    server: Served, other: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    said = bench(server, other, capsys, "--requests", "2", "--rate", "50,100", *SMALL)
    lines = [line for line in said.splitlines() if "127.0.0.1" in line]
    assert ["100 " in line for line in lines] == [False, False, True, True]


def test_the_key_of_one_server_is_not_told_to_the_other(
    server: Served, other: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--url", url_of(server), "--against", url_of(server), "--requests", "1", *SMALL]
    assert main(["bench", "serve", *options]) == 2
    assert f"no server answers at {url_of(server)}: Error code: 401" in capsys.readouterr().err


def test_requests_come_at_their_rate() -> None:
    conversations = chats(4000, 1, 0, 1, 1, 0)
    made = arriving(conversations, 50, 3)
    times = [x.seconds for x in made]
    assert times == sorted(times) and [x.turns for x in made] == [x.turns for x in conversations]
    gaps = [after - before for before, after in zip([0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert (
        abs(mean - 1 / 50) < 5 / 50 / len(gaps) ** 0.5
    )  # five standard deviations: of one gap it is its mean
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert 0.8 < variance**0.5 / mean < 1.2  # neither regular nor in bunches
    assert (
        times
        == [x.seconds for x in arriving(conversations, 50, 3)]
        != [x.seconds for x in arriving(conversations, 50, 4)]
    )


def measured(url: str, rate: float, tokens: float, first: float, between: float) -> dict[str, Any]:
    times = {"first_token_ms": {"p90": first}, "between_tokens_ms": {"p90": between}}
    return {"url": url, "rate": rate, "new_tokens_per_s": tokens, **times}


def test_a_plot_has_a_point_for_each_rate_and_a_curve_for_each_server() -> None:
    a, b = "http://a:1/v1", "http://b:2/v1"
    runs = [measured(a, 4, 200, 90, 9), measured(b, 1, 50, 20, 3), measured(a, 1, 60, 10, 4)]
    root = ElementTree.fromstring(chart([*runs, measured(b, 4, 55, 5000, 0)]))
    dots = [x for x in root if x.tag.endswith("circle")]
    told = {next(x.itertext()): (float(x.attrib["cx"]), float(x.attrib["cy"])) for x in dots}
    assert len(dots) == len(told) == 7  # the last run has no second token
    at = {
        name: told[f"{name[0]}:{name[1]} at {name[2]} requests/s: {tokens} tokens/s, {ms} ms"]
        for name, tokens, ms in (("a14", "200.0", "90.0"), ("a11", "60.0", "10.0"), ("b21", "50.0", "20.0"))
    }
    assert at["b21"][0] < at["a11"][0] < at["a14"][0]  # more tokens are farther to the right
    assert at["a14"][1] < at["b21"][1] < at["a11"][1]  # longer times are higher
    curves = [x for x in root if x.tag.endswith("path") and "stroke" in x.attrib]
    assert [x.attrib["d"].count("L") for x in curves] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rate", "1,x"], "--rate must be numbers with commas between them, got '1,x'"),
        (["--rate", ""], "--rate must be numbers with commas between them, got ''"),
        (["--rate", "0"], "--rate must be from 0.001 to 100,000.0, got 0.0"),
        (["--rate", "1,nan"], "--rate must be from 0.001 to 100,000.0, got nan"),
        (["--rate", "1", "--clients", "2"], "--rate must be given without --clients and a trace"),
        (["--rate", "1", "--scenario", "trace"], "--rate must be given without --clients and a trace"),
        (["--plot", "x.svg"], "--plot must be given with --rate, got it alone"),
        (["--rate", "1", "--plot", "/nowhere/x.svg"], "--plot must be a file that can be written"),
        (["--against", "localhost"], "--against must be such as http://127.0.0.1:8000/v1, got 'localhost'"),
        (["--against-model", "m"], "--against must be given with --against-key and --against-model"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvloom: ") and words in line
