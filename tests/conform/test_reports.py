"""What a run says, in the terminal, in files and on a page."""

from __future__ import annotations

import html
import json
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conform.processes import prepared

pytest.importorskip("safetensors")
pytest.importorskip("rich")
import kvloom
from kvloom.cli import main

pytestmark = pytest.mark.process

RIGHT = ("vllm.reshape_and_cache", "kvloom.conform.peers:reshape_and_cache")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SWAPPED = """
from kvloom.conform import peers


def swapped(key, value, key_cache, value_cache, slot_mapping):
    peers.reshape_and_cache_flash(value, key, key_cache, value_cache, slot_mapping)
"""


@pytest.fixture
def swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "engine.py").write_text(SWAPPED, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with prepared():
        yield "engine:swapped"


def judge(dialect: str, target: str, *options: str) -> int:
    return main(["conform", "run", "--dialect", dialect, target, *options])


@dataclass
class Judged:
    """A run: its exit status, what it printed, and its files by kind."""

    status: int
    printed: str
    files: dict[str, Path]


@pytest.fixture(scope="module", params=[True, False], ids=["right", "wrong"])
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """One run of a right target and one of a wrong target, which all tests of reports read."""
    folder = tmp_path_factory.mktemp("judged")
    files = {kind: folder / f"report.{kind}" for kind in ("json", "junit", "html")}
    options = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    (folder / "engine.py").write_text(SWAPPED, encoding="utf-8")
    target = RIGHT if request.param else ("vllm.reshape_and_cache_flash", "engine:swapped")
    with prepared(), pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        return Judged(judge(*target, *options), out.getvalue(), files)


def test_exit_status_is_0_where_all_passed_and_1_where_not(judged: Judged) -> None:
    report = json.loads(judged.files["json"].read_text(encoding="utf-8"))
    assert judged.status == (report["failed"] > 0)
    assert report["passed"] > 20 and (report["failed"] == 0) == (report["cause"] is None)


def test_the_terminal_says_what_to_fix(judged: Judged) -> None:
    is_wrong = judged.status == 1
    for words in (
        "failed vllm.reshape_and_cache_flash/",
        "first at key_cache[nb = ",
        "failures: value for key: keys are stored where values belong",
    ):
        assert (words in judged.printed) == is_wrong
    assert not is_wrong or ("expected " in judged.printed and "(0x" in judged.printed)


def test_files_say_the_same(judged: Judged) -> None:
    report = json.loads(judged.files["json"].read_text(encoding="utf-8"))
    suite = ElementTree.parse(judged.files["junit"]).getroot()
    assert int(suite.get("failures", "")) == report["failed"] == len(suite.findall("testcase/failure"))
    assert len(suite.findall("testcase")) == int(suite.get("tests", "")) == len(report["outcomes"])
    page = judged.files["html"].read_text(encoding="utf-8")
    said = json.loads(judged.files["json"].read_text(encoding="utf-8"))["machine"]
    assert said in html.unescape(page) and f"kvloom {kvloom.__version__}, torch " in said
    assert page.count("<details") == report["failed"]
    assert "http" not in page and "src=" not in page  # it needs nothing else
    if judged.status == 1:
        assert (
            report["failed"] > 20 and report["cause"]["name"] == "value for key" and "value for key" in page
        )
        failed = next(each for each in report["outcomes"] if each["status"] == "failed")
        assert set(failed["difference"]["at"]) == {"nb", "bs", "H", "D"}


def test_one_vector_can_be_run_again(swapped: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    judge("vllm.reshape_and_cache_flash", swapped, "--vector", "3", "--json", str(file))
    names = [each["vector"] for each in json.loads(file.read_text(encoding="utf-8"))["outcomes"]]
    assert names == ["vllm.reshape_and_cache_flash/3"]


def test_more_vectors_are_made_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    with prepared():
        assert judge(*RIGHT, "--seed", "5", "--count", "9") == 0
    assert "29 passed, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dialect", "nothing", "a:b"], "--dialect must be one of pmx.key_value_cache"),
        (["--dialect", RIGHT[0], RIGHT[1], "--count", "0"], "--count must be at least 1"),
        (
            ["--dialect", RIGHT[0], RIGHT[1], "--count", "1", "--vectors", "x"],
            "--vectors must not be given with",
        ),
    ],
)
def test_wrong_options_are_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", "run", *options]) == 2
    assert message in capsys.readouterr().err


def pixels(file: Path) -> set[tuple[int, ...]]:
    """The colors of a PNG whose rows have no filter but those of its kind."""
    data = file.read_bytes()
    at, parts, width, depth = 8, b"", 0, 3
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, _, _, color = struct.unpack(">IIBB", body[:10])
            depth = {2: 3, 6: 4}[color]
        parts += body if kind == b"IDAT" else b""
        at += 12 + length
    raw, stride, found, before = zlib.decompress(parts), width * depth, set(), bytes(width * depth)
    for start in range(0, len(raw), stride + 1):
        kind, row = raw[start], bytearray(raw[start + 1 : start + 1 + stride])
        for i in range(stride):
            left, up = row[i - depth] if i >= depth else 0, before[i]
            corner = before[i - depth] if i >= depth else 0
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda x: abs(guess - x))
            row[i] = (row[i] + (0, left, up, (left + up) // 2, nearest)[kind]) & 255
        found |= {tuple(row[i : i + 3]) for i in range(0, stride, depth)}
        before = bytes(row)
    return found


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_page_is_drawn(judged: Judged, tmp_path: Path) -> None:
    page, picture = judged.files["html"], tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,400"]
    flags.append(f"--user-data-dir={tmp_path / 'chromium'}")
    done = subprocess.run(
        [str(CHROMIUM), *flags, f"--screenshot={picture}", page.as_uri()],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert picture.exists(), done.stderr[-500:]
    good, bad = (26, 127, 75), (197, 48, 59)
    colors, passes = pixels(picture), judged.status == 0
    assert good in colors and (bad in colors) != passes
    assert ("conforms" if passes else "Cause of ") in page.read_text(encoding="utf-8")
