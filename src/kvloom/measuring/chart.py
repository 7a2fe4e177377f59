"""A plot of what kinds of caches cost: error over bytes a token, as SVG. Imports no torch."""

import math
from collections.abc import Iterable
from html import escape
from typing import Final, NamedTuple

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 28, 24, 56
_COLORS: Final = ("#2f6fa8", "#b04a4a")
_LEAST: Final = 1e-9
"""Smaller errors are rounding of the sums."""


class Point(NamedTuple):
    """A kind of cache: its name, what it costs, and whose it is."""

    name: str
    nbytes_per_token: float
    mean_kl: float
    is_peer: bool = False


class _Axis(NamedTuple):
    """A logarithmic axis from ``low`` to ``high``, drawn from pixel ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def at(self, x: float) -> float:
        """The pixel of a number."""
        share = math.log(x / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, digits: Iterable[int]) -> list[float]:
        """Numbers of these first digits within the axis."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = (digit * 10.0**power for power in powers for digit in digits)
        return [x for x in found if self.low * 0.999 <= x <= self.high * 1.001]


def as_svg(points: Iterable[Point]) -> str:
    """Mean KL over bytes a token, both logarithmic; a kind without error has no place on the plot."""
    shown = [point for point in points if point.mean_kl > _LEAST]
    sizes = [point.nbytes_per_token for point in shown] or [1.0]
    errors = [point.mean_kl for point in shown] or [1.0]
    across = _Axis(min(sizes) * 0.8, max(sizes) * 1.25, _LEFT, _WIDTH - _RIGHT)
    decades = math.floor(math.log10(min(errors))), math.floor(math.log10(max(errors))) + 1
    up = _Axis(10.0 ** decades[0], 10.0 ** decades[1], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="13" fill="#333">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    for x in across.ticks((1, 2, 3, 5, 7)):
        parts += [_line(across.at(x), up.start, across.at(x), up.end),
                  _text(across.at(x), up.start + 20, f"{x:,.0f}", "middle")]  # fmt: skip
    for y in up.ticks((1,)):
        parts += [_line(across.start, up.at(y), across.end, up.at(y)),
                  _text(across.start - 8, up.at(y) + 4, f"{y:.0e}", "end")]  # fmt: skip
    parts += [
        _text((across.start + across.end) / 2, _HEIGHT - 14, "bytes a token", "middle"),
        f'<g transform="translate(16 {(up.start + up.end) / 2:.1f}) rotate(-90)">'
        f"{_text(0, 0, 'mean KL of the next token, nats', 'middle')}</g>",
    ]
    for point in shown:
        x, y = across.at(point.nbytes_per_token), up.at(point.mean_kl)
        side, anchor = (-9, "end") if x > (across.start + across.end) / 2 else (9, "start")
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_COLORS[point.is_peer]}"/>',
                  _text(x + side, y + 4, point.name, anchor)]  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
