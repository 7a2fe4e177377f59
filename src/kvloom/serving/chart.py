"""Chart of latency over throughput: a curve for each server, a point for each rate of requests."""

import math
from collections.abc import Sequence
from typing import Any, Final

from kvloom.graphics.svg import COLORS, Axis, Svg
from kvloom.serving.bench_report import server_of

_PANELS: Final = (
    ("first_token_ms", "ms to the first token, 90 of 100 within"),
    ("between_tokens_ms", "ms between tokens, 90 of 100 within"),
)
_LEFT, _TOP, _WIDTH, _HEIGHT, _APART = 62, 24, 330, 280, 80  # pixels of each panel, and between them


def chart(runs: Sequence[dict[str, Any]]) -> str:
    """SVG of runs with a rate, each as in ``kvloom bench serve --json``.

    Times are logarithmic; a run without an answer of two tokens is left out.
    """
    by_server: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_server.setdefault(server_of(run), []).append(run)
    bottom = _TOP + _HEIGHT + 44
    width = _LEFT + len(_PANELS) * (_WIDTH + _APART) - _APART + 20
    picture = Svg(width, bottom + 20 * len(by_server) + 8, font_family="sans-serif", font_size=12)
    most = max(run["new_tokens_per_s"] for run in runs)
    for panel, (name, title) in enumerate(_PANELS):
        left = _LEFT + panel * (_WIDTH + _APART)
        across = Axis(0, max(1.08 * most, 1e-9), left, left + _WIDTH)
        times = [run[name]["p90"] for run in runs if run[name]["p90"] > 0] or [1.0]
        low, high = math.floor(math.log10(min(times))), math.floor(math.log10(max(times))) + 1
        up = Axis(10.0**low, 10.0**high, _TOP + _HEIGHT, _TOP, is_logarithmic=True)
        _draw_grid(picture, across, up, title)
        for i, server in enumerate(by_server.values()):
            shown = sorted((run for run in server if run[name]["p90"] > 0), key=lambda run: run["rate"])
            points = [(across.at(run["new_tokens_per_s"]), up.at(run[name]["p90"])) for run in shown]
            color = COLORS[i % len(COLORS)]
            if points:
                picture.path(points, stroke=color, stroke_width=2, fill="none")
            for run, (x, y) in zip(shown, points, strict=True):
                told = f"{run['new_tokens_per_s']:,.1f} tokens/s, {run[name]['p90']:,.1f} ms"
                picture.dot(x, y, 4, color, f"{server_of(run)} at {run['rate']:g} requests/s: {told}")
                picture.text(x - 7, y - 7, f"{run['rate']:g}/s", "end")
    for i, server_name in enumerate(by_server):
        picture.legend(_LEFT, bottom + 20 * i, server_name, COLORS[i % len(COLORS)])
    return str(picture)


def _draw_grid(picture: Svg, across: Axis, up: Axis, title: str) -> None:
    picture.text((across.start + across.end) / 2, up.end - 9, title, "middle")
    picture.text((across.start + across.end) / 2, up.start + 34, "new tokens per second", "middle")
    step = _step(across.high)
    for i in range(math.floor(across.high / step) + 1):
        x = across.at(i * step)
        picture.path([(x, up.start), (x, up.end)], class_="grid")
        picture.text(x, up.start + 17, f"{i * step:,g}", "middle")
    for time in up.decades():
        picture.path([(across.start, up.at(time)), (across.end, up.at(time))], class_="grid")
        picture.text(across.start - 6, up.at(time) + 4, f"{time:,g}", "end")


def _step(most: float) -> float:
    """The least of 1, 2 and 5 times a power of ten, at most five of which reach ``most``."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    return next(digit * power for digit in (1, 2, 5, 10) if 5 * digit * power >= most)
