"""Draw the pictures of docs/why/how.md: a token's way, pages and forks, a prefix, smoothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvloom.graphics.svg import COLORS, Svg

FOLDER: Final = Path(__file__).parents[1] / "docs" / "why"
BLUE, ORANGE, GREEN, PURPLE, GRAY = (COLORS[i] for i in (0, 1, 2, 3, 8))
_PAGE: Final = 46
"""Pixels of a page's side."""


def drawings() -> dict[Path, str]:
    """Pictures by the file that each is in."""
    made = {"token": token(), "pages": pages(), "prefix": prefix(), "smoothing": smoothing()}
    return {FOLDER / f"{name}.svg": str(svg) for name, svg in made.items()}


def token() -> Svg:
    """A new token's key and value, from the projection to the attention of the next step."""
    svg = _svg(190)
    steps = (
        ("projected", "k, v [H, D]", GRAY),
        ("smoothed", "and rotated", PURPLE),
        ("codes, scales", "0.13 to 0.26", ORANGE),
        ("slot of a page", "page 7, slot 3", BLUE),
        ("attention", "reads in place", GREEN),
    )
    for i, (name, note, color) in enumerate(steps):
        x = 10 + 162 * i
        svg.rect(x, 40, 132, 64, rx=8, fill=color, fill_opacity=0.25, stroke=color)
        svg.text(x + 66, 68, name, "middle", font_weight="bold")
        svg.text(x + 66, 90, note, "middle")
        if i:
            _arrow(svg, x - 28, 72, x - 4, 72)
    svg.text(334, 140, "unquantized: these two steps are left out", "middle", font_size=12)
    svg.path([(178, 124), (490, 124)], class_="line", stroke_dasharray="4 4")
    svg.text(738, 140, "queries, not keys, turn back", "middle", font_size=12)
    return svg


def pages() -> Svg:
    """Two forks that share pages, and the page that is copied when one of them writes."""
    svg = _svg(240)
    for name, y, own in (("cache", 40, "B"), ("fork", 160, "C")):
        svg.text(20, y + 28, name, font_weight="bold")
        for i, page in enumerate(("3", "7", own)):
            x = 110 + 60 * i
            color = BLUE if page in "37" else ORANGE
            svg.rect(x, y, 52, 40, rx=4, fill="none", stroke=color, stroke_width=2)
            svg.text(x + 26, y + 26, {"B": "1", "C": "4"}.get(page, page), "middle")
    svg.text(110, 28, "page tables", font_size=12)
    svg.text(430, 28, "pages in memory, 16 tokens each", font_size=12)
    held = {3: BLUE, 7: BLUE, 1: ORANGE, 4: ORANGE}
    for number in range(8):
        x, y = 430 + 92 * (number % 4), 50 + 92 * (number // 4)
        _page(svg, x, y, held.get(number, ""), f"page {number}")
    svg.text(
        20,
        228,
        "Blue: held by both, stored once. Orange: copied when the fork wrote its next token.",
        font_size=12,
    )
    return svg


def prefix() -> Svg:
    """A tree of texts by their pages, and a prompt that goes down in it."""
    svg = _svg(230)
    nodes = (
        (20, 90, "import os\\n", BLUE),
        (220, 40, "def main():", BLUE),
        (220, 140, "class Reader:", GRAY),
        (420, 15, "return 0", GRAY),
        (420, 70, "print(", GREEN),
    )
    for a, b in ((0, 1), (0, 2), (1, 3), (1, 4)):
        _arrow(svg, nodes[a][0] + 150, nodes[a][1] + 20, nodes[b][0] - 4, nodes[b][1] + 20)
    for x, y, text, color in nodes:
        svg.rect(x, y, 150, 38, rx=6, fill=color, fill_opacity=0.25, stroke=color)
        svg.text(x + 75, y + 24, text, "middle", font_family="monospace")
    svg.text(600, 94, "computed, and added", font_size=12)
    svg.text(600, 38, "of another text", font_size=12)
    svg.text(
        20,
        212,
        "Blue: pages that the prompt finds, by all tokens before them and its salt. Green: what is new.",
        font_size=12,
    )
    return svg


def smoothing() -> Svg:
    """Channels of keys before and after: an offset and a large channel leave nothing of the others' bits."""
    svg = _svg(240)
    raw = (0.10, 0.14, 0.09, 0.95, 0.12, 0.08, 0.11, 0.80)
    for x, title, bars, note in (
        (20, "keys of a head, by channel", raw, "one scale for all: small channels get 1 or 2 steps"),
        (
            440,
            "smoothed",
            (0.55, 0.70, 0.48, 0.62, 0.66, 0.45, 0.60, 0.58),
            "the same scale: all channels get most steps",
        ),
    ):
        svg.text(x, 24, title, font_weight="bold")
        for i, height in enumerate(bars):
            color = ORANGE if i in (3, 7) else BLUE
            svg.rect(x + 44 * i, 190 - 150 * height, 34, 150 * height, fill=color, fill_opacity=0.7)
        svg.path([(x, 190), (x + 350, 190)], class_="line")
        svg.text(x, 214, note, font_size=12)
    _arrow(svg, 385, 110, 425, 110)
    svg.text(
        20,
        234,
        "Attention adds back what that takes, so results change by the rounding of codes alone.",
        font_size=12,
    )
    return svg


def _svg(height: int) -> Svg:
    return Svg(830, height, font_family="sans-serif", font_size=14)


def _page(svg: Svg, x: float, y: float, color: str, name: str) -> None:
    options = (
        {"fill": color, "fill_opacity": 0.3, "stroke": color} if color else {"fill": "none", "stroke": GRAY}
    )
    svg.rect(x, y, _PAGE + 24, _PAGE, rx=4, **options)
    svg.text(x + 35, y + _PAGE + 18, name, "middle", font_size=12)


def _arrow(svg: Svg, x0: float, y0: float, x1: float, y1: float) -> None:
    svg.path([(x0, y0), (x1, y1)], class_="line", stroke_width=1.5)
    head: Sequence[tuple[float, float]] = [(x1 - 6, y1 - 4), (x1, y1), (x1 - 6, y1 + 4)]
    svg.path(head, class_="line", fill="none", stroke_width=1.5)


if __name__ == "__main__":
    for path, text in drawings().items():
        path.write_text(text, encoding="utf-8")
