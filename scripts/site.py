"""Hooks of mkdocs: pages of the site that stand elsewhere in the repository, or are made from its sources.

A link of a page to another page of the site leads there; one to a file that is no page becomes the path
of that file, since the site is read without the repository, too.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from site_pages import api_pages, command_page, decision_index, notebook_page  # noqa: E402

ELSEWHERE: Final = {
    "INVARIANTS.md": "reference/promises.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "benchmarks/results.md": "figures/results.md",
    "benchmarks/gpu_results.md": "figures/gpu_results.md",
    "benchmarks/vllm_results.md": "figures/vllm_results.md",
    "benchmarks/batch_invariance.md": "figures/batch_invariance.md",
    "benchmarks/layouts.md": "figures/layouts.md",
}
"""Pages of the repository outside of docs, and what the site calls them."""

NOTEBOOKS: Final = {
    path.relative_to(ROOT).as_posix(): f"notebooks/{path.stem}.md"
    for path in sorted(ROOT.glob("examples/*.ipynb"))
}
"""Notebooks, and what the site calls the pages that are made of them."""

_PLACES: Final = {page: place for place, page in (ELSEWHERE | NOTEBOOKS).items()}
_FENCED: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(!?)\[([^\]\[]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_BOOSTS: Final = (
    ("decisions/index.md", 1),
    ("decisions/", 0.05),
    ("figures/", 0.1),
    ("changelog.md", 0.2),
    ("architecture.md", 0.3),
    ("reference/promises.md", 0.3),
    ("reference/api/", 0.01),
    ("faq.md", 2),
    ("comparison.md", 1.5),
    ("contributing.md", 1.5),
    ("migration.md", 1.5),
)
"""How much sooner a search finds a page than others; the first beginning that fits."""


def on_config(config: Any) -> None:
    """Fill the entry ``API`` of the navigation."""
    _entry(config.nav, "API")[:] = [{name: f"reference/api/{name}.md"} for name in api_pages(ROOT / "src")]


def on_files(files: Any, config: Any) -> None:
    """Add pages from elsewhere, their pictures, and pages that are made."""
    made = {f"reference/api/{name}.md": text for name, text in api_pages(ROOT / "src").items()}
    made["reference/commands.md"] = command_page()
    made["decisions/index.md"] = decision_index(ROOT / "docs" / "decisions")
    made |= {page: notebook_page(ROOT / place) for place, page in NOTEBOOKS.items()}
    made |= {page: (ROOT / place).read_text(encoding="utf-8") for place, page in ELSEWHERE.items()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for picture in sorted((ROOT / "benchmarks" / "results").rglob("*.svg")):
        place = picture.relative_to(ROOT / "benchmarks").as_posix()
        files.append(File.generated(config, f"figures/{place}", abs_src_path=str(picture)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as the site has them."""
    here = page.file.src_uri
    boost = next((boost for name, boost in _BOOSTS if here.startswith(name)), 1)
    page.meta.setdefault("search", {"boost": boost})
    pages = {file.src_uri for file in files}
    parts, at = [], 0
    for fenced in _FENCED.finditer(markdown):
        parts += [linked(markdown[at : fenced.start()], here, pages), fenced[0]]
        at = fenced.end()
    return "".join([*parts, linked(markdown[at:], here, pages)])


def linked(text: str, here: str, pages: set[str]) -> str:
    """``text`` of the page ``here``, whose links are those of the site that has ``pages``."""
    folder = posixpath.dirname(_PLACES.get(here, f"docs/{here}"))

    def link(match: re.Match[str]) -> str:
        bang, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        place = posixpath.normpath(posixpath.join(folder, target))
        page = (ELSEWHERE | NOTEBOOKS).get(place) or place.removeprefix("docs/")
        if place.startswith("benchmarks/results/"):
            page = place.replace("benchmarks/", "figures/", 1)
        if place == "docs/decisions":
            page = "decisions/index.md"
        if page in pages:
            return f"{bang}[{words}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
        if not (ROOT / place).exists() or place.startswith("docs/"):
            return match[0]  # mkdocs says that it leads nowhere
        return f"`{place}`" if words.strip("`") in place else f"{words} (`{place}`)"

    return _LINK.sub(link, text)


def _entry(nav: list[Any], name: str) -> list[Any]:
    """The list of the entry ``name``, however deep it is."""
    for item in nav:
        for title, below in item.items() if isinstance(item, dict) else ():
            if title == name:
                return below  # type: ignore[no-any-return]
            if isinstance(below, list) and (found := _entry(below, name)) is not None:
                return found
    return None  # type: ignore[return-value]
