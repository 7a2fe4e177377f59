"""What ``make check`` says of sizes and names, and a hook of the messages of commits."""

from __future__ import annotations

import graphlib
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

grimp = pytest.importorskip("grimp")
ROOT = Path(__file__).parents[2]


def script(name: str) -> Any:
    """A module of scripts, which are on no path."""
    spec = spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rules, commit_message = script("rules"), script("commit_message")
PYTHON = '''"""A docstring
of two lines."""

import os
from sys import (
    path,
)

# a comment
text = """
not a docstring"""


def function(x):
    """Of one line."""

    return [  # three lines
        x,
    ]
'''
CPP = """// A comment
#include <vector>
/* of
   two lines */

int main() {  // code
    return 0; /* and a comment */
}
"""


def test_lines_of_code_are_no_docstrings_comments_blanks_or_imports() -> None:
    assert rules.lines_of_python(PYTHON) == 2 + 1 + 3
    assert rules.lines_of_cpp(CPP) == 3


def graph_of(*imports: str) -> Any:
    graph = grimp.ImportGraph()
    graph.add_module("p")
    for text in imports:
        importer, imported = text.split(" ")
        graph.add_import(importer=importer, imported=imported)
    return graph


def test_floors_are_modules_in_a_row_and_a_folder_is_one() -> None:
    graph = graph_of("p.a p.b", "p.b p.c.x", "p.c.x p.c.y", "p.c.y p.d", "p.e p.d")
    graph.add_module("p.c")
    assert rules.floors(graph, "p") == 4 and rules.floors(graph, "p.c") == 2


def test_a_circle_has_no_floors() -> None:
    with pytest.raises(graphlib.CycleError):
        rules.floors(graph_of("p.a p.b", "p.b p.a"), "p")


@pytest.mark.parametrize(
    ("count", "exceptions", "expected"),
    [
        (25, {}, []),
        (26, {}, ["a.py:A must have at most 25 methods, got 26"]),
        (30, {"a.py:A": [30, "why"]}, []),
        (31, {"a.py:A": [30, "why"]}, ["a.py:A must have at most 30 methods, got 31"]),
        (25, {"a.py:A": [30, "why"]}, ["a.py:A needs no exception of methods, got 25 of 25"]),
        (1, {"b.py:B": [30, "why"]}, ["b.py:B needs no exception of methods, got 0 of 25"]),
    ],
)
def test_what_is_said(count: int, exceptions: dict[str, Any], expected: list[str]) -> None:
    found: dict[str, dict[str, int]] = {rule: {} for rule in rules.MOST}
    assert rules.broken(found | {"methods": {"a.py:A": count}}, {"methods": exceptions}) == expected


def test_what_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "p"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("class A:\n    def f(self): ...\n    async def g(self): ...\n")
    (folder / "b.py").write_text("class A: ...\nclass _B: ...\n")
    found = rules.measured(tmp_path, graph_of("p.a p.b"))
    assert found == {
        "lines": {"src/p/a.py": 3, "src/p/b.py": 2},
        "methods": {"src/p/a.py:A": 2, "src/p/b.py:A": 0, "src/p/b.py:_B": 0},
        "files": {"src/p": 2},
        "floors": {"src/p": 2},
        "names": {"A": 2, "_B": 0},
    }


def test_a_decision_has_a_number_of_its_own() -> None:
    names = [path.name for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert len(names) > 60 and all(re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", name) for name in names)
    assert sorted({name[:4] for name in names}) == [name[:4] for name in names]
    for name in names:
        title = (ROOT / "docs" / "decisions" / name).read_text(encoding="utf-8").partition("\n")[0]
        assert title.startswith(f"# {int(name[:4])}. "), name


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("pools: refuse salts that are no text\n\nWhy.\n", []),
        ("caches, plan: say once where a page begins\n\nWhy.\n# Please enter the message\n", []),
        ("Merge branch 'main'\n", []),
        ("pools: refuse salts\n# Please enter the message\n", ["the body must say why"]),
        ("pools: refuse salts.\n\nWhy.", ["the subject must end without a period"]),
        ("refuse salts\n\nWhy.", ["the subject must be `area: verb object`, got 'refuse salts'"]),
        ("pools: refuse salts\nWhy.", ["the line after the subject must be empty"]),
        (f"pools: {'x' * 66}\n\nWhy.", ["the subject must have at most 72 characters, got 73"]),
        ("", ["the subject must be", "the body must say why"]),
    ],
)
def test_a_message_of_a_commit_can_be_read_later(message: str, expected: list[str]) -> None:
    found = commit_message.problems(message)
    assert len(found) == len(expected) and all(map(str.startswith, found, expected))
