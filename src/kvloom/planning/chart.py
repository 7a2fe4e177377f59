"""Chart of plans: a bar for each ``kv``, from weights to page tables."""

from typing import Final

from kvloom.graphics.svg import COLORS, Axis, Svg
from kvloom.planning.plan import Plan

_PARTS: Final = {
    "weights": COLORS[0],
    "packed": "#9ecae9",
    "cache": COLORS[1],
    "scales": COLORS[2],
    "states": COLORS[3],
    "tables": COLORS[4],
}
_BAR, _GAP, _LEFT, _WIDTH = 22, 10, 90, 560  # pixels


def chart(plans: list[Plan], memory: int | None = None) -> str:
    """SVG of the bytes of each plan; with ``memory``, a line at that size."""
    most = max(1, memory or 0, *(x.total for x in plans))
    across = Axis(0, most, _LEFT, _LEFT + _WIDTH)
    height = 60 + (_BAR + _GAP) * len(plans)
    picture = Svg(_LEFT + _WIDTH + 110, height, font_family="sans-serif", font_size=12)
    for i, (part, color) in enumerate(_PARTS.items()):
        picture.legend(_LEFT + 90 * i, 8, part, color)
    for i, plan in enumerate(plans):
        y, end = 36 + (_BAR + _GAP) * i, 0
        picture.text(_LEFT - 8, y + 15, plan.kv, "end")
        for part, color in _PARTS.items():
            size = getattr(plan, part)
            width = across.at(end + size) - across.at(end)
            picture.rect(across.at(end), y, width, _BAR, f"{part}: {size:,} bytes", fill=color)
            end += size
    if memory is not None:
        at = across.at(memory)
        picture.path([(at, 30), (at, height - 18)], class_="line", stroke_width=2, stroke_dasharray="5 3")
        picture.text(at, height - 5, f"{memory / 1e9:,.2f} GB", "middle")
    for i, plan in enumerate(plans):  # drawn above the line of the memory
        picture.text(across.at(plan.total) + 6, 51 + (_BAR + _GAP) * i, f"{plan.total / 1e9:,.2f} GB")
    return str(picture)
