"""Self-contained HTML pages, which include the shared style and script."""

from importlib.resources import files
from typing import Final

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
