"""A target that crashes or does not end costs its vector, and not the run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conform.processes import prepared
from conform.test_targets import compiled, needs_cc

pytest.importorskip("safetensors")
pytest.importorskip("rich")
from kvloom.cli import main
from kvloom.conform.isolation import isolated
from kvloom.conform.operators import OPERATORS
from kvloom.conform.outcomes import NoAnswer
from kvloom.conform.running import run
from kvloom.conform.targets import open_target
from kvloom.conform.vectors import Vector, published, read
from kvloom.errors import ArgumentError

pytestmark = pytest.mark.process

FLASH = "vllm.reshape_and_cache_flash"
LEGAL = [vector for vector in read(published(), FLASH) if vector.expected is not None]
TWO = [vector for vector in LEGAL if len(vector.call["slot_mapping"]) == 2]
OTHERS = [vector for vector in LEGAL if len(vector.call["slot_mapping"]) > 2]
MIXED = [OTHERS[0], TWO[0], OTHERS[1]]
ENGINE = """
import os, sys, threading, time
from kvloom.conform import peers


started = []


def answers(**call):
    if not started:
        import multiprocessing

        process = multiprocessing.get_context("spawn").Process(target=print)
        process.start()
        process.join()
        started.append(process.exitcode)
    if len(call["slot_mapping"]) == 2:
        raise ValueError(f"not today: {started}")
    peers.reshape_and_cache_flash(**call)


def leaves(**call):
    os._exit(3)


def exits(**call):
    sys.exit(0)


def waits(**call):
    threading.Event().wait()


"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "isolated_engine.py").write_text(ENGINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with prepared():
        yield "isolated_engine"


def numbers(vectors: list[Vector]) -> list[str]:
    return [vector.name.rpartition("/")[2] for vector in vectors]


@needs_cc
def test_a_crash_is_a_failure_of_its_vector(tmp_path: Path) -> None:
    with prepared(), isolated(f"{compiled(tmp_path)}:crashes") as target:
        report = run(target, MIXED)
    assert [o.status for o in report.outcomes] == ["passed", "failed", "passed"]
    assert [o.message for o in report.failures] == [
        f"crashed at vector {number} (SIGSEGV)" for number in numbers(TWO[:1])
    ]
    assert report.cause is None


@needs_cc
def test_a_call_that_does_not_end_is_a_failure_of_its_vector(tmp_path: Path) -> None:
    with prepared(), isolated(f"{compiled(tmp_path)}:hangs", timeout=3) as target:
        report = run(target, MIXED)
    assert [o.status for o in report.outcomes] == ["passed", "failed", "passed"]
    assert report.failures[0].message == f"no answer within 3 s at vector {numbers(TWO)[0]}"


@needs_cc
def test_a_run_reports_crashes_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, numbered = tmp_path / "r.json", numbers(MIXED[:2])
    words = [f"{compiled(tmp_path)}:crashes", "--timeout", "30", "--json", str(file)]
    chosen = [word for number in numbered for word in ("--vector", number)]
    assert main(["conform", "run", "--dialect", FLASH, *words, *chosen]) == 1
    assert f"crashed at vector {numbered[1]} (SIGSEGV)" in capsys.readouterr().out
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["passed"], report["failed"]) == (1, 1)


@pytest.mark.parametrize(("function", "message"), [("leaves", "status 3"), ("exits", "status 0")])
def test_a_process_that_ends_by_itself_is_a_failure(engine: str, function: str, message: str) -> None:
    with isolated(f"{engine}:{function}") as target:
        report = run(target, LEGAL[:1])
    assert report.failures[0].message == f"ended with {message} at vector 0"


def test_what_a_callable_writes_and_raises_comes_back(engine: str) -> None:
    """It has a process of its own, too."""
    with isolated(f"{engine}:answers") as target:
        report = run(target, read(published(), FLASH))
    assert {outcome.vector.name for outcome in report.failures} == {vector.name for vector in TWO}
    assert {x.message for x in report.failures} == {"a legal call was refused: ValueError: not today: [0]"}
    assert report.count("passed") > len(OTHERS)


def test_strides_and_offsets_are_the_same_in_the_other_process() -> None:
    dialect = "ascend.scatter_pa_kv_cache"
    vectors = [v for v in read(published(), dialect) if v.call.get("scatter_mode") == "Nct"]
    with isolated("kvloom.conform.peers:scatter_pa_kv_cache") as target:
        assert run(target, vectors).passed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("isolated_engine:nothing", "has no attribute 'nothing'"),
        ("not_there_at_all:f", "No module named 'not_there_at_all'"),
        (
            "crashing_import:f",
            r"TARGET must be one that can be opened: crashed while it was opened \(SIGKILL\)",
        ),
    ],
)
def test_what_cannot_be_opened_there_is_said(engine: str, tmp_path: Path, text: str, message: str) -> None:
    kill = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "crashing_import.py").write_text(kill, encoding="utf-8")
    with pytest.raises(ArgumentError, match=message), isolated(text):
        pass


def test_no_process_is_left(engine: str) -> None:
    import multiprocessing

    before = threading.active_count()
    with isolated(f"{engine}:waits", timeout=1) as target:
        assert run(target, LEGAL[:1]).failures[0].message == "no answer within 1 s at vector 0"
    assert multiprocessing.active_children() == [] and threading.active_count() == before


@pytest.mark.parametrize("timeout", ["0", "-1", "nan"])
def test_a_time_limit_is_positive(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dialect", FLASH, "a:b", "--timeout", timeout]
    assert main(["conform", "run", *words]) == 2
    assert "--timeout must be more than 0 seconds" in capsys.readouterr().err


def command(code: str, tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(code, encoding="utf-8")
    return f"command:{sys.executable} {file}"


def test_a_command_that_crashes_does_not_refuse(tmp_path: Path) -> None:
    target = open_target(command("import os\nos.abort()\n", tmp_path))
    refused = [vector for vector in read(published(), FLASH) if vector.expected is None][:1]
    report = run(target, refused)
    assert report.failures[0].message == f"crashed at vector {numbers(refused)[0]} (SIGABRT)"


def test_a_command_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    target = open_target(command(code, tmp_path), timeout=2)
    with pytest.raises(NoAnswer, match="no answer within 2 s at vector 0"):
        target(OPERATORS[FLASH], LEGAL[0], dict(LEGAL[0].call))
