"""``kvloom store`` as a user runs it."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
from store.runs import fingerprint, make_run

from kvloom.cli import main
from kvloom.models import bundled_model_path
from kvloom.store import KVStore
from kvloom.store.backends.files import Files
from kvloom.store.digests import TextDigests
from kvloom.store.survey import look_at, runs_of, verdicts_on
from kvloom.store.tiers.limits import evictions

TOKENS = list(range(20, 36))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of two runs."""
    files = Files(tmp_path / "store")
    for first, end in ((0, 8), (8, 12)):
        run, data = make_run(TOKENS[:end], first)
        files.put_if_absent(run.name, [run.head(), data])
    return tmp_path / "store"


def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"), key=lambda x: int(x.name.split("-")[-2]))


def lines(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> list[dict[str, object]]:
    try:
        assert main(["store", *args, "--json"]) == status
    except SystemExit as exit:
        assert exit.code == status
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_ls_lists_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, "ls", str(folder))
    assert sorted((x["first"], x["end"], x["page_size"]) for x in found) == [(0, 8, 2), (8, 12, 2)]
    assert main(["store", "ls", f"file://{folder}"]) == 0
    text = capsys.readouterr().out
    assert "0-8" in text
    assert "int8:g2" in text
    assert "2 runs, " in text


def test_looking_is_no_use(folder: Path) -> None:
    before = [path.stat().st_mtime_ns for path in paths(folder)]
    for action in ("ls", "verify"):
        assert main(["store", action, str(folder)]) == 0
    assert [path.stat().st_mtime_ns for path in paths(folder)] == before


def test_show_tells_everything_of_the_run_that_a_name_begins(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = paths(folder)[0].relative_to(folder).as_posix()
    (shown,) = lines(capsys, "show", str(folder), name[:24])
    assert shown["name"] == name
    assert shown["fingerprint"] == json.loads(fingerprint().to_json())
    assert main(["store", "show", str(folder), name]) == 0
    assert "fingerprint weights     wwwwwwww" in capsys.readouterr().out
    assert main(["store", "show", str(folder), "x"]) == 2
    assert "NAME must be the beginning of one run's name" in capsys.readouterr().err


def test_verify_finds_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [x["problem"] for x in lines(capsys, "verify", str(folder))] == ["", ""]
    path = paths(folder)[1]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    problems = [x["problem"] for x in lines(capsys, "verify", str(folder), status=1)]
    assert sorted(problems) == ["", "page 1 of head 1 does not have its checksum"]
    with pytest.raises(SystemExit):
        main(["store", "verify", str(folder)])
    assert "1 of 2 runs are whole" in capsys.readouterr().out


def test_gc_removes_the_end_of_a_text_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = paths(folder)
    stamp = (first.stat().st_atime_ns, first.stat().st_mtime_ns)
    os.utime(last, ns=stamp)
    total = first.stat().st_size + last.stat().st_size
    assert lines(capsys, "gc", str(folder), "--max-bytes", str(total)) == []
    (removed,) = lines(capsys, "gc", str(folder), "--max-bytes", str(total - 1))
    assert removed["name"] == last.relative_to(folder).as_posix()
    assert main(["store", "gc", str(folder), "--max-age", "1"]) == 0
    assert "0 runs removed, 0 bytes; 1 runs kept" in capsys.readouterr().out
    os.utime(first, (0, 0))
    assert len(lines(capsys, "gc", str(folder), "--max-age", "1")) == 1
    assert main(["store", "gc", str(folder), "--max-bytes", "-1"]) == 2


@pytest.mark.parametrize("is_command", [True, False])
def test_why_says_when_a_page_was_evicted(is_command: bool, folder: Path) -> None:
    first, last = paths(folder)
    os.utime(last, (0, 0))
    limit = first.stat().st_size + last.stat().st_size - 1
    began = int(time.time())
    if is_command:
        assert main(["store", "gc", str(folder), "--max-bytes", str(limit)]) == 0
    else:
        with KVStore(f"file://{folder}", max_bytes=limit) as store:
            store.tiers[0]._room.make(0)
            assert store.tiers[0].counts["runs_evicted"] == 1
    # The text leaves the run that was evicted behind its first page.
    *stored, evicted, never = reasons(folder, [*TOKENS[:10], 0, 0])
    assert stored == ["stored"] * 4
    when = datetime.strptime(evicted, "evicted %Y-%m-%d %H:%M:%S UTC").replace(tzinfo=timezone.utc)
    assert began <= when.timestamp() <= time.time()
    assert never == "never stored"
    assert sum(x.stat().st_size for x in folder.rglob("*") if x.is_file()) <= limit
    assert [len(x) for x in (list(folder.glob("evicted/*")), paths(folder))] == [1, 1]

    save_again = make_run(TOKENS[:12], 8)
    Files(folder).put_if_absent(save_again[0].name, [save_again[0].head(), save_again[1]])
    assert reasons(folder, TOKENS[:12]) == ["stored"] * 6


def test_what_remembers_evictions_goes_with_age_and_bytes(folder: Path) -> None:
    for _ in range(2):
        assert main(["store", "gc", str(folder), "--max-bytes", "0"]) == 0
    assert not [x for x in folder.rglob("*") if x.is_file()]


def reasons(folder: Path, tokens: list[int], salt: str = "", **changes: str) -> list[str]:
    files, whose = Files(folder), fingerprint(**changes)
    objects = list(files.list_stored())
    found = [look_at(files, x) for x in runs_of(objects)]
    evicted = evictions(files, objects, whose.folder)
    return [x.reason for x in verdicts_on(found, evicted, whose, salt, tokens, 2)]


def test_why_says_what_differs(folder: Path) -> None:
    assert reasons(folder, TOKENS) == ["stored"] * 6 + ["never stored"] * 2
    other = [*TOKENS[:5], 99, *TOKENS[6:8]]
    assert reasons(folder, other) == ["stored"] * 2 + ["tokens differ at index 5"] * 2
    assert reasons(folder, TOKENS[:4], "tenant") == ["another salt"] * 2
    assert reasons(folder, TOKENS[:2], weights="x") == ["another model: weights is wwwwwwww, not x"]
    paths(folder)[0].unlink()
    assert reasons(folder, TOKENS[:12])[4:] == ["stored, after pages that are not"] * 2


def test_why_says_what_is_damaged(folder: Path) -> None:
    path = paths(folder)[1]
    path.write_bytes(path.read_bytes()[:-1])
    assert reasons(folder, TOKENS[:12])[5].startswith("damaged: the file must have")
    with KVStore(f"file://{folder}") as store:
        prefixes = TextDigests(fingerprint().digest, make_run(TOKENS)[0].salt, TOKENS)
        assert [x.end for x in store.tiers[0].catalog.find(fingerprint(), prefixes, 0, 12, None)] == [8]
    assert reasons(folder, TOKENS[:12])[5].startswith("damaged")


def test_generate_reads_its_prompt_the_second_time_and_why_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n")
    folder = str(tmp_path / "store")
    command = ["generate", "--prompt-file", str(prompt), "--max-new-tokens", "2", "--store", folder]
    outputs = []
    for expected in ("no prompt tokens were read from", "prompt tokens read from"):
        assert main(command) == 0
        text = capsys.readouterr()
        assert expected in text.err
        outputs.append(text.out)
    assert outputs[0] == outputs[1]
    model = str(bundled_model_path())
    found = lines(capsys, "why", folder, str(prompt), "--model", model)
    assert found
    assert {x["reason"] for x in found} == {"stored"}
    found = lines(capsys, "why", folder, str(prompt), "--kv", "int8")
    assert str(found[0]["reason"]).startswith("another model: layers is ")
    assert main(["store", "why", folder, str(prompt), "--salt", "x"]) == 0
    assert "another salt" in capsys.readouterr().out

    file, other = str(tmp_path / "prompt.safetensors"), str(tmp_path / "other")
    (saved,) = lines(capsys, "convert", folder, file, str(prompt))
    assert saved["stored"] == found[-1]["end"]
    assert main(["store", "convert", file, other, str(prompt)]) == 0
    assert f"{saved['stored']} of {saved['tokens']} tokens are in {other}" in capsys.readouterr().out
    assert {x["reason"] for x in lines(capsys, "why", other, str(prompt))} == {"stored"}


@pytest.mark.parametrize("args", [["ls", "ftp://x"], ["why", "memory://", "x", "--page-size", "0"]])
def test_what_is_wrong_is_named(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", *args]) == 2
    assert " must be " in capsys.readouterr().err


@pytest.mark.parametrize("url", ["", "redis://name:secret@[::1/0", "file://[x", "http://[::1"])
def test_what_is_no_store_is_one_line_without_its_password(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in (["store", "ls", url], ["generate", "--prompt", "x", "--store", url]):
        assert main(args) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "store must be a" in line and "secret" not in line
