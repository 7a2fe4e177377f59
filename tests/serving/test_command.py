"""What ``kvloom serve`` refuses before it imports anything large."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvloom.cli import main
from kvloom.errors import ArgumentError
from kvloom.models import bundled_model_path
from kvloom.serving import PACKAGES, expect_installed, settings
from kvloom.serving.settings import Settings, is_loopback, keys_from

BUNDLED = str(bundled_model_path())
LIGHT = """
import sys
for name in {hidden}:
    sys.modules[name] = None
from importlib import util
find = util.find_spec
util.find_spec = lambda name: None if name in {hidden} else find(name)
from kvloom.cli import main
status = main({arguments})
print("torch" in sys.modules, file=sys.stderr)
sys.exit(status)
"""


def run(*arguments: str, hidden: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    code = LIGHT.format(hidden=hidden, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


MISSING = [name for name in (*PACKAGES, "openai") if find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"without {', '.join(MISSING)} no server is tested")
def test_a_server_can_be_tested() -> None:
    expect_installed()


@pytest.mark.process
def test_missing_packages_are_named_with_the_command_that_helps() -> None:
    done = run("serve", hidden=("starlette", "uvicorn"))
    assert done.returncode == 2
    assert done.stderr == "kvloom: this needs starlette, uvicorn: pip install starlette uvicorn\nFalse\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere"], "model must be a local folder with a config.json"),
        (["--kv", "int9"], "--kv must be one of auto"),
        (["--values", "int9"], "--values must be one of auto"),
        (["--tls-key", "key.pem"], "--tls-certificate must be given with its key, got one of the two"),
        (
            ["--tls-certificate", "/nowhere", "--tls-key", "/nowhere"],
            "--tls-certificate and its key must be files in PEM without a password, got '/nowhere'",
        ),
        (
            ["--host", "0.0.0.0"],
            "--host must be a loopback address unless KVLOOM_API_KEY is set, got '0.0.0.0'",
        ),
        (["--host", "\xe4..b", "--api-key", "k"], "--host must be a name or an address, got '\xe4..b'"),
        (["--chat-template", "/nowhere"], "--chat-template must be text in UTF-8"),
        (["--record", "/nowhere/events.jsonl"], "--record must be a file that can be written"),
        (["--session-share", "2"], "--session-share must be from 0 to 1, got 2.0"),
        (["--session-seconds", "0"], "--session-seconds must be from 0.01 to 31,536,000, got 0.0"),
        (["--record-text"], "--record-text must be given with --record, got it alone"),
        (["--drafts", "small"], "--drafts must be given with MODEL if it has a folder, got small alone"),
        ([BUNDLED, "--drafts", "small"], "model must be a local folder with a config.json, got 'small'"),
        (["--api-key", " "], "--api-key must be printable ASCII"),
        (
            ["--allow-origin", "*"],
            "--allow-origin must be such as http://localhost:3000, without a path, got '*'",
        ),
        (["--allow-origin", "null"], "--allow-origin must be such as"),
        (["--allow-origin", "http://localhost:3000/"], "--allow-origin must be such as"),
    ],
)
def test_bad_options_are_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="the server's packages are not installed")
    pytest.importorskip("prometheus_client", reason="the server's packages are not installed")
    monkeypatch.delenv(settings.KEYS_VARIABLE, raising=False)
    assert main(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvloom: ") and words in line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--page-size", "3"),
        ("--page-size", "0"),
        ("--pages", "0"),
        ("--max-batch-tokens", "0"),
        ("--max-tokens", "0"),
        ("--max-answers", "0"),
        ("--max-body-bytes", "0"),
        ("--max-header-bytes", "0"),
        *[
            (option, value)
            for option in (
                "--page-size",
                "--pages",
                "--max-batch-tokens",
                "--port",
                "--max-tokens",
                "--max-answers",
                "--max-body-bytes",
                "--max-header-bytes",
            )
            for value in ("-1", "1" + "0" * 30)
        ],
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_option(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", option, value, "/nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvloom: {option} must be from ") and line.endswith(f", got {value}")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf", "1e300"])
@pytest.mark.parametrize("option", ["--max-seconds", "--body-seconds", "--header-seconds", "--drain-seconds"])
def test_seconds_that_cannot_be_are_refused_by_their_option(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", f"{option}={value}", "/nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvloom: {option} must be from 0.01 to 31,536,000, got ")


def test_the_page_of_documentation_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = {*re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)}
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert {"--max-body-bytes", "--tls-key", "--kv"} <= told
    assert sorted(told - {*re.findall(r"--[a-z-]+", page)}) == []


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("localhost.", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_only_loopback_needs_no_key(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside
    assert Settings(host=host, api_keys=("k",)).host == host
    if not inside:
        with pytest.raises(ArgumentError, match="host must be a loopback address"):
            Settings(host=host)


def test_keys_come_from_the_command_line_and_the_environment() -> None:
    assert keys_from(["a"], {settings.KEYS_VARIABLE: "b, c,"}) == ("a", "b", "c")
    assert keys_from([], {}) == ()


@pytest.mark.process
def test_a_server_that_is_not_started_imports_no_torch(tmp_path: Path) -> None:
    done = run("serve", str(tmp_path))
    assert done.returncode == 2 and done.stderr.endswith("False\n")
