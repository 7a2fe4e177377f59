"""Notebooks of the examples put out what is stored in them; ``make docs`` has what executes them."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))


def stored(path: Path) -> dict[str, Any]:
    """A notebook as JSON."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_every_notebook_has_outputs_and_is_named() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert len(SCRIPT["NOTEBOOKS"]) == 4
    for path in SCRIPT["NOTEBOOKS"]:
        cells = stored(path)["cells"]
        assert any(x.get("outputs") for x in cells) and cells[0]["source"][0].startswith("# ")
        assert f"notebooks/{path.stem}.md" in menu and f"[{path.name}]({path.name})" in listed


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("1,320 bytes, off by 7.10%", "1,320 bytes, off by 7.11%", True),
        ("1,320 bytes, off by 7.10%", "1,321 bytes, off by 7.10%", False),
        ("1,320 bytes, off by 7.1%", "1,320 bytes, off by 7.9%", False),
        ("KL 1.2e-05", "KL 1.21e-05", True),
        ("KL 0.00005", "KL 0.00006", True),
        ("KL 0.00005", "KL 0.00007", False),
        ("int8", "int4", False),
        ("a warning", "", False),
    ],
)
def test_words_and_whole_numbers_are_compared_exactly(before: str, after: str, is_same: bool) -> None:
    notebooks = [
        {"cells": [{"id": "cell-0", "outputs": [{"output_type": "stream", "name": "stdout", "text": text}]}]}
        for text in (before, after)
    ]
    assert (SCRIPT["differences"](*notebooks) == []) is is_same


def test_what_is_printed_is_one_output_however_long_it_took() -> None:
    lines = [
        {"output_type": "stream", "name": name, "text": text}
        for name, text in (("stdout", "a"), ("stdout", "b"))
    ]
    other = {"output_type": "stream", "name": "stderr", "text": "c"}
    shown = {"output_type": "display_data", "data": {}}
    joined = SCRIPT["joined"]([*lines, other, shown, dict(other)])
    assert [x.get("text") for x in joined] == ["ab", "c", None, "c"]


@pytest.mark.process
def test_notebooks_put_out_what_is_stored() -> None:
    pytest.importorskip("nbclient", reason="make docs installs what executes notebooks")
    told = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "notebooks.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, (
        f"{told.stdout}{told.stderr}\nrun: build/docs/bin/python scripts/notebooks.py"
    )
