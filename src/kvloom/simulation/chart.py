"""Hit rates as a picture: a curve for each policy, over capacities on a logarithmic scale."""

from html import escape
from math import ceil, log
from typing import Final

from kvloom.simulation.replay import Hits

_COLORS: Final = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756", "#72b7b2", "#eeca3b", "#888888",
)  # fmt: skip
_DASHES: Final = ("none", "6 3", "2 3")
_LEFT, _TOP, _WIDTH, _HEIGHT, _LEGEND = 50, 12, 520, 300, 120  # pixels


def chart(results: dict[str, dict[int, Hits]]) -> str:
    """An SVG of block hit rates, of each policy by capacity in tokens."""
    capacities = sorted({capacity for hits in results.values() for capacity in hits})
    found = max(x.block_rate for hits in results.values() for x in hits.values())
    most = max(1, ceil(20 * found)) / 20
    span = log(capacities[-1] / capacities[0])

    def at(capacity: int, rate: float) -> tuple[float, float]:
        across = log(capacity / capacities[0]) / span if span else 0.5
        return _LEFT + _WIDTH * across, _TOP + _HEIGHT * (1 - rate / most)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + _LEGEND} '
        f'{_TOP + _HEIGHT + 40}" font-family="sans-serif" font-size="12">',
        "<style>text{fill:#222}.grid{stroke:#ccc}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444}}</style>",
    ]
    for i in range(6):
        rate = most * i / 5
        _, y = at(capacities[0], rate)
        lines.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{_WIDTH}"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * rate:.0f} %</text>')
    last = -100.0
    for capacity in capacities:
        x, y = at(capacity, 0)
        if x - last >= 45:  # beside each other, not over each other
            lines.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{spell(capacity)}</text>')
            last = x
    middle = _LEFT + _WIDTH / 2
    lines.append(f'<text x="{middle}" y="{_TOP + _HEIGHT + 36}" text-anchor="middle">tokens of cache</text>')
    for i, (policy, hits) in enumerate(results.items()):
        color, dash = _COLORS[i % len(_COLORS)], _DASHES[i % len(_DASHES)]
        points = [at(capacity, x.block_rate) for capacity, x in sorted(hits.items())]
        style = f'stroke="{color}" stroke-width="2" stroke-dasharray="{dash}" fill="none"'
        lines.append(f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" {style}/>')
        for (capacity, hit), (x, y) in zip(sorted(hits.items()), points, strict=True):
            lines.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}">'
                f"<title>{escape(policy)}, {spell(capacity)}: {hit.block_rate:.4f}</title></circle>"
            )
        left, top = _LEFT + _WIDTH + 20, _TOP + 8 + 20 * i
        lines.append(f'<path d="M{left} {top}h24" {style}/>')
        lines.append(f'<text x="{left + 30}" y="{top + 4}">{escape(policy)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def spell(capacity: int) -> str:
    """Tokens as they are given: ``3M``, ``500k``, ``1234``."""
    for letter, size in (("M", 10**6), ("k", 10**3)):
        if capacity % (size // 10) == 0 and capacity >= size:
            return f"{capacity / size:g}{letter}"
    return str(capacity)
