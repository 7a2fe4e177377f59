"""The README's picture: time of a decode step by tokens of context, and bytes at its peak."""

from typing import Final

from tables import cell

from kvloom.graphics.svg import COLORS, Axis, Svg

KINDS: Final = {
    "DynamicCache": COLORS[8],
    "kvloom float32 in place": COLORS[0],
    "kvloom int8 in place": COLORS[2],
    "kvloom int4 in place": COLORS[3],
}
"""Rows of both tables that are drawn, and their colors."""

CONTEXTS: Final = (64, 256, 2048, 8192)
_WIDTH, _TOP, _BOTTOM, _BAR = 820, 56, 250, 34


def picture(decode: str, memory: str) -> str:
    """SVG of two sections of ``results.md``.

    Args:
        decode: Time of a step, as a multiple of DynamicCache's.
        memory: Megabytes at 8,192 tokens.
    """
    svg = Svg(_WIDTH, 296, font_family="sans-serif", font_size=13)
    svg.text(20, 24, "Time of a step, by tokens before it", font_size=15)
    across, up = Axis(64, 8192, 60, 380, is_logarithmic=True), Axis(0, 1.2, _BOTTOM, _TOP)
    for share in (0, 0.5, 1):
        svg.path([(60, up.at(share)), (380, up.at(share))], class_="grid")
        svg.text(52, up.at(share) + 4, f"{share:g}x", "end")
    for tokens in CONTEXTS:
        svg.text(across.at(tokens), _BOTTOM + 20, f"{tokens:,}", "middle")
    svg.text(440, 24, "Megabytes at the peak, after 8,192 tokens", font_size=15)
    for i, (name, color) in enumerate(KINDS.items()):
        steps = [float(cell(decode, name, f"1 x {tokens:,}")) for tokens in CONTEXTS]
        points = [(across.at(tokens), up.at(step)) for tokens, step in zip(CONTEXTS, steps, strict=True)]
        svg.path(points, stroke=color, stroke_width=3, fill="none")
        for (x, y), step in zip(points, steps, strict=True):
            svg.dot(x, y, 4, color, title=f"{name}: {step:g}x")
        top, megabytes = _TOP + 10 + (_BAR + 14) * i, float(cell(memory, name, "peak"))
        svg.text(440, top + 22, name.removesuffix(" in place"))
        svg.rect(560, top, megabytes, _BAR, fill=color, title=name)
        svg.text(568 + megabytes, top + 22, f"{megabytes:g}")
    svg.text(
        20,
        290,
        decode.strip().splitlines()[-1].split(", torch")[0] + ", float32 model, one thread",
        font_size=11,
    )
    return str(svg)
