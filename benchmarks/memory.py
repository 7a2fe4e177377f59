"""Bytes that a cache holds and those at the peak of a decode step, at context 8192. Prints one JSON line.

A 4-layer Llama of random weights with 8 heads of 64, one sequence, float32. torch's profiler reports every
allocation and release of the CPU allocator, those inside operators too; weights are older than the profile
and do not count. ``held`` is what is alive between steps: the cache alone. ``peak`` is the most that is alive
at once inside a step: the cache, what attention reads and the activations of one token. No clock is read and
every figure comes out the same again, except for what a kernel takes from elsewhere than torch.

Three steps are taken, of the tokens 8192 to 8194: the first makes the int4 caches of transformers requantize,
the second begins a page. ``held`` and ``peak`` are the medians of the three, ``peak_worst`` is the highest.

Prediction: int8 and int4 hold 3.88 and 7.53 times less than DynamicCache in groups of 64, with
``max_tokens``; without, up to twice as much, as storage doubles. Gathered, the peak adds one layer in
float32, so it loses most of that; read in place it stays within a few percent of what is held.
"""

import argparse
import gc
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import RESIDUAL, STOCK, Contender, fill, installed, kvloom, llama, quantized, static, step, stock
from torch.profiler import ProfilerActivity, profile, record_function

CONTEXT = 8192
STEPS = 3
SLACK = 16


def contenders() -> list[tuple[Contender, bool]]:
    """Contenders, and whether each gets the number of tokens in advance."""
    ours = [
        (kvloom(kv, in_place=in_place, bounded=bounded), bounded)
        for kv in ("float32", "int8", "int4")
        for in_place in (False, True)
        for bounded in (False, True)
    ]
    peers = [quantized("fp8", 8), quantized("quanto", 4), quantized("hqq", 4)]
    return [(stock(), False), (static(), True), *((x, False) for x in peers), *ours]


def recorded(trace: dict[str, Any]) -> list[tuple[int, int]]:
    """``(before, peak)`` of each recorded span in turn: bytes alive as it begins, and the most inside it."""
    events = trace["traceEvents"]
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation")
    changes = [(e["ts"], e["args"]["Addr"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    before, peak = [0] * len(spans), [0] * len(spans)
    alive: dict[int, int] = {}
    total = 0
    for at, address, nbytes in sorted(changes, key=lambda change: change[0]):
        if nbytes > 0:
            alive[address] = nbytes
            total += nbytes
        else:  # what was allocated before the profile began did not count, so its release does not either
            total -= alive.pop(address, 0)
        for i, (start, end) in enumerate(spans):
            if at < start:
                before[i] = peak[i] = total
            elif at <= end:
                peak[i] = max(peak[i], total)
    return list(zip(before, peak, strict=True))


def measure(model: Any, contender: Contender, context: int) -> dict[str, Any]:
    """Bytes of one contender."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        cache = contender.make(model, context + SLACK)
        for num_tokens in (context - RESIDUAL, RESIDUAL - 1):
            fill(cache, model, num_tokens, attention=contender.attention)
        for i in range(STEPS):
            gc.collect()
            with record_function(f"step {i}"):
                step(model, contender, cache)
        with record_function("end"):
            gc.collect()
        del cache
        gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        spans = recorded(json.loads(path.read_text(encoding="utf-8")))
    held = [before for before, _ in spans[1:]]
    peaks = [peak for _, peak in spans[:-1]]
    return {"held": int(median(held)), "peak": int(median(peaks)), "peak_worst": max(peaks)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--quick", action="store_true", help="a short context, to see that it runs")
    args = parser.parse_args()

    torch.set_num_threads(1)
    model = llama(8)
    gc.freeze()  # what is imported by now need not be searched again before every step
    context = 2 * RESIDUAL if args.quick else args.context
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    for contender, bounded in contenders():
        found, absent = installed([contender], model)
        missing += absent
        rows += [{"contender": x.name, "max_tokens": bounded, **measure(model, x, context)} for x in found]
    base = next(row for row in rows if row["contender"] == STOCK)
    for row in rows:
        row |= {f"{key}_ratio": base[key] / row[key] for key in ("held", "peak", "peak_worst")}
    print(json.dumps({"figure": "memory", "context": context, "missing": missing, "rows": rows}))


if __name__ == "__main__":
    main()
