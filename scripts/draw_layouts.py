"""Draw docs/layouts/*.svg and the list of named layouts in docs/layouts.md, from what the library names."""

from pathlib import Path

from kvloom.layouts import LAYOUTS
from kvloom.layouts.pictures import as_svg

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- drawn by scripts/draw_layouts.py -->\n", "<!-- end -->\n"


def drawings() -> dict[Path, str]:
    """The files and what they must hold."""
    page = (DOCS / "layouts.md").read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    entries = [
        f"### {layout.name}\n\n`{layout.axes}`: {layout.owner}, {layout.document}.\n\n"
        f"![{layout.name}](layouts/{layout.name}.svg)\n\n"
        for layout in LAYOUTS.values()
    ]
    files = {DOCS / "layouts" / f"{layout.name}.svg": as_svg(layout) for layout in LAYOUTS.values()}
    return {DOCS / "layouts.md": before + BEGIN + "\n" + "".join(entries) + END + after, **files}


if __name__ == "__main__":
    for path, text in drawings().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
