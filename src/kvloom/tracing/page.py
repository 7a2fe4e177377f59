"""One page of HTML that shows a recording: it loads nothing, and has all of it inside."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from kvloom.graphics.html import read_page

_PLACE: Final = "/*recording*/null"
_ESCAPED: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def page_of(lines: Iterable[dict[str, Any]]) -> str:
    """The page, in HTML.

    Args:
        lines: Of a recording, as ``Events.lines`` and ``read_lines`` give them.
    """
    head, *rest = lines
    nodes = [[x["node"], x["parent"], x["tenant"], x.get("text", "")] for x in rest if "node" in x]
    kept = ("t", "kind", "request", "pages")
    events = [
        [*(x[name] for name in kept), {a: b for a, b in x.items() if a not in kept}]
        for x in rest
        if "kind" in x
    ]
    data = json.dumps({"head": head, "nodes": nodes, "events": events}, separators=(",", ":"))
    # Nothing in a string can end the script: what HTML could read is escaped, as JSON allows.
    text = read_page("kvloom.tracing", "view.html")
    return text.replace(_PLACE, data.translate(_ESCAPED), 1)


def write_page(lines: Iterable[dict[str, Any]], path: Path) -> None:
    """Write the page to a file."""
    path.write_text(page_of(lines), encoding="utf-8")
