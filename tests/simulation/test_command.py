"""``kvloom simulate``, and the traces that it reads."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from kvloom.cli import main
from kvloom.errors import ArgumentError
from kvloom.simulation.chart import spell
from kvloom.simulation.command import parse_tokens
from kvloom.simulation.replay import POLICIES
from kvloom.simulation.trace import read_trace

LINE: dict[str, Any] = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    ids = [[1, 2], [1, 3], [1, 2], [4, 5], [1, 2]]
    file.write_text("".join(json.dumps(LINE | {"hash_ids": x}) + "\n" for x in ids))
    return file


def test_the_table_has_a_row_for_each_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(trace), "--policy", "all", "--capacity", "1k,3k,500k,1M,2M,5M,10M"]) == 0
    shown = capsys.readouterr().out
    assert "10 blocks and 5,000 tokens of prompts" in shown
    assert all(f" {policy} " in shown for policy in POLICIES)
    assert all(f" {capacity} " in shown for capacity in ("1k", "3k", "500k", "10M"))
    assert "50.0 / 50.2" in shown  # 1 + 2 + 2 of 10 blocks


def test_json_and_a_plot_say_the_same(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--policy", "lru,opt", "--capacity", "1024,3k", "--json", "--plot", str(tmp_path / "x.svg")]
    assert main(["simulate", str(trace), *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["capacity"]) for row in rows] == [
        ("lru", 1024), ("lru", 3000), ("opt", 1024), ("opt", 3000),
    ]  # fmt: skip
    assert rows[0]["blocks"] == 2 and rows[0]["block_rate"] == 0.2
    titles = [x.text for x in ElementTree.parse(tmp_path / "x.svg").iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [f"{row['policy']}, {spell(row['capacity'])}: {row['block_rate']:.4f}" for row in rows]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--capacity", "3MB"], "--capacity must be a number of tokens such as 500k or 3M, got '3MB'"),
        (["--capacity", "1M,,2M"], "--capacity must be a number of tokens such as 500k or 3M, got ''"),
        (["--capacity", "1M,5"], "--capacity must be at least 512 tokens, got 5"),
        (["--policy", "lru,mru"], "--policy must be one of lru, ours, fifo"),
    ],
    ids=str,
)
def test_bad_options_are_named_before_the_trace_is_read(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "/nowhere", *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hash_ids": [1, "2"]}, r"hash_ids in line 2, and may have block_size, got '{"),
        ({"hash_ids": [1]}, r"2 hash_ids in line 2, .* 512 tokens \(the usual block_size\) .* 1000, got 1"),
        ({"hash_ids": [1, 2, 3]}, r"2 hash_ids in line 2, .* 1000, got 3"),
        ({"input_length": 1025}, r"3 hash_ids in line 2, .* 1025, got 2"),
        ({"input_length": 0, "hash_ids": []}, r"an input_length of at least 1, got 0 in line 2"),
        (
            {"block_size": 400},
            r"3 hash_ids in line 2, one for each 400 tokens \(its block_size\) .* 1000, got 2",
        ),
        ({"block_size": 500}, "the same block_size in all lines, 512, got 500 in line 2"),
        ({"block_size": 0}, r"hash_ids in line 2, and may have block_size, got '{"),
        ({"output_length": -1}, r"hash_ids in line 2, and may have block_size, got '{"),
        ({"timestamp": None}, r"hash_ids in line 2, and may have block_size, got '{"),
    ],
    ids=str,
)
def test_a_line_that_is_none_of_a_trace_is_named(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | change) + "\n")
    with pytest.raises(ArgumentError, match=f"^trace must have .*{sentence}"):
        list(read_trace(file))
    assert next(read_trace(file)).hash_ids == LINE["hash_ids"]


@pytest.mark.parametrize(("page_size", "found"), [(64, 12), (16, 48), (128, 6)])
def test_a_trace_may_say_the_size_of_its_blocks(
    page_size: int, found: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of the five blocks of 64 tokens are found by three of the four requests."""
    file, line = tmp_path / "trace.jsonl", LINE | {"block_size": 64, "input_length": 320}
    lines = [json.dumps(line | {"hash_ids": [1, 2, 3, 4, 100 + i]}) + "\n" for i in range(4)]
    file.write_text("".join(lines))
    options = ["--capacity", "100k", "--policy", "lru", "--page-size", str(page_size), "--json"]
    assert main(["simulate", str(file), *options]) == 0
    [shown] = json.loads(capsys.readouterr().out)
    assert shown["blocks"] == found and shown["block_size"] == 64


def test_a_file_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "/nowhere"]) == 2
    assert "kvloom: trace must be a file of JSON lines: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"), [("3M", 3_000_000), ("1.5k", 1500), ("512", 512), ("2G", 2 * 10**9)]
)
def test_tokens_are_spelled_as_usual(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


def test_stores_below_are_rows_of_their_own(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--capacity", "1024", "--below", "0,3k", "--page-size", "512"]
    assert main(["simulate", str(trace), *options, "--policy", "lru,opt"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in ("lru", "lru + 3k", "opt", "opt + 3k"))
    assert "20.0 / 20.5" in shown and "20.0 + 30.0 / 20.5 + 29.8" in shown
    assert main(["simulate", str(trace), *options, "--json"]) == 0
    rows = [x for x in json.loads(capsys.readouterr().out) if x["policy"] == "lru"]
    assert [(x["below"], x["blocks"], x["blocks_below"], x["block_rate"]) for x in rows] == [
        (0, 2, 0, 0.2), (3000, 2, 3, 0.5),
    ]  # fmt: skip


def test_pages_of_another_size_are_counted(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(trace), "--page-size", "128", "--capacity", "3k"]) == 0
    assert "40 pages of 128 and 5,000 tokens" in capsys.readouterr().out
    assert main(["simulate", "/nowhere", "--page-size", "100"]) == 2
    assert "--page-size must be a multiple or a divisor of 512, got 100" in capsys.readouterr().err
    assert main(["simulate", "/nowhere", "--below", "x"]) == 2
    assert "--below must be a number of tokens such as 500k or 3M, got 'x'" in capsys.readouterr().err


def test_states_are_rows_of_their_own_and_all_of_them_the_last(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a text of 1000 tokens states are kept behind 768, and behind 512, where the second one parts."""
    options = ["--capacity", "10k", "--page-size", "256", "--states", "1,2"]
    assert main(["simulate", str(trace), *options]) == 0
    shown = capsys.readouterr().out
    assert "15 pages of 256 and 5,000 tokens" in shown and "states are kept at the end" in shown
    assert " lru, 1 states " in shown and " lru, all states " in shown and " opt" not in shown
    assert main(["simulate", str(trace), *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    # Of two, those of the second text and then those behind 512 go; the third finds 512, the fifth 768.
    assert [(x["states"], x["tokens"], x["states_kept"], x["states_evicted"]) for x in rows] == [
        (1, 0, 1, 5), (2, 512 + 768, 2, 3), ("all", 768 + 768, 4, 0),
    ]  # fmt: skip


def test_a_store_below_has_states_too(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory has the four pages of the last text, so the third finds the two that it shares with the second.

    A store for 20 pages, of which states take 4, has the third one of the third text, and its states. Those
    of the fourth are in the place of the first pages, so the fifth finds all three in a larger store alone.
    """
    options = ["--capacity", "1024", "--page-size", "256", "--states", "all", "--state-tokens", "1024"]
    assert main(["simulate", str(trace), *options, "--below", "0,5120,100k"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in ("lru, all states", "lru + 5120, all states"))
    assert main(["simulate", str(trace), *options, "--below", "0,5120,100k", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(x["below"], x["tokens"], x["tokens_below"]) for x in rows] == [
        (0, 512, 0), (5120, 512, 256), (100_000, 512, 256 + 768),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--states", "0"], "--states must be at least 1, got 0"),
        (["--states", "3,x"], "--states must be a number of texts such as 500k or 3M, got 'x'"),
        (["--states", "3", "--below", "5"], "--below must be at least 512 tokens, got 5"),
        (
            ["--states", "3", "--below", "0,3k"],
            "--state-tokens must be given for a store of recurrent states, with below 3000, got None",
        ),
        (["--states", "3", "--state-tokens", "0"], "--state-tokens must be at least 1, got 0"),
        (["--state-tokens", "512"], "--state-tokens must be given only with --states, got 512 without it"),
        (["--states", "3", "--policy", "lru,opt"], "--policy must be one of lru, ours with recurrent states"),
        (
            ["--states", "3", "--state-interval", "500"],
            "--state-interval must be a positive multiple of page_size 512",
        ),
        (["--states", "3", "--capacity", "5"], "--capacity must be at least 512 tokens, got 5"),
        (
            ["--state-interval", "512"],
            "--state-interval must be given only with --states, got 512 without it",
        ),
    ],
    ids=str,
)
def test_bad_options_of_states_are_named(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "/nowhere", *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "text"), [(3_000_000, "3M"), (1500, "1.5k"), (500_000, "500k"), (512, "512")]
)
def test_tokens_are_shown_as_they_are_spelled(tokens: int, text: str) -> None:
    assert spell(tokens) == text and parse_tokens(text) == tokens


@pytest.mark.parametrize("more", [[], ["--below", "1M"], ["--states", "3,all"]], ids=str)
def test_a_capacity_beyond_all_memory_is_that_of_all_pages(
    trace: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for capacity in ("1M", "999999999999G"):
        assert main(["simulate", str(trace), "--capacity", capacity, "--json", *more]) == 0
        found.append([row | {"capacity": 0} for row in json.loads(capsys.readouterr().out)])
    assert found[0] == found[1]


def test_a_trace_without_requests_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").touch()
    assert main(["simulate", str(tmp_path / "x.jsonl"), "--json"]) == 2
    assert "trace must have a request, got none in" in capsys.readouterr().err
