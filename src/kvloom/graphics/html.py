"""Self-contained HTML pages, which include the shared style and script."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Final

from kvloom.graphics.machine import this_machine

_SHARED: Final = ("page.css", "page.js")


def read_page(package: str, name: str) -> str:
    """Read a page of a package; ``/* page.css */`` and ``/* page.js */`` in it become the shared files.

    Args:
        package: Package, such as ``"kvloom.tracing"``.
        name: Name of the file, which names each of the two once.
    """
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    for shared in _SHARED:
        before, after = text.split(f"/* {shared} */\n")
        text = before + files("kvloom.graphics").joinpath(shared).read_text(encoding="utf-8") + after
    return text


def results_page(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], picture: str, notes: Sequence[str]
) -> str:
    """A page of results that can be given to others, with the machine and the versions that they are of.

    Args:
        title: What was measured.
        headings: Headings of the columns of a table.
        rows: Its rows, whose first cells are names.
        picture: An SVG.
        notes: Sentences below.
    """
    style = files("kvloom.graphics").joinpath(_SHARED[0]).read_text(encoding="utf-8")
    heads = _cells("th", headings)
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1></header>
<main>
<div class="columns" style="--columns: minmax(0, 1fr)">
<div class="card"><table><tr>{heads}</tr>{body}</table></div>
<div class="card">{picture}</div>
</div>
{below}
<p class="dim">{escape(this_machine())}</p>
</main>
</body></html>
"""


def _cells(tag: str, texts: Sequence[str]) -> str:
    """Cells of a row, the first of a name and the others of numbers."""
    kinds = ["", *[' class="number"'] * (len(texts) - 1)]
    return "".join(f"<{tag}{kind}>{escape(x)}</{tag}>" for kind, x in zip(kinds, texts, strict=True))
