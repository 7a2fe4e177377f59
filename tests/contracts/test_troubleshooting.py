"""Errors by message: each class has a section, and what is quoted is still said."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kvloom import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


def spoken() -> str:
    """Every text of the sources but docstrings; what stands in a field of a text is in none."""
    texts = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                texts.append(node.value)
    return "\0".join(texts)


def test_every_class_has_a_section() -> None:
    classes = {x.__name__ for x in vars(errors).values() if isinstance(x, type)}
    assert len(classes) > 7
    assert classes - {*re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)} == set()


def test_what_is_quoted_is_said() -> None:
    said = spoken()
    assert len(QUOTED) > 40
    assert [text for text in QUOTED if text not in said] == []


def test_nothing_is_quoted_twice() -> None:
    assert len(set(QUOTED)) == len(QUOTED)
