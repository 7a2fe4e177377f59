"""What ``kvloom serve`` refuses before it imports anything large."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvloom.cli import main
from kvloom.errors import ArgumentError
from kvloom.serving import PACKAGES, expect_installed, settings
from kvloom.serving.settings import Settings, is_loopback, keys_from

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


def test_missing_packages_are_named_with_the_command_that_helps() -> None:
    done = run("serve", hidden=("starlette", "uvicorn"))
    assert done.returncode == 2
    assert done.stderr == "kvloom: this needs starlette, uvicorn: pip install starlette uvicorn\nFalse\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere"], "model must be a local folder with a config.json"),
        (["--kv", "int9"], "--kv must be one of auto"),
        (["--host", "0.0.0.0"], "--host must be a loopback address without an API key, got '0.0.0.0'"),
        (["--port", "70000"], "--port must be 0 to 65535, got 70000"),
        (["--max-tokens", "0"], "--max-tokens must be above 0, got 0"),
        (["--page-size", "-1"], "--page-size must be a positive int, got -1"),
        (["--chat-template", "/nowhere"], "--chat-template must be text in UTF-8"),
        (["--record", "/nowhere/events.jsonl"], "--record must be a file that can be written"),
        (["--record-text"], "--record-text must be given with --record, got it alone"),
        (["--api-key", " "], "api_keys must be printable ASCII"),
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
    ("host", "inside"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
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


def test_a_server_that_is_not_started_imports_no_torch(tmp_path: Path) -> None:
    done = run("serve", str(tmp_path))
    assert done.returncode == 2 and done.stderr.endswith("False\n")
