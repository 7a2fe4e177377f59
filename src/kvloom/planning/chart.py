"""Plans as a picture: a bar for each ``kv``, from weights to page tables."""

from html import escape
from typing import Final

from kvloom.planning.plan import Plan

_PARTS: Final = (
    ("weights", "#4c78a8"),
    ("packed", "#9ecae9"),
    ("cache", "#f58518"),
    ("scales", "#54a24b"),
    ("states", "#b279a2"),
    ("tables", "#9d755d"),
)
_BAR, _GAP, _LEFT, _WIDTH = 22, 10, 90, 560  # pixels


def chart(plans: list[Plan], memory: int | None = None) -> str:
    """An SVG of what each plan takes; with ``memory``, a line at so many bytes."""
    most = max(1, memory or 0, *(x.total for x in plans))
    height = 60 + (_BAR + _GAP) * len(plans)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 110} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<style>text{fill:#222;stroke:#fff;stroke-width:3px;paint-order:stroke}path{stroke:#222}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd;stroke:#111}path{stroke:#ddd}}</style>",
    ]
    for i, (part, color) in enumerate(_PARTS):
        x = _LEFT + 90 * i
        lines.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{x + 17}" y="18">{part}</text>')
    totals = []  # above the line of the memory
    for i, plan in enumerate(plans):
        y, end = 36 + (_BAR + _GAP) * i, 0
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(plan.kv)}</text>')
        for part, color in _PARTS:
            size = getattr(plan, part)
            start, width = _LEFT + end / most * _WIDTH, size / most * _WIDTH
            lines.append(
                f'<rect x="{start:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{color}">'
                f"<title>{part}: {size:,} bytes</title></rect>"
            )
            end += size
        totals.append(
            f'<text x="{_LEFT + end / most * _WIDTH + 6:.2f}" y="{y + 15}">{end / 1e9:,.2f} GB</text>'
        )
    if memory is not None:
        at = _LEFT + memory / most * _WIDTH
        lines.append(
            f'<path d="M{at:.2f} 30V{height - 18}" stroke-width="2" stroke-dasharray="5 3"/>'
            f'<text x="{at:.2f}" y="{height - 5}" text-anchor="middle">{memory / 1e9:,.2f} GB</text>'
        )
    lines += totals
    return "\n".join([*lines, "</svg>", ""])
