"""Every Python snippet of the documentation runs, in order, one namespace for each page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if SNIPPET.search(page.read_text(encoding="utf-8"))]


def marked(page: Path) -> object:
    marks = [pytest.mark.compile] if "torch.compile" in page.read_text(encoding="utf-8") else []
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


@pytest.mark.parametrize("page", [marked(page) for page in WITH_CODE])
def test_snippets_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    for match in SNIPPET.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        # The blank lines make a traceback name the line of the page.
        code = compile("\n" * line + match[1], str(page), "exec")
        exec(code, namespace)  # our own pages
    assert namespace


def test_readme_has_snippets() -> None:
    assert ROOT / "README.md" in WITH_CODE


TELLS = [
    path
    for folder in ("README.md", "CONTRIBUTING.md", "docs", "src", "examples")
    for path in ([ROOT / folder] if (ROOT / folder).is_file() else sorted((ROOT / folder).rglob("*.*")))
    if path.suffix in (".md", ".py")
]


def test_nobody_is_sent_to_an_index_that_has_no_kvloom() -> None:
    wrong = re.compile(r"install '?kvloom|kvloom\[")
    assert len(TELLS) > 300
    assert [str(path) for path in TELLS if wrong.search(path.read_text(encoding="utf-8"))] == []


SOURCES = ROOT / "src" / "kvloom"
MODULES = sorted(path for path in SOURCES.rglob("*.py") if path.read_text(encoding="utf-8").strip())


def test_the_architecture_names_every_folder() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    folders = {str(path.parent.relative_to(SOURCES)) for path in MODULES} - {"."}
    assert {name for name in folders if f"{name}/" not in text} == set()


def test_every_module_says_what_it_is() -> None:
    """In its first line, which is a docstring."""
    begins = re.compile(r'"""[^\n]{15,}[.:]( |\n|""")')
    assert len(MODULES) > 200
    assert [str(path) for path in MODULES if not begins.match(path.read_text(encoding="utf-8"))] == []


def test_every_header_says_what_it_is() -> None:
    headers = sorted((ROOT / "csrc").rglob("*.h"))
    assert headers
    assert [path for path in headers if not path.read_text(encoding="utf-8").startswith("// ")] == []


def test_the_invariants_count_the_planted_bugs() -> None:
    count = len(list((ROOT / "tests" / "mutants").glob("*.patch")))
    assert f"plants {count} bugs" in (ROOT / "INVARIANTS.md").read_text(encoding="utf-8")


def test_the_readme_counts_the_named_layouts() -> None:
    from kvloom.layouts import LAYOUTS

    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"[{len(LAYOUTS)} named layouts](docs/layouts.md)" in text


def test_the_families_are_counted_as_listed() -> None:
    listed = len(
        re.findall(
            r"^\| `(?!model_type)", (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert listed > 200
    for page in ("README.md", "docs/faq.md", "docs/models.md"):
        counts = re.findall(r"(\d+) families", (ROOT / page).read_text(encoding="utf-8"))
        assert {int(x) for x in counts if int(x) > 200} == {listed}, page


def test_the_architecture_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    from kvloom.cli import main

    with pytest.raises(SystemExit):
        main(["--help"])
    told = re.findall(r"^    ([a-z]+)\b", capsys.readouterr().out, re.MULTILINE)
    head, _, _ = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("info.py")
    assert "isolation" in told and {*told} - {*re.findall(r"[a-z]+", head)} == set()
