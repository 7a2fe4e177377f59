"""How near attention over stored tokens comes to reading them, and to torch's own. Prints one JSON line.

A decode step of one Llama-3-8B layer. Each round times three on memory that no cache holds: ``ops.attend`` on
random pages, a read of the same number of bytes, and torch's scaled dot product attention on contiguous keys
and values (of the query's dtype, query heads folded so that no key is read twice). Ratios are medians of
those in a round.
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
from torch.nn.functional import scaled_dot_product_attention

from kvloom import Batch, CacheIndex, KVSpec, KVView, QuantSpec, ops
from kvloom.ops.impl import cpu

QUERY_HEADS, HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
KINDS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "int8 g64": (torch.bfloat16, QuantSpec(8, 64)),
    "int4 g64": (torch.bfloat16, QuantSpec(4, 64)),
}
SIZES = ((1, 512), (1, 4096), (1, 16384), (8, 4096))
COLD = 128 << 20
"""Bytes between two uses of the same memory."""

Probe = Callable[[Tensor], object]


def build_probe(folder: str) -> Probe:
    """A read in torch's threads, compiled here."""
    library = Path(folder) / "read_probe.so"
    source = Path(__file__).with_name("read_probe.cpp")
    torch_lib = Path(torch.__file__).parent / "lib"
    flags = ["-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC"]
    subprocess.run(["c++", *flags, "-o", library, source, f"-L{torch_lib}", "-ltorch_cpu"], check=True)
    read_all = ctypes.CDLL(str(library)).read_all
    read_all.restype = ctypes.c_int64

    def probe(x: Tensor) -> object:
        return read_all(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.nbytes // 4096))

    return probe


def seconds(function: Callable[[int], object], turn: int) -> float:
    """Time of one call, in seconds."""
    start = time.perf_counter()
    function(turn)
    return time.perf_counter() - start


def measure(kind: str, size: tuple[int, int], rounds: int, axes: str, probe: Probe) -> dict[str, object]:
    """Ratios of one kind of cache at a batch size and a context."""
    dtype, quant = KINDS[kind]
    rows, context = size
    tokens = rows * context
    spec = KVSpec(1, HEADS, HEAD_DIM, dtype, axes, quant)
    stored = spec.nbytes(tokens, PAGE)
    turns = max(1, COLD // stored)
    pool = tokens + 16 * PAGE
    views = []
    for _ in range(turns):
        cache, scale = spec.empty(pool, PAGE)
        kv = KVView.joint(spec.axes, cache, scale)
        new = torch.randn(pool, HEADS, HEAD_DIM).to(dtype)
        ops.store(new, new, torch.arange(pool), kv)
        views.append(kv)
    keys, values = (
        [torch.randn(rows, HEADS, context, HEAD_DIM).to(dtype) for _ in range(turns)] for _ in "kv"
    )
    same_bytes = [torch.ones(stored // 4096 * 4096, dtype=torch.uint8) for _ in range(turns)]
    pages = torch.randperm(pool // PAGE)[: tokens // PAGE].view(rows, -1)
    starts = torch.arange(rows + 1)
    batch = Batch(CacheIndex.pages(pages * PAGE, PAGE), starts, starts * context)
    query = torch.randn(rows, QUERY_HEADS, HEAD_DIM).to(dtype)
    folded = query.view(rows, HEADS, QUERY_HEADS // HEADS, HEAD_DIM)
    contenders: dict[str, Callable[[int], object]] = {
        "ours": lambda i: ops.attend(query, views[i], batch),
        "probe": lambda i: probe(same_bytes[i]),
        "torch": lambda i: scaled_dot_product_attention(folded, keys[i], values[i]),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 2):
        for name, function in contenders.items():
            elapsed = seconds(function, turn % turns)
            if turn >= 2:
                times[name].append(elapsed)

    def ratio(other: str) -> float:
        return round(median(b / a for a, b in zip(times["ours"], times[other], strict=True)), 3)

    return {
        "kind": kind,
        "batch": rows,
        "context": context,
        "stored_bytes": stored,
        "ours_us": round(median(times["ours"]) * 1e6, 1),
        "probe_gb_per_s": round(stored / median(times["probe"]) / 1e9, 2),
        "of_read_speed": ratio("probe"),
        "torch_over_ours": ratio("torch"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small context, few rounds")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layout", default="2 B S H D")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if cpu.ISA is None:
        sys.exit(f"attend_cpu needs the compiled backend: {cpu.WHY_NOT}")
    sizes, rounds = (((1, 256),), 3) if args.quick else (SIZES, args.rounds)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        probe = build_probe(folder)
        rows = [measure(kind, size, rounds, args.layout, probe) for size in sizes for kind in args.kinds]
    print(
        json.dumps(
            {
                "figure": "attend_cpu",
                "isa": cpu.ISA,
                "threads": torch.get_num_threads(),
                "layout": args.layout,
                "query_heads": QUERY_HEADS,
                "heads": HEADS,
                "head_dim": HEAD_DIM,
                "page": PAGE,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
