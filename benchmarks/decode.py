"""Latency of a decode step against the length of the context. Prints one JSON line.

One forward pass of one token for each sequence, through a 4-layer Llama of random weights with 8 query heads
of 64.
Every cache is filled with the same random keys and values; then all take a step in turn, round after round,
in one process. ``ms`` is a cache's median, ``ratio`` the median over rounds of its time by DynamicCache's in
the same round. The int4 caches of transformers requantize all they hold whenever 128 new tokens have come:
that step, ``requantizing`` times DynamicCache's, is spread over the 128 in ``ratio_amortised``. They and fp8
take several times as long as the others, so they are measured for one sequence on one thread.

Prediction: DynamicCache copies all it holds in every step. A cache that writes only what is new saves the
copy, which is more of the step the longer the context. Read in place, int8 saves three quarters of the reads
as well; with ordinary attention it is dequantized first, so what it saves is spent again. At 64 tokens a
step reads the weights and little else, so every cache takes the same time. Predicted ratios:

    tokens                          64   256  2,048  8,192
    float32, 1 sequence           1.00  1.00   0.70   0.68
    float32, 8 sequences          1.00  1.00   0.75   0.70
    float32 in place              1.00  0.98   0.60   0.55
    int8 in place                 1.00  0.98   0.58   0.48
    int8                          1.05  1.05   0.90   1.00
"""

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from peers import STOCK, Contender, fill, installed, kvloom, llama, quantized, static, step, stock
from rounds import in_turn

CONTEXTS = (64, 256, 2048, 8192)
SHORT = 256
REPEATS = 3
"""Times that short contexts are measured, each from new caches, since every step makes them longer."""

WARMUP = 2


class Setting(NamedTuple):
    """Parameters of a table of results."""

    kv_heads: int
    threads: int
    sequences: int


SETTINGS = (Setting(8, 1, 1), Setting(8, 1, 8), Setting(8, 2, 1), Setting(8, 2, 8), Setting(2, 1, 1))
WITH_SLOW = SETTINGS[0]
QUICK = (Setting(2, 1, 1), Setting(2, 1, 2))


def contenders() -> list[Contender]:
    """DynamicCache first, then StaticCache, then ours."""
    ordinary = [kvloom(kv) for kv in ("float32", "int8")]
    in_place = [kvloom(kv, in_place=True) for kv in ("float32", "int8", "int4")]
    return [stock(), static(), *ordinary, *in_place]


def slow() -> list[Contender]:
    """The quantized caches of transformers."""
    return [quantized("fp8", 8), quantized("quanto", 4), quantized("hqq", 4)]


def measure(
    model: Any, found: list[Contender], setting: Setting, context: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each contender."""
    torch.set_num_threads(setting.threads)
    times: dict[str, list[float]] = {x.name: [] for x in found}
    for _ in range(REPEATS if context <= SHORT else 1):
        caches = {x.name: x.make(model, context + WARMUP + rounds) for x in found}
        for x in found:
            fill(caches[x.name], model, context, setting.sequences, x.attention)
        steps: dict[str, Callable[[], float]] = {
            x.name: partial(step, model, x, caches[x.name], rows=setting.sequences) for x in found
        }
        for name, took in in_turn(steps, rounds, WARMUP).items():
            times[name] += took
    rows = []
    for contender in found:
        took = times[contender.name]
        row = {
            **setting._asdict(),
            "context": context,
            "contender": contender.name,
            "ms": median(took),
            "ratio": median(a / b for a, b in zip(took, times[STOCK], strict=True)),
        }
        if contender.residual:
            ratio = requantizing(model, found[0], contender, caches, (WARMUP + rounds) % contender.residual)
            row |= {"requantizing": ratio, "ratio_amortised": row["ratio"] + ratio / contender.residual}
        rows.append(row)
    return rows


def requantizing(
    model: Any, base: Contender, contender: Contender, caches: dict[str, Any], unquantized: int
) -> float:
    """Time of the step that fills ``residual``, by that of DynamicCache just before it."""
    ratios = []
    for _ in range(3):
        fill(caches[contender.name], model, contender.residual - 1 - unquantized)
        unquantized = 0
        before = step(model, base, caches[base.name])
        ratios.append(step(model, contender, caches[contender.name]) / before)
    return median(ratios)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--quick", action="store_true", help="one short context, to see that it runs")
    args = parser.parse_args()

    contexts, settings, rounds = ((32,), QUICK, 1) if args.quick else (CONTEXTS, SETTINGS, args.rounds)
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    for setting in settings:
        if setting.threads > (os.cpu_count() or 1):
            continue
        model = llama(setting.kv_heads)
        found, _ = installed(contenders(), model)
        if setting in (WITH_SLOW, QUICK[0]):
            peers, missing = installed(slow(), model)
            found += peers
        for context in contexts:
            rows += measure(model, found, setting, context, rounds)
    print(json.dumps({"figure": "decode", "rounds": rounds, "missing": missing, "rows": rows}))


if __name__ == "__main__":
    main()
