"""Cost of one more token as the text grows: without a cache, with one, with kvloom's. Prints one JSON line.

A 4-layer Llama of random weights, 8 heads of 64, float32, one thread. Without a cache the next token needs a
pass over everything before it; with one, a pass over a single token that reads the keys and values kept of
the others. All take their step in turn, round after round, in one process; figures are medians, drawn in
``growth.svg`` where matplotlib is installed.

Prediction: without a cache the cost grows with the length, and faster once attention outweighs the weights;
with one it is nearly flat until the keys and values read outweigh the weights, near 1,000 tokens here, and
stays below the former by a factor that grows with the length.

Then the CPU time of what keeps the books, by what it grows with (``sizes.py``).
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import Contender, fill, kvloom, llama, step, stock
from plots import draw, place
from rounds import in_turn
from sizes import measure as measure_sizes

LENGTHS = (64, 128, 256, 512, 1024, 2048)
WARMUP = 1
BARE = Contender("no cache", lambda model, _: None)
CONTENDERS = (BARE, stock(), kvloom("float32"), kvloom("int8"))
COLORS = ("#b04a4a", "#7a7a7a", "#2f6fa8", "#2a8f6a")


def measure(model: Any, length: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of the token after ``length`` others."""
    steps: dict[str, Callable[[], float]] = {}
    for contender in CONTENDERS:
        cache = contender.make(model, length + WARMUP + rounds)
        if cache is not None:
            fill(cache, model, length)
        num_new = length + 1 if cache is None else 1
        steps[contender.name] = partial(step, model, contender, cache, num_new)
    return {name: median(took) for name, took in in_turn(steps, rounds, WARMUP).items()}


def plot(rows: list[dict[str, Any]], path: Path) -> bool:
    """Draw milliseconds against length, both axes logarithmic; false without matplotlib."""
    lengths = [row["length"] for row in rows]

    def lines(axes: Any) -> None:
        for contender, color in zip(CONTENDERS, COLORS, strict=True):
            axes.plot(
                lengths, [row["ms"][contender.name] for row in rows], "o-", color=color, label=contender.name
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{x:,}" for x in lengths])
        axes.set_xlabel("tokens before it")
        axes.set_ylabel("one more token, ms")
        axes.legend(frameon=False)

    return draw(path, lines)


def main() -> None:
    """Measure, draw and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plot", type=Path, help="the .svg or .png file to write")
    parser.add_argument("--quick", action="store_true", help="two short lengths, and no file unless named")
    args = parser.parse_args()

    torch.set_num_threads(1)
    model = llama(8)
    lengths, rounds = ((16, 32), 1) if args.quick else (LENGTHS, args.rounds)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        ms = measure(model, length, rounds)
        rows.append({"length": length, "ms": ms, "saved": {x: ms[BARE.name] / ms[x] for x in ms}})
    path = args.plot or (None if args.quick else place("growth.svg"))
    drawn = path is not None and plot(rows, path)
    books = measure_sizes(is_quick=args.quick)
    print(json.dumps({"figure": "growth", "rounds": rounds, "drawn": drawn, "rows": rows, "sizes": books}))


if __name__ == "__main__":
    main()
