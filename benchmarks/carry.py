"""What it takes to carry 1 GiB from file to file, over copying that file.

    python benchmarks/carry.py [--tokens 8192] [--rounds 5]

A state of llama.cpp in float16 of the sizes of an 8B model (32 layers, 8 heads of 128) becomes a file of
mlx-lm, a file of names, another state, and a state with transposed values. Copies by ``shutil.copyfile``
alternate with them; the source is in the page cache, and files are not flushed. Prints one line of
JSON: medians of CPU and wall seconds, and of the ratios to the copy of the same round; ``memory`` is the most
memory that is not of a file, over that before, in sizes of the source.

Prediction: a copy moves bytes once within the kernel. Carrying reads them in the processor's cache, looks for
infinities and permutes half of them in one pass, and hands them in parts of four MiB to a thread that writes
them, which takes longer: the wall seconds of the copy where a second core is idle, 1.2 times where heads are
written apart, 1.5 times where values are transposed, and 2 to 2.5 times the CPU seconds; memory of at most
0.1, though transposed values are gathered.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvloom.carry import (
    CacheGeometry,
    CarriedCache,
    CarriedLayer,
    CarriedSide,
    read_llama,
    write_array_file,
    write_llama,
    write_mlx,
)
from kvloom.carry.files import writing

LAYERS, HEADS, DIM = 32, 8, 128
GEOMETRY = CacheGeometry.uniform(LAYERS, HEADS, DIM, "llama")


def private_bytes() -> int:
    """Memory of this process that no file has."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def seconds_of(call: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def most_memory(call: Callable[[], object]) -> int:
    """The most private memory during a call, over that before."""
    before, most, ended = private_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], private_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    ended.set()
    thread.join()
    return most[0] - before


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    writing.os.fsync = lambda number: None  # type: ignore[attr-defined]  # a copy does not flush, either
    folder = Path(tempfile.mkdtemp())
    source, target = folder / "source", folder / "target"
    side = CarriedSide.of(torch.randn(args.tokens, HEADS, DIM).half())
    tokens = tuple(range(args.tokens))
    write_llama(CarriedCache((CarriedLayer(side, side),) * LAYERS, args.tokens, tokens), source, GEOMETRY)
    calls: dict[str, Callable[[], object]] = {
        "mlx": lambda: write_mlx(read_llama(source, GEOMETRY), target),
        "safetensors": lambda: write_array_file(read_llama(source, GEOMETRY), target, GEOMETRY),
        "llama.cpp": lambda: write_llama(read_llama(source, GEOMETRY), target, GEOMETRY),
        "llama.cpp, transposed": lambda: write_llama(
            read_llama(source, GEOMETRY), target, GEOMETRY, flash_attention=False
        ),
    }
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ("copy", *calls)}
    for _ in range(args.rounds):
        for name, call in (("copy", lambda: shutil.copyfile(source, target)), *calls.items()):
            target.unlink(missing_ok=True)
            rows[name].append(seconds_of(call))
    nbytes = source.stat().st_size
    found = {"bytes": nbytes, "rounds": args.rounds, "load": round(os.getloadavg()[0], 1)}
    for name, times in rows.items():
        ratios = [
            [x / y for x, y in zip(a, b, strict=True)] for a, b in zip(times, rows["copy"], strict=True)
        ]
        for at, what in enumerate(("cpu", "wall")):
            seconds = statistics.median(x[at] for x in times)
            over = statistics.median(x[at] for x in ratios)
            found[f"{name}: {what}"] = f"{seconds:.2f} s, {over:.2f} of a copy"
        if name in calls:
            found[f"{name}: memory"] = round(most_memory(calls[name]) / nbytes, 3)
    print(json.dumps(found))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
