"""What a run says, in the terminal, in files and on a page."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("rich")
from kvloom.cli import main

RIGHT = ("vllm.reshape_and_cache", "kvloom.conform.peers:reshape_and_cache")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SWAPPED = """
from kvloom.conform import peers


def swapped(key, value, key_cache, value_cache, slot_mapping):
    peers.reshape_and_cache_flash(value, key, key_cache, value_cache, slot_mapping)
"""


@pytest.fixture
def swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "engine.py").write_text(SWAPPED, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return "engine:swapped"


def judge(dialect: str, target: str, *options: str) -> int:
    return main(["conform", "run", "--dialect", dialect, target, *options])


def test_exit_status_is_0_where_all_passed_and_1_where_not(swapped: str) -> None:
    assert judge(*RIGHT) == 0
    assert judge("vllm.reshape_and_cache_flash", swapped) == 1


def test_the_terminal_says_what_to_fix(swapped: str, capsys: pytest.CaptureFixture[str]) -> None:
    judge("vllm.reshape_and_cache_flash", swapped)
    out = capsys.readouterr().out
    assert "failed vllm.reshape_and_cache_flash/" in out
    assert "first at key_cache[nb = " in out and "expected " in out and "(0x" in out
    assert "failures: value for key: keys are stored where values belong" in out


def test_files_say_the_same(swapped: str, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    options = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    judge("vllm.reshape_and_cache_flash", swapped, *options)
    report = json.loads(files["json"].read_text(encoding="utf-8"))
    assert report["failed"] > 20 and report["cause"]["name"] == "value for key"
    failed = next(each for each in report["outcomes"] if each["status"] == "failed")
    assert set(failed["difference"]["at"]) == {"nb", "bs", "H", "D"}
    suite = ElementTree.parse(files["junit"]).getroot()
    assert int(suite.get("failures", "")) == report["failed"] == len(suite.findall("testcase/failure"))
    assert len(suite.findall("testcase")) == int(suite.get("tests", "")) == len(report["outcomes"])
    page = files["html"].read_text(encoding="utf-8")
    assert page.count("<details") == report["failed"] and "value for key" in page
    assert "http" not in page and "src=" not in page  # it needs nothing else


def test_one_vector_can_be_run_again(swapped: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    judge("vllm.reshape_and_cache_flash", swapped, "--vector", "3", "--json", str(file))
    names = [each["vector"] for each in json.loads(file.read_text(encoding="utf-8"))["outcomes"]]
    assert names == ["vllm.reshape_and_cache_flash/3"]


def test_more_vectors_are_made_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
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
@pytest.mark.parametrize("passes", [True, False])
def test_the_page_is_drawn(swapped: str, tmp_path: Path, passes: bool) -> None:
    dialect, target = RIGHT if passes else ("vllm.reshape_and_cache_flash", swapped)
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    judge(dialect, target, "--html", str(page))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=900,700"]
    flags.append(f"--user-data-dir={tmp_path / 'chromium'}")
    done = subprocess.run(
        [str(CHROMIUM), *flags, f"--screenshot={picture}", page.as_uri()],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert picture.exists(), done.stderr[-500:]
    good, bad = (26, 127, 75), (197, 48, 59)
    colors = pixels(picture)
    assert good in colors and (bad in colors) != passes
    dumped = subprocess.run(
        [str(CHROMIUM), *flags, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ("conforms" if passes else "Cause of ") in dumped.stdout
