"""Latency of a decode step against the length of the context. Prints one JSON line.

One forward pass of one token through a 4-layer Llama of random weights, 8 query heads of 64, on one thread.
Every cache is filled with the same random keys and values; then all take a step in turn, round after round,
in one process. ``ms`` is a cache's median, ``ratio`` the median over rounds of its time by DynamicCache's in
the same round. The int4 caches of transformers requantize all they hold whenever 128 new tokens have come:
that step, ``requantizing`` times DynamicCache's, is spread over the 128 in ``ratio_amortised``.

Prediction: a gathering cache reads, writes and reads again all keys and values in every step, so it cannot
beat DynamicCache, which also copies them once; one read in place moves a quarter (int8) or an eighth (int4)
of the bytes, and must win where the context and not the weights is what a step reads: at 8192, and with 8
key/value heads before 2.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from peers import STOCK, Contender, fill, installed, kvloom, llama, quantized, static, step, stock
from rounds import in_turn

CONTEXTS = (256, 2048, 8192)
KV_HEADS = (8, 2)
WARMUP = 2


def contenders() -> list[Contender]:
    """DynamicCache first, then its peers, then ours."""
    ours = [kvloom(kv, in_place=in_place) for in_place in (False, True) for kv in ("float32", "int8", "int4")]
    return [stock(), static(), quantized("fp8", 8), quantized("quanto", 4), quantized("hqq", 4), *ours]


def measure(model: Any, found: list[Contender], context: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each contender."""
    caches = {x.name: x.make(model, context + WARMUP + rounds) for x in found}
    for cache in caches.values():
        fill(cache, model, context)
    steps: dict[str, Callable[[], float]] = {x.name: partial(step, model, x, caches[x.name]) for x in found}
    times = in_turn(steps, rounds, WARMUP)
    base = times[STOCK]
    rows = []
    for contender in found:
        took = times[contender.name]
        row = {
            "kv_heads": model.config.num_key_value_heads,
            "context": context,
            "contender": contender.name,
            "ms": median(took),
            "ratio": median(a / b for a, b in zip(took, base, strict=True)),
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

    torch.set_num_threads(1)
    contexts, heads, rounds = ((32,), (2,), 1) if args.quick else (CONTEXTS, KV_HEADS, args.rounds)
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    for kv_heads in heads:
        model = llama(kv_heads)
        found, missing = installed(contenders(), model)
        for context in contexts:
            rows += measure(model, found, context, rounds)
    print(json.dumps({"figure": "decode", "rounds": rounds, "missing": missing, "rows": rows}))


if __name__ == "__main__":
    main()
