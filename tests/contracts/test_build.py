"""What the build looks for: the torch of the environment that it is isolated from, or else one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"

ISOLATED = """
import sys
sys.path = [sys.argv[1], *(path for path in sys.path if "site-packages" not in path)]
from importlib.util import find_spec
assert find_spec("torch") is None
from find_torch import find_torch
print(find_torch())
"""


def test_an_isolated_build_finds_the_torch_of_its_environment() -> None:
    command = [sys.executable, "-c", ISOLATED, str(SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == Path(torch.__file__).parent


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_torch_is_asked_for_only_where_there_is_none(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.chdir(SCRIPTS.parent)
    import build_backend

    assert not any(wanted.startswith("torch") for wanted in getattr(build_backend, hook)())
    monkeypatch.setattr(build_backend, "find_torch", lambda: None)
    assert "torch>=2.10" in getattr(build_backend, hook)()
