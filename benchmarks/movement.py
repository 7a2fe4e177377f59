"""How near store, load and copy come to the fastest copy of the same bytes. Prints one JSON line.

Each round times every contender and the probe one after the other on memory that no cache holds; the figures
are medians of the ratios in a round. Bytes are those of keys and values as numbers (of ``copy``: as stored).
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from kvloom import KVSpec, KVView, QuantSpec, ops
from kvloom.ops.impl import cpu

HEADS, HEAD_DIM, PAGE = 8, 128, 16
KINDS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8 g64": (torch.bfloat16, QuantSpec(8, 64)),
    "int4 g64": (torch.bfloat16, QuantSpec(4, 64)),
    "int8 g8": (torch.bfloat16, QuantSpec(8, 8)),
}
Probe = Callable[[Tensor, Tensor], object]


def build_probe(folder: str) -> Probe:
    """The best of a streaming copy compiled here and torch's own, by a quick look at both."""
    library = Path(folder) / "probe.so"
    torch_lib = Path(torch.__file__).parent / "lib"
    source = Path(__file__).with_name("probe.cpp")
    subprocess.run(
        [
            "c++",
            "-O3",
            "-march=native",
            "-shared",
            "-fPIC",
            "-o",
            library,
            source,
            f"-L{torch_lib}",
            "-ltorch_cpu",
        ],
        check=True,
    )
    stream = ctypes.CDLL(str(library)).stream_pages

    def probe(to: Tensor, source: Tensor) -> None:
        stream(
            ctypes.c_void_p(to.data_ptr()),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_int64(to.nbytes // 4096),
        )

    return probe


def seconds(function: Callable[[int], object], turn: int) -> float:
    """Time of one call, in seconds."""
    start = time.perf_counter()
    function(turn)
    return time.perf_counter() - start


def measure(kind: str, axes: str, tokens: int, rounds: int, stream: Probe) -> dict[str, object]:
    """Ratios of one kind of cache."""
    dtype, quant = KINDS[kind]
    num_bytes = 2 * tokens * HEADS * HEAD_DIM * dtype.itemsize
    turns = max(4, (256 << 20) // num_bytes)
    spec = KVSpec(1, HEADS, HEAD_DIM, dtype, axes, quant)
    pool = tokens + 64 * PAGE
    views = [KVView.joint(spec.axes, *spec.empty(pool, PAGE)) for _ in range(turns)]
    new = [torch.randn(2, tokens, HEADS, HEAD_DIM).to(dtype) for _ in range(turns)]
    targets = [torch.empty_like(x) for x in new]
    pages = torch.randperm(pool // PAGE)[: tokens // PAGE]
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    stored = num_bytes if quant is None else spec.nbytes(tokens, PAGE)
    other = [KVView.joint(spec.axes, *spec.empty(pool, PAGE)) for _ in range(turns)]

    def part(x: Tensor) -> Tensor:
        return x.view(torch.uint8).flatten()[: stored // 4096 * 4096]

    contenders: dict[str, Callable[[int], object]] = {
        "probe": lambda i: stream(targets[i], new[i]),
        "torch": lambda i: targets[i].copy_(new[i]),
        "store": lambda i: ops.store(new[i][0], new[i][1], slots, views[i]),
        "load": lambda i: ops.load(slots, views[i], dtype=dtype),
        "copy": lambda i: ops.copy(views[i], slots, other[i], slots),
        "probe, stored bytes": lambda i: stream(part(targets[i]), part(new[i])),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 2):
        for name, function in contenders.items():
            elapsed = seconds(function, turn % turns)
            if turn >= 2:
                times[name].append(elapsed)
    best = [min(a, b) for a, b in zip(times["probe"], times["torch"], strict=True)]
    row: dict[str, object] = {"kind": kind, "layout": axes}
    row["probe_gb_per_s"] = round(num_bytes / median(best) / 1e9, 2)
    for name in ("store", "load", "copy"):
        against = times["probe, stored bytes"] if name == "copy" else best
        row[f"{name}_ratio"] = round(median(a / b for a, b in zip(against, times[name], strict=True)), 3)
        row[f"{name}_us"] = round(median(times[name]) * 1e6, 1)
    return row


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
    return {
        name: round(median(seconds(call, i) for i in range(rounds)) * 1e6, 2) for name, call in calls.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layouts", nargs="*", default=["2 B S H D", "2 B H S D"])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if cpu.ISA is None:
        sys.exit(f"movement needs the compiled backend: {cpu.WHY_NOT}")
    with tempfile.TemporaryDirectory() as folder:
        stream = build_probe(folder)
        rows = [
            measure(kind, axes, args.tokens, args.rounds, stream)
            for axes in args.layouts
            for kind in args.kinds
        ]
    print(
        json.dumps(
            {
                "figure": "movement",
                "isa": cpu.ISA,
                "threads": torch.get_num_threads(),
                "tokens": args.tokens,
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
