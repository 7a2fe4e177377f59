"""What commands print: boxes and progress are for terminals, rows in a line for pipes."""

from __future__ import annotations

import os
import pty
import re
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

import pytest

from kvloom import terminal

pytest.importorskip("rich")

LONG = "a text of " + "many words " * 40


def printed() -> None:
    table = terminal.table("name", "bytes", title="[runs]")
    table.add_row(LONG, "1,024")
    table.add_row("[bold]x", "7")
    terminal.console().print(table)


def test_a_row_is_a_line_of_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    printed()
    title, head, first, second = capsys.readouterr().out.splitlines()
    assert title.strip() == "[runs]" and head.split() == ["name", "bytes"]
    assert first.split() == [*LONG.split(), "1,024"]
    assert second.split() == ["[bold]x", "7"]


def on_a_screen(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``work`` writes to a terminal of 60 columns, which is both outputs."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    found = bytearray()

    def read() -> None:
        with suppress(OSError):  # closed
            while piece := os.read(ours, 1 << 16):
                found.extend(piece)

    reader = Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as file, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", file)
        patch.setattr("sys.stderr", file)
        work()
    reader.join()
    os.close(ours)
    return found.decode()


def test_a_terminal_has_boxes_and_folds_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_a_screen(printed, monkeypatch)
    assert "│" in text and "1,024" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= 60


def test_progress_is_of_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        assert [*terminal.tracked([1, 2, 3], "things")] == [1, 2, 3]
        assert [*terminal.counted(iter([4, 5]), "others")] == [4, 5]

    text = on_a_screen(work, monkeypatch)
    assert "things" in text and "others" in text


def test_a_pipe_has_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*terminal.tracked([1, 2, 3], "things")] == [1, 2, 3]
    with terminal.progress("layers", 2) as tell:
        tell(1)
    assert capsys.readouterr() == ("", "")


def test_a_report_is_a_table_of_names_and_numbers() -> None:
    numbers = {"kv": "int8", "nbytes": 2_500_000, "none": None, "layers": [0, 2], "store": {"runs<1>": 3}}
    numbers["smoothing"] = {"gains only": [0, 3]}
    report = terminal.TableReport(numbers)
    assert report == numbers
    assert str(report).splitlines() == [
        "kind                      int8",
        "bytes                     2,500,000 (2.5 MB)",
        "layers                    0, 2",
        "store: runs<1>            3",
        "smoothing of layers 0, 3  gains only",
    ]
    assert "<td>store: runs&lt;1&gt;</td><td>3</td>" in report._repr_html_()


def test_waiting_is_said_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wait() -> None:
        with terminal.waiting("comparing"):
            pass

    assert "comparing" in on_a_screen(wait, monkeypatch)
    wait()
    assert capsys.readouterr() == ("", "")
