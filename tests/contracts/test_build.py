"""What the build looks for: the torch of the environment that it is isolated from, or else one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvloom.ops.impl import cpu

SCRIPTS = Path(__file__).parents[2] / "scripts"

ISOLATED = """
import sys
sys.path = [sys.argv[1], *(path for path in sys.path if "site-packages" not in path)]
from importlib.util import find_spec
assert find_spec("torch") is None
from find_torch import find_torch
print(find_torch())
"""


@pytest.mark.process
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


OLDEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
"""What a Linux of manylinux_2_28 has."""


@pytest.mark.skipif(sys.platform != "linux" or cpu.ISA is None, reason="no library of Linux is compiled")
def test_the_library_asks_for_nothing_newer_than_its_wheel_says() -> None:
    (library,) = (path for path in torch.ops.loaded_libraries if "kvloom" in Path(path).name)
    elffile = pytest.importorskip("elftools.elf.elffile", reason="auditwheel brings it")
    with Path(library).open("rb") as file:
        needs = elffile.ELFFile(file).get_section_by_name(".gnu.version_r").iter_versions()
        names = [version.name for _, versions in needs for version in versions]
    needed = [(kind, tuple(map(int, n.split(".")))) for kind, _, n in (x.partition("_") for x in names)]
    assert {"GLIBC", "GLIBCXX"} <= {kind for kind, _ in needed}
    assert [x for x in needed if x[0] in OLDEST and x[1] > OLDEST[x[0]]] == []
