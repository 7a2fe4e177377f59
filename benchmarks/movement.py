"""Speed of store, load and copy, beside the fastest copy of the same bytes. Prints one JSON line.

Each round times every contender and the probe in sequence on memory that no cache holds; the figures are
medians of the ratios in a round. Probes follow each other: threads of an operator that wait for the next one
would take the processor of a probe's. Bytes are those of keys and values as numbers (of ``copy``: as stored).
``index_copy_`` is torch's way to write tokens into rows, unquantized. Smoothed keys have offsets in the
largest number of pairs of channels that kvloom gives a head.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from problem import KINDS
from rounds import Probes, in_turn, microseconds, needs_compiled_backend, ratio, seconds, timed, turns_for
from torch import Tensor

from kvloom import KVSpec, KVView, ops
from kvloom.ops import KeyOffset, KeySmoothing
from kvloom.ops.impl import cpu

HEADS, HEAD_DIM, PAGE, PAIRS = 8, 128, 16, 8
CASES = ((2048, PAGE), (64, 1))
"""Tokens, and tokens in a page: a prompt, and a decode step of 64 sequences."""
WARMUP = 2


def measure(kind: str, axes: str, case: tuple[int, int], rounds: int, probes: Probes) -> dict[str, Any]:
    """Ratios of one kind of cache."""
    dtype, quant = KINDS[kind]
    tokens, in_page = case
    num_bytes = 2 * tokens * HEADS * HEAD_DIM * dtype.itemsize
    turns = turns_for(num_bytes, rounds + WARMUP)
    spec = KVSpec(1, HEADS, HEAD_DIM, dtype, axes, quant)
    num_pages = tokens // in_page
    pool = (num_pages + 64) * PAGE
    views = [KVView.joint(spec.axes, *spec.empty(pool, PAGE)) for _ in range(turns)]
    new = [torch.randn(2, tokens, HEADS, HEAD_DIM).to(dtype) for _ in range(turns)]
    targets = [torch.empty_like(x) for x in new]
    pages = torch.randperm(pool // PAGE)[:num_pages]
    slots = (pages[:, None] * PAGE + torch.arange(in_page)).flatten()
    stored = num_bytes if quant is None else spec.nbytes(tokens, PAGE)
    other = [KVView.joint(spec.axes, *spec.empty(pool, PAGE)) for _ in range(turns)]
    rows = [torch.zeros(2, pool, HEADS, HEAD_DIM, dtype=dtype) for _ in range(turns)]

    def part(x: Tensor) -> Tensor:
        return x.view(torch.uint8).flatten()[:stored]

    calls: dict[str, Callable[[int], object]] = {
        "probe": lambda i: probes.copy(targets[i], new[i]),
        "probe, stored bytes": lambda i: probes.copy(part(targets[i]), part(new[i])),
        "torch": lambda i: targets[i].copy_(new[i]),
        "store": lambda i: ops.store(new[i][0], new[i][1], slots, views[i]),
        "index_copy_": lambda i: [rows[i][side].index_copy_(0, slots, new[i][side]) for side in range(2)],
        "load": lambda i: ops.load(slots, views[i], dtype=dtype),
        "copy": lambda i: ops.copy(views[i], slots, other[i], slots),
    }
    how: dict[str, Any] = {"smoothing": smoothing(), "positions": torch.arange(tokens)}
    if quant is not None:
        calls["smoothed store"] = lambda i: ops.store(new[i][0], new[i][1], slots, views[i], **how)
    times = in_turn({name: timed(call, turns) for name, call in calls.items()}, rounds, WARMUP)
    best = [min(a, b) for a, b in zip(times["probe"], times["torch"], strict=True)]
    row: dict[str, Any] = {"kind": kind, "layout": axes, "tokens": tokens}
    row["probe_gb_per_s"] = round(num_bytes / microseconds(best) / 1e3, 2)
    for name in ("store", "load", "copy"):
        row[f"{name}_ratio"] = ratio(times["probe, stored bytes"] if name == "copy" else best, times[name])
        row[f"{name}_us"] = microseconds(times[name])
    row["index_copy_over_store"] = ratio(times["index_copy_"], times["store"])
    if quant is not None:
        row["smoothed_over_not"] = ratio(times["smoothed store"], times["store"])
    return row


def smoothing() -> KeySmoothing:
    """Gains and offsets of pairs as in Llama, of channels i and D/2 + i."""
    rng = torch.Generator().manual_seed(1)
    first = torch.stack([torch.randperm(HEAD_DIM // 2, generator=rng)[:PAIRS] for _ in range(HEADS)])
    mean, frequencies = (
        torch.randn(HEADS, PAIRS, 2, generator=rng),
        10000.0 ** (-2.0 * first.double() / HEAD_DIM),
    )
    offset = KeyOffset(mean, torch.stack((first, first + HEAD_DIM // 2), -1), frequencies, HEAD_DIM)
    return KeySmoothing(2.0 ** torch.randint(-2, 3, (HEADS, HEAD_DIM), generator=rng), offset)


def call_us(rounds: int = 5000) -> dict[str, float]:
    """Median microseconds of whole calls for one token."""
    spec = KVSpec(1, HEADS, HEAD_DIM, torch.bfloat16, "2 B S H D")
    cache, _ = spec.empty(256, PAGE)
    kv = KVView.joint(spec.axes, cache)
    x, slots, target = torch.randn(1, HEADS, HEAD_DIM).bfloat16(), torch.tensor([63]), torch.tensor([64])
    calls: dict[str, Callable[[int], object]] = {
        "store": lambda _: ops.store(x, x, slots, kv),
        "load": lambda _: ops.load(slots, kv),
        "copy": lambda _: ops.copy(kv, slots, kv, target),
    }
    return {name: microseconds(seconds(call, i) for i in range(rounds)) for name, call in calls.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few tokens, few rounds")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layouts", nargs="*", default=["2 B S H D", "2 B H S D"])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    needs_compiled_backend()
    rounds, cases = (3, CASES[1:]) if args.quick else (args.rounds, CASES)
    probes = Probes()
    with probes.own_cores():
        rows = [
            measure(kind, axes, case, rounds, probes)
            for case in cases
            for axes in args.layouts
            for kind in args.kinds
        ]
    print(
        json.dumps(
            {
                "figure": "movement",
                "isa": cpu.ISA,
                "threads": torch.get_num_threads(),
                "heads": HEADS,
                "head_dim": HEAD_DIM,
                "page": PAGE,
                "rows": rows,
                "call_us": call_us(),
            }
        )
    )


if __name__ == "__main__":
    main()
