"""Plot of kinds of caches: error over bytes of a token, as SVG. Imports no torch."""

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvloom.graphics.svg import COLORS, Axis, Svg

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 28, 24, 56
_LEAST: Final = 1e-9
"""Smallest error to plot; smaller ones are rounding of the sums."""


class Point(NamedTuple):
    """Point of a kind of cache: its name, bytes, error, and origin."""

    name: str
    nbytes_per_token: float
    mean_kl: float
    is_peer: bool = False


def as_svg(points: Iterable[Point]) -> str:
    """Plot of mean KL over bytes of a token, both logarithmic; kinds without error are omitted."""
    shown = [point for point in points if point.mean_kl > _LEAST]
    sizes = [point.nbytes_per_token for point in shown] or [1.0]
    errors = [point.mean_kl for point in shown] or [1.0]
    across = Axis(min(sizes) * 0.8, max(sizes) * 1.25, _LEFT, _WIDTH - _RIGHT, is_logarithmic=True)
    low, high = math.floor(math.log10(min(errors))), math.floor(math.log10(max(errors))) + 1
    up = Axis(10.0**low, 10.0**high, _HEIGHT - _BOTTOM, _TOP, is_logarithmic=True)
    picture = Svg(_WIDTH, _HEIGHT, font_family="sans-serif", font_size=13)
    for size in across.decades((1, 2, 3, 5, 7)):
        picture.path([(across.at(size), up.start), (across.at(size), up.end)], class_="grid")
        picture.text(across.at(size), up.start + 20, f"{size:,.0f}", "middle")
    for error in up.decades():
        picture.path([(across.start, up.at(error)), (across.end, up.at(error))], class_="grid")
        picture.text(across.start - 8, up.at(error) + 4, f"{error:.0e}", "end")
    picture.text((across.start + across.end) / 2, _HEIGHT - 14, "bytes a token", "middle")
    middle = (up.start + up.end) / 2
    picture.text(
        0, 0, "mean KL of the next token, nats", "middle", transform=f"translate(16 {middle}) rotate(-90)"
    )
    for point in shown:
        x, y = across.at(point.nbytes_per_token), up.at(point.mean_kl)
        is_right = x > (across.start + across.end) / 2
        picture.dot(x, y, 5, COLORS[5 if point.is_peer else 0])
        picture.text(x + (-9 if is_right else 9), y + 4, point.name, "end" if is_right else "start")
    return str(picture)
