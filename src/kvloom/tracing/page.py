"""Self-contained HTML page that shows a recording."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from kvloom.graphics.html import read_page

_PLACE: Final = "/*recording*/null"
_ESCAPED: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def page_of(lines: Iterable[dict[str, Any]]) -> str:
    """HTML page of a recording.

    Args:
        lines: Lines of the recording, as of ``Events.lines`` and ``read_lines``.
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
    # Characters with a meaning in HTML are escaped, as JSON allows, so that no string can end the script.
    text = read_page("kvloom.tracing", "view.html")
    return text.replace(_PLACE, data.translate(_ESCAPED), 1)


def write_page(lines: Iterable[dict[str, Any]], path: Path) -> None:
    """Write the page to a file."""
    path.write_text(page_of(lines), encoding="utf-8")
