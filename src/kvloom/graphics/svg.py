"""SVG writer: elements with escaped texts, axes, entries of a legend, light and dark mode."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final, NamedTuple

COLORS: Final = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756", "#72b7b2", "#eeca3b", "#888888",
)  # fmt: skip
"""Colors of a plot that are easy to distinguish."""

STYLE: Final = (
    "text{fill:#222;stroke:#fff;stroke-width:3px;paint-order:stroke}.grid{stroke:#ccc}.line{stroke:#222}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd;stroke:#111}.grid{stroke:#444}.line{stroke:#ddd}}"
)
"""Style of a plot: text with a border in the page's color; ``grid`` and ``line``, classes of paths."""


class Axis(NamedTuple):
    """Axis of numbers from ``low`` to ``high``, drawn from pixel ``start`` to ``end``.

    Its ends differ, and are positive if it is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    is_logarithmic: bool = False

    def at(self, x: float) -> float:
        """Pixel of a number."""
        if self.is_logarithmic:
            share = math.log(x / self.low) / math.log(self.high / self.low)
        else:
            share = (x - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def decades(self, digits: Iterable[int] = (1,)) -> list[float]:
        """Numbers with these first digits, and zeros at the end, within a logarithmic axis."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = (digit * 10.0**power for power in powers for digit in digits)
        return [x for x in found if self.low * 0.999 <= x <= self.high * 1.001]


class Svg:
    """SVG whose later elements cover earlier ones; ``str`` returns its text.

    Options of an element are its attributes: ``stroke_width=2`` is ``stroke-width="2"``, and ``class_``
    is ``class``. Numbers are rounded to a hundredth of a pixel.

    Args:
        width: Width in pixels.
        height: Height in pixels.
        style: CSS.
        options: Attributes of the root element.
    """

    def __init__(self, width: float, height: float, style: str = STYLE, **options: Any) -> None:
        box = f"0 0 {_spelled(width)} {_spelled(height)}"
        shared = {"viewBox": box, "width": width, "height": height, **options}
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg"{_attributes(shared)}>',
            f"<style>{style}</style>",
        ]

    def add(self, name: str, text: str = "", title: str = "", **options: Any) -> None:
        """Add an element with a text, and a title, which is its tooltip."""
        inside = (f"<title>{escape(title)}</title>" if title else "") + escape(text)
        end = f">{inside}</{name}>" if inside else "/>"
        self._parts.append(f"<{name}{_attributes(options)}{end}")

    def text(self, x: float, y: float, text: str, anchor: str = "start", **options: Any) -> None:
        """Add a text whose ``anchor`` (start, middle or end) is at a point of its baseline."""
        self.add("text", text, x=x, y=y, **({} if anchor == "start" else {"text_anchor": anchor}), **options)

    def rect(self, x: float, y: float, width: float, height: float, title: str = "", **options: Any) -> None:
        """Add a rectangle."""
        self.add("rect", title=title, x=x, y=y, width=width, height=height, **options)

    def path(self, points: Sequence[tuple[float, float]], **options: Any) -> None:
        """Add straight lines from point to point."""
        places = "L".join(f"{_spelled(x)} {_spelled(y)}" for x, y in points)
        self.add("path", d=f"M{places}", **options)

    def dot(self, x: float, y: float, radius: float, color: str, title: str = "") -> None:
        """Add a filled circle."""
        self.add("circle", title=title, cx=x, cy=y, r=radius, fill=color)

    def legend(self, x: float, y: float, name: str, color: str) -> None:
        """Add a square of a color, whose upper left corner is at the point, and its name."""
        self.rect(x, y, 12, 12, fill=color)
        self.text(x + 17, y + 10, name)

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def _attributes(options: dict[str, Any]) -> str:
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in options.items())
    return "".join(f' {name}="{_spelled(value)}"' for name, value in named)


def _spelled(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value))
