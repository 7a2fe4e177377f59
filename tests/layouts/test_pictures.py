"""The pictures of layouts, in the terminal and in the documentation."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from core.addresses import address

from kvloom.layouts import LAYOUTS
from kvloom.layouts.pictures import as_svg, as_text, strips

ROOT = Path(__file__).parents[2]
SIZES = {"L": 1, "2": 2, "T": 4, "B": 2, "S": 2, "H": 2, "D": 4}


def test_drawings_of_the_documentation_are_current() -> None:
    drawings = runpy.run_path(str(ROOT / "scripts" / "draw_layouts.py"))["drawings"]()
    stale = [path.name for path, text in drawings.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run: python scripts/draw_layouts.py"
    drawn = {path.name for path in drawings} - {"layouts.md"}
    assert {path.name for path in (ROOT / "docs" / "layouts").iterdir()} == drawn


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_drawn_once_at_its_address(name: str) -> None:
    layout = LAYOUTS[name]
    for (_, strip), axes in zip(strips(layout), (layout.key, layout.value), strict=False):
        assert len(set(strip)) == len(strip) == (64 if layout.is_joint else 32)
        small = axes.replace("x", "2").replace("/16", "/2").replace("%16", "%2").replace("/4", "/2")
        small = small.replace("%4", "%2")
        for at, cell in enumerate(strip):
            place = {"L": 0, "2": int(cell.side == "V"), "T": cell.token, "H": cell.head, "D": cell.element}
            place |= {"B": cell.token // 2, "S": cell.token % 2}
            assert address(small, SIZES, place) == at


def test_text_has_a_column_for_each_element() -> None:
    assert as_text(LAYOUTS["pmx_dynamic_0"]).splitlines() == [
        "  key/value " + ("K" * 8 + "V" * 8) * 4,
        "  token     " + "0" * 16 + "1" * 16 + "2" * 16 + "3" * 16,
        "  head      " + "aaaabbbb" * 8,
        "  element   " + "0123" * 16,
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_svg_is_well_formed_and_says_its_axes(name: str) -> None:
    root = ElementTree.fromstring(as_svg(LAYOUTS[name]))
    assert root.get("aria-label", "").split()[0] == LAYOUTS[name].axes.split()[0]
