"""``kvloom trace`` and ``kvloom view``, and what a replay says of a trace."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvloom.cli import main
from kvloom.errors import ArgumentError
from kvloom.paging import CAUSES, PagePool, PrefixTree
from kvloom.simulation.replay import replay as simulate
from kvloom.simulation.trace import BLOCK_TOKENS, Request
from kvloom.tracing.recording import causes_of, read_lines, requests_of
from kvloom.tracing.replay import Lookup, lookups_of, read_lookups, replay


def conversations(count: int = 300) -> list[Request]:
    """Requests that begin like earlier ones; some begin like none."""
    rng, made, num_blocks = random.Random(7), [Request(0, 512, 1, [0])], 1
    for number in range(count):
        begin = rng.choice(made[-30:]).hash_ids if rng.random() < 0.9 else []
        new = [*range(num_blocks, num_blocks + rng.randint(not begin, 4))]
        num_blocks += len(new)
        blocks = begin[: rng.randint(0, len(begin))] + new or [0]
        made.append(Request(1000 * number, BLOCK_TOKENS * len(blocks), 1, blocks))
    return made


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(x._asdict()) + "\n" for x in conversations()))
    return file


@pytest.mark.parametrize("num_pages", [2, 10, 60, 2000])
def test_causes_sum_to_the_misses_of_a_whole_replay(trace: Path, num_pages: int) -> None:
    lookups, page_size = read_lookups(trace)
    asked = requests_of(replay(lookups, num_pages).lines(tokens=False))
    found = simulate(conversations(), num_pages * page_size)
    causes = causes_of(asked.values())
    assert sum(x.found for x in asked.values()) == found.blocks
    assert causes.total() == found.blocks_asked - found.blocks and causes.keys() <= {*CAUSES}
    assert ("evicted" in causes) == (num_pages < 2000)
    blocks = {block for x in conversations() for block in x.hash_ids}
    assert causes.total() - causes["evicted"] == len(blocks)  # whatever comes again was there once
    for x in asked.values():
        assert sorted(x.misses) == [*range(x.found, len(x.nodes))]


def test_a_replay_of_a_replay_is_the_same(trace: Path, tmp_path: Path) -> None:
    lookups, _ = read_lookups(trace)
    first = replay(lookups, 20)
    first.save(tmp_path / "events.jsonl")
    _, *lines = read_lines(tmp_path / "events.jsonl")
    second = replay(lookups_of(lines), 20)
    assert [x[1:4] for x in first] == [x[1:4] for x in second]
    told = [requests_of(x.lines()) for x in (first, second)]
    assert [causes_of(x.values()) for x in told] == [causes_of(told[0].values())] * 2


def test_what_a_store_read_is_no_miss_and_what_it_says_later_counts() -> None:
    tree = PrefixTree(PagePool(4), 1)
    events = tree.record()
    tree.match([1, 2, 3, 4])
    events.note("miss", [], cause="damaged", first=2, num_pages=1, what="its checksum")
    events.note("read", [0, 1], first=0)
    (request,) = requests_of(events.lines()).values()
    assert request.read == {0, 1}
    assert request.misses == {
        2: {"cause": "damaged", "what": "its checksum"}, 3: {"cause": "below", "at": 0},
    }  # fmt: skip


def test_the_table_and_json_say_the_same(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "replay", str(trace), "--capacity", "10k", "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["num_pages"] == 20 and said["found"] + said["missed"] == said["asked"]
    assert main(["trace", "replay", str(trace), "--capacity", "10k"]) == 0
    table = capsys.readouterr().out
    assert all(f"{number:,}  {cause}" in table for cause, number in said["causes"].items())


def test_why_names_each_missed_page_of_a_request(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["trace", "replay", str(trace), "--capacity", "10k", "--why"]
    assert main([*options, "1"]) == 0
    assert capsys.readouterr().out == "page 0: never stored\n"
    assert main([*options, "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": 0, "cause": "never stored"}
    lines = []
    for request in range(2, 60, 5):
        main([*options, str(request)])
        lines += capsys.readouterr().out.splitlines()
    assert any("by request" in x and "more pages" in x for x in lines)
    assert main([*options, "1000"]) == 2
    assert "--why must be a request from 1 to 301, got 1000" in capsys.readouterr().err


def test_a_replayed_file_is_read_again_and_viewed(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events, page = tmp_path / "e.jsonl", tmp_path / "page.html"
    assert main(["trace", "replay", str(trace), "--capacity", "10k", "--events", str(events)]) == 0
    first = capsys.readouterr().out
    assert main(["trace", "replay", str(events)]) == 0
    assert capsys.readouterr().out == first  # of as many pages as were recorded
    head, *lines = read_lines(events)
    assert head["page_size"] == BLOCK_TOKENS
    assert all(x["at"] % BLOCK_TOKENS == 0 for x in lines if x.get("cause") == "tokens differ")
    assert main(["view", str(events), "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "://" not in text


def test_a_model_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    prompt, events = tmp_path / "prompt.txt", tmp_path / "e.jsonl"
    prompt.write_text("def main(argv):\n    return argv\n" * 6)
    texts = ["--prompt-file", str(prompt)] * 2
    options = ["--max-new-tokens", "2", "--pages", "20"]
    assert main(["trace", "record", str(events), *texts, *options]) == 0
    first, second = requests_of(read_lines(events)).values()
    assert not first.found and causes_of([first]).keys() == {"never stored", "below"}
    assert second.found == len(second.nodes) == len(first.nodes) and not second.misses
    lines = read_lines(events)
    assert "".join(x["text"] for x in lines if "node" in x).startswith("def main(argv)")
    assert lines[0]["page_bytes"] > 0
    assert [x["name"] for x in lines if x.get("kind") == "name"] == ["prompt.txt"] * 2
    assert main(["trace", "record", str(events), *texts[:2], *options, "--no-text"]) == 0
    assert not any("text" in x or "tokens" in x for x in read_lines(events) if "node" in x)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        '{"format": "kvloom-events/2", "page_size": 1}',
        '{"format": "kvloom-events/1"}',
        "nonsense",
    ],
)
def test_a_file_of_another_format_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(line)
    with pytest.raises(ArgumentError, match=r"^events must "):
        read_lines(file)


@pytest.mark.parametrize(
    "line",
    [
        {"node": "1", "parent": None},
        {"t": 0, "kind": "hit", "request": 1, "pages": [1]},
        {"t": 0, "kind": "release", "request": 1, "pages": ["1"]},
        {"t": -1, "kind": "release", "request": 1, "pages": [1]},
        {"t": 0, "kind": "release", "pages": [1]},
        {"t": 0, "kind": "draft", "request": 1, "pages": [], "drafted": 3},
    ],
    ids=str,
)
def test_a_line_that_is_none_of_a_recording_is_named(line: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"format": "kvloom-events/1", "page_size": 1}\n' + json.dumps(line) + "\n")
    with pytest.raises(ArgumentError, match=r"^events must be of format kvloom-events/1, got line 2: '{"):
        read_lines(file)


def test_bad_options_are_named(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, sentence in (
        (["replay", "/nowhere"], "trace must be a file of JSON lines"),
        (
            ["replay", str(trace), "--capacity", "x"],
            "--capacity must be a number of tokens such as 500k or 3M, got 'x'",
        ),
        (["replay", str(trace), "--events", str(trace)], "--events must be another file than the one"),
        (["replay", str(trace), "--capacity", "5"], "--capacity must be at least 512 tokens, got 5"),
        (["record", "x", "--prompt-file", "/nowhere"], "--prompt-file must be text in UTF-8"),
        (["record", "x", "--prompt-file", str(trace), "--pages", "0"], "--pages must be at least 1, got 0"),
    ):
        assert main(["trace", *options]) == 2
        assert sentence in capsys.readouterr().err
    with pytest.raises(ArgumentError, match=r"^num_pages must be at least 1, got 0"):
        replay([Lookup(0.0, "", 1, [1])], 0)


def test_a_view_that_cannot_be_is_one_line_and_loses_no_recording(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "events.html"
    assert main(["trace", "replay", str(trace), "--events", str(page)]) == 0
    before = page.read_bytes()
    for args, sentence in (
        (["/"], "events must be a file of JSON lines"),
        (["."], "events must be a file of JSON lines"),
        ([str(page)], "--out must be another file than the one that is read"),
    ):
        assert main(["view", *args]) == 2
        assert sentence in capsys.readouterr().err
    assert page.read_bytes() == before


@pytest.mark.parametrize("command", [["simulate"], ["trace", "replay"], ["view"]])
def test_lines_that_nest_too_deep_are_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deep.jsonl"
    file.write_text("[" * 100_000)
    assert main([*command, str(file)]) == 2
    assert "line 1" in capsys.readouterr().err


def test_a_capacity_beyond_all_memory_is_that_of_all_pages(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for capacity in ("1G", "999999999999G"):
        assert main(["trace", "replay", str(trace), "--capacity", capacity, "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[1].pop("num_pages") > said[0].pop("num_pages")
    assert said[0] == said[1] and said[0]["found"]
