"""The pages of HTML: each has the style and the script that all share, once, repeating nothing of another."""

import itertools
import os
import re
from importlib.metadata import version
from importlib.resources import files

import pytest

from kvloom.graphics.html import read_page, results_page

PAGES = [("kvloom.serving.endpoints", "dashboard.html"), ("kvloom.tracing", "view.html")]
FUNCTION = re.compile(r"^(?:async )?function (\w+)", re.MULTILINE)


@pytest.mark.parametrize(("package", "name"), PAGES)
def test_a_page_has_the_shared_files_once(package: str, name: str) -> None:
    text = read_page(package, name)
    assert text.count("function drawCell(") == text.count("prefers-color-scheme: dark) {") == 1
    assert "/* page." not in text
    assert text.count("<script>") == text.count("</script>") == text.count("</style>") == 1


def test_no_line_and_no_function_is_in_two_files() -> None:
    own = [files(package).joinpath(name).read_text(encoding="utf-8") for package, name in PAGES]
    style, script = (
        files("kvloom.graphics").joinpath(f"page.{x}").read_text(encoding="utf-8") for x in ("css", "js")
    )
    lines = [
        {line.strip() for line in text.splitlines() if len(line.strip()) > 60 and line.strip()[0] not in "<}"}
        for text in (*own, style, script)
    ]
    assert [a & b for a, b in itertools.combinations(lines, 2) if a & b] == []
    assert not set(FUNCTION.findall(script)) & {name for text in own for name in FUNCTION.findall(text)}


def test_a_page_of_results_has_no_tags_of_theirs_and_says_where_they_are_from() -> None:
    page = results_page("<b>", ["kind", "bytes"], [["<i>", "1"]], "<svg></svg>", ["a & b"])
    assert "<b>" not in page and "<i>" not in page and "&lt;i&gt;</td>" in page
    assert "<svg></svg>" in page and "a &amp; b" in page
    assert f"kvloom {version('kvloom')}, torch " in page and f"{os.cpu_count()} cores" in page
