"""Page bookkeeping is integers only: the standard library and kvloom's errors are all it needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvloom.paging

pytestmark = pytest.mark.process

SOURCES = sorted(Path(kvloom.paging.__file__).parent.glob("*.py"))


def test_paging_imports_no_torch() -> None:
    code = "import sys, kvloom.paging; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_source_imports_the_standard_library_and_errors_only(path: Path) -> None:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    ours = {name for name in names if name.startswith("kvloom")}
    assert {name.split(".")[0] for name in names - ours} <= sys.stdlib_module_names
    assert all(name == "kvloom.errors" or name.startswith("kvloom.paging.") for name in ours)
