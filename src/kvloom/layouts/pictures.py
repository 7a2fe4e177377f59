"""Small pictures of layouts: four tokens, two heads and four elements, in the order of memory."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

from kvloom.core.layouts import CacheLayout
from kvloom.graphics.svg import COLORS, Svg
from kvloom.layouts.catalog import NamedLayout

_EXTENTS: Final = {"L": 1, "2": 2, "T": 4, "B": 2, "S": 2, "H": 2, "D": 4}
_CELL: Final = 14  # pixels
_COLUMNS: Final = 32
_STYLE: Final = "text{font:11px ui-monospace,monospace}.t{fill:#888}.e{text-anchor:middle}.v{fill:#222}"


class Cell(NamedTuple):
    """Element of a picture: ``side`` is K, V or, if one layout is for both, a space."""

    side: str
    token: int
    head: int
    element: int


def cells(axes: str) -> list[Cell]:
    """Elements of a small tensor with ``axes``, in the order of memory; chunks have two elements."""
    terms = [
        term._replace(chunk=2 if term.part and term.chunk > 1 else term.chunk)
        for dim in CacheLayout(axes.replace("x", "2")).dims
        for term in dim
    ]
    has_sides = any(term.axis == "2" for term in terms)
    found = []
    for digits in product(*(range(term.size(_EXTENTS)) for term in terms)):
        at = dict.fromkeys(_EXTENTS, 0)
        for term, digit in zip(terms, digits, strict=True):
            at[term.axis] += digit * (term.chunk if term.part == "/" else 1)
        side = "KV"[at["2"]] if has_sides else " "
        found.append(Cell(side, at["T"] + at["B"] * _EXTENTS["S"] + at["S"], at["H"], at["D"]))
    return found


def strips(layout: NamedLayout) -> Iterator[tuple[str, list[Cell]]]:
    """Name and elements, in the order of memory, of each tensor that has its own order."""
    if layout.is_joint:
        yield "cache", cells(layout.key)
    elif layout.value:
        yield "keys", cells(layout.key)
        yield "values", cells(layout.value)
    else:
        yield "keys, values", cells(layout.key)


def as_text(layout: NamedLayout) -> str:
    """Picture as text: each column is an element, left to right as in memory."""
    lines = []
    for title, strip in strips(layout):
        rows = [
            ("token", "".join(str(c.token) for c in strip)),
            ("head", "".join("ab"[c.head] for c in strip)),
            ("element", "".join(str(c.element) for c in strip)),
        ]
        if layout.is_joint:
            rows.insert(0, ("key/value", "".join(c.side for c in strip)))
        lines += [f"  {title}:"] if layout.value else []
        lines += [f"  {name:10}{row}" for name, row in rows]
    return "\n".join(lines)


def as_svg(layout: NamedLayout) -> str:
    """Picture as SVG: a color for each token, lighter for the second head, the element in its cell."""
    drawn = list(strips(layout))
    width = _CELL * max(min(len(strip), _COLUMNS) for _, strip in drawn)
    height = 4 + sum(20 + 22 * math.ceil(len(strip) / _COLUMNS) for _, strip in drawn)
    label = layout.axes.replace("|", "and")
    picture = Svg(width, height, _STYLE, role="img", aria_label=label)
    top = 4
    for title, strip in drawn:
        picture.text(0, top + 10, title, class_="t")
        top += 16
        for at in range(0, len(strip), _COLUMNS):
            for column, cell in enumerate(strip[at : at + _COLUMNS]):
                x = column * _CELL
                opacity, color = (1, "#fff") if cell.head == 0 else (0.45, "#222")
                picture.rect(x, top, _CELL - 1, 18, fill=COLORS[cell.token], fill_opacity=opacity)
                picture.text(x + 6.5, top + 13, str(cell.element), class_="e", fill=color)
                if cell.side == "V":
                    picture.rect(x, top + 15, _CELL - 1, 3, class_="v")
            top += 22
        top += 4
    return str(picture)
