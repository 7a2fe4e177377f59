"""The site that `make docs` built: every public name, nothing of other servers, and what it answers."""

from __future__ import annotations

import os
import re
import runpy
import sys
import zlib
from pathlib import Path

import pytest
from browsers import NEEDS_BROWSER, opened, wait

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("KVLOOM_SITE", ROOT / "nowhere")).resolve()
NEEDS_SITE = pytest.mark.skipif(not SITE.is_dir(), reason="needs a site: make docs")
QUESTIONS = tomllib.loads((Path(__file__).parent / "questions.toml").read_text(encoding="utf-8"))
PUBLIC = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))
NUM_RESULTS = 5
ASK = """
const box = document.querySelector("input.md-search__input")
document.getElementById("__search").click()
box.focus()
box.value = arguments[0]
box.dispatchEvent(new KeyboardEvent("keyup"))
"""
ANSWERS = """
if (document.querySelector("input.md-search__input").value !== arguments[0]) return []
return [...document.querySelectorAll(".md-search-result__item")].map(x => x.querySelector("a").pathname)
"""


def test_the_reference_has_every_public_name() -> None:
    """In the sources of its pages, which take no site."""
    import kvloom

    names, pages = PUBLIC["public_names"](ROOT / "src"), PUBLIC["api_pages"](ROOT / "src")
    assert set(kvloom.__all__) <= set(names["kvloom"]) and len(names) > 20
    for package, listed in names.items():
        for name in set(listed) - {"__version__"}:
            places = (f"::: {package}.{name}\n", f'<a id="{package}.{name}">', f"#{package}.{name}-too ")
            assert any(place in pages[package] for place in places), f"{package}.{name}"


def test_the_command_line_has_every_command() -> None:
    page = PUBLIC["command_page"]()
    for command in ("generate", "serve", "store ls", "plan", "conform run", "carry"):
        assert f"\n## kvloom {command}\n" in page
    assert "\n## kvloom bench\n" not in page and "`--kv KIND[:gGROUP]`" in page


@NEEDS_SITE
def test_every_public_name_has_an_anchor() -> None:
    inventory = zlib.decompress((SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    found = {line.split(" ")[0] for line in inventory.splitlines()}
    for package, listed in PUBLIC["public_names"](ROOT / "src").items():
        homes = PUBLIC["homes"]() if package == "kvloom" else {}
        for name in set(listed) - {"__version__"}:
            assert homes.get(name, f"{package}.{name}") in found


@NEEDS_SITE
def test_nothing_is_read_from_other_servers() -> None:
    pages = sorted(SITE.rglob("*.html"))
    assert len(pages) > 100
    loaded = re.compile(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//[^\"> ]+")
    assert [x[0] for page in pages for x in loaded.finditer(page.read_text(encoding="utf-8"))] == []


@NEEDS_SITE
@NEEDS_BROWSER
@pytest.mark.process
@pytest.mark.browser
def test_the_search_answers_questions(tmp_path: Path) -> None:
    """As files, without a server; a result is a page with all that was found in it."""
    assert sum(map(len, QUESTIONS.values())) >= 70
    missed = []
    with opened(tmp_path) as browser:
        for asked in QUESTIONS.values():
            for question, page in asked.items():
                browser.get(SITE.joinpath("index.html").as_uri())
                browser.execute_script(ASK, question)
                found = wait(lambda words=question: browser.execute_script(ANSWERS, words))
                names = [x.removeprefix(f"{SITE}/").removesuffix(".html") for x in found[:NUM_RESULTS]]
                if page not in names:
                    missed.append((question, page, names))
    assert missed == []
