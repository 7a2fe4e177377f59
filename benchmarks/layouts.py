"""Conversion of layouts against a copy of the same bytes by torch, alternating in one process."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvloom.layouts import KVTensors, Placement, convert, find_layout

LAYERS, PAGES, HEADS, DIM = 4, 2048, 8, 128
PAIRS = ("vllm", "2 B H S D", "flashinfer", "hugging_face", "pmx_dynamic_3", "vllm_paged", "ascend_nz")
RUNS = 5


def best_s(call: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Write ``benchmarks/layouts.md``."""
    pages = {f"layers.{i}.cache": torch.randn(2, PAGES, 16, HEADS, DIM).half() for i in range(LAYERS)}
    first = KVTensors(pages, "vllm")
    nbytes = sum(x.nbytes for x in pages.values())
    copies = [torch.empty_like(x) for x in pages.values()]
    lines = ["| from \\ to | " + " | ".join(PAIRS) + " |", "|---" * (len(PAIRS) + 1) + "|"]
    for a in PAIRS:
        page = 16 if "B" in find_layout("from", a).of("key", 2).names else None
        source = convert(first, Placement(a, page))
        row = []
        for b in PAIRS:
            target = convert(
                source, Placement(b, 16 if "B" in find_layout("to", b).of("key", 2).names else None)
            )
            copied = best_s(lambda: [x.copy_(y) for x, y in zip(copies, pages.values(), strict=True)])
            row.append(f"{copied / best_s(lambda source=source, target=target: convert(source, target)):.2f}")
        lines.append(f"| {a} | " + " | ".join(row) + " |")
    text = (
        "# Conversion of layouts\n\n"
        "Speed of `kvloom.convert` into tensors that exist, as a part of the speed of torch's `copy_` of the "
        f"same {nbytes >> 20} MiB without a change of layout, which runs before each: float16, {LAYERS} "
        f"layers, {PAGES} pages of 16 slots, {HEADS} heads of {DIM}, best of {RUNS}, "
        f"{torch.get_num_threads()} threads. More than 1 is faster than that copy.\n\n"
        "    python benchmarks/layouts.py\n\n" + "\n".join(lines) + "\n"
    )
    Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
