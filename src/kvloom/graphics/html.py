"""Pages of HTML that load nothing: each has the style and the script that all share inside."""

from importlib.resources import files
from typing import Final

_SHARED: Final = ("page.css", "page.js")


def read_page(package: str, name: str) -> str:
    """A page of a package; ``/* page.css */`` and ``/* page.js */`` in it become the shared files.

    Args:
        package: Such as ``"kvloom.serving"``.
        name: Of its file, which names each of the two once.
    """
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    for shared in _SHARED:
        before, after = text.split(f"/* {shared} */\n")
        text = before + files("kvloom.graphics").joinpath(shared).read_text(encoding="utf-8") + after
    return text
