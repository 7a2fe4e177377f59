"""Chart of hit rates: a curve for each policy, over capacities on a logarithmic scale."""

from math import ceil
from typing import Final

from kvloom.graphics.svg import COLORS, Axis, Svg
from kvloom.simulation.replay import Hits

_DASHES: Final = ("none", "6 3", "2 3")
_LEFT, _TOP, _WIDTH, _HEIGHT, _LEGEND = 50, 12, 520, 300, 120  # pixels


def chart(results: dict[str, dict[int, Hits]]) -> str:
    """SVG of block hit rates of each policy, by capacity in tokens."""
    capacities = sorted({capacity for hits in results.values() for capacity in hits})
    found = max(x.block_rate for hits in results.values() for x in hits.values())
    most = max(1, ceil(20 * found)) / 20
    beside = 2 if len(capacities) == 1 else 1  # a single capacity is in the middle
    low, high = capacities[0] / beside, capacities[-1] * beside
    across = Axis(low, high, _LEFT, _LEFT + _WIDTH, is_logarithmic=True)
    up = Axis(0, most, _TOP + _HEIGHT, _TOP)
    width, height = _LEFT + _WIDTH + _LEGEND, _TOP + _HEIGHT + 40
    picture = Svg(width, height, font_family="sans-serif", font_size=12)
    for rate in (most * i / 5 for i in range(6)):
        picture.path([(across.start, up.at(rate)), (across.end, up.at(rate))], class_="grid")
        picture.text(_LEFT - 6, up.at(rate) + 4, f"{100 * rate:.0f} %", "end")
    last = -100.0
    for capacity in capacities:
        if (x := across.at(capacity)) - last >= 45:  # labels do not overlap
            picture.text(x, up.start + 18, spell(capacity), "middle")
            last = x
    picture.text(_LEFT + _WIDTH / 2, up.start + 36, "tokens of cache", "middle")
    for i, (policy, hits) in enumerate(results.items()):
        color, dash = COLORS[i % len(COLORS)], _DASHES[i % len(_DASHES)]
        style = {"stroke": color, "stroke_width": 2, "stroke_dasharray": dash, "fill": "none"}
        by_capacity = sorted(hits.items())
        picture.path([(across.at(size), up.at(x.block_rate)) for size, x in by_capacity], **style)
        for size, hit in by_capacity:
            title = f"{policy}, {spell(size)}: {hit.block_rate:.4f}"
            picture.dot(across.at(size), up.at(hit.block_rate), 3, color, title)
        left, top = _LEFT + _WIDTH + 20, _TOP + 8 + 20 * i
        picture.path([(left, top), (left + 24, top)], **style)
        picture.text(left + 30, top + 4, policy)
    return str(picture)


def spell(capacity: int) -> str:
    """Format a number of tokens: ``3M``, ``500k``, ``1234``."""
    for letter, size in (("M", 10**6), ("k", 10**3)):
        if capacity % (size // 10) == 0 and capacity >= size:
            return f"{capacity / size:g}{letter}"
    return str(capacity)
