"""What the checks of a call cost over the dispatched operator it ends in. Prints one JSON line.

Medians of many alternating calls in one process, on a decode step of one token.
"""

import json
import time
from collections.abc import Callable
from statistics import median

import torch

from kvloom import Batch, CacheIndex, KVSpec, KVView, ops
from kvloom.ops import schemas

REPEATS = 3000


def paired(public: Callable[[], object], raw: Callable[[], object]) -> tuple[float, float]:
    """Median microseconds of both, called in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for function, sink in zip((public, raw), times, strict=True):
            start = time.perf_counter()
            function()
            sink.append((time.perf_counter() - start) * 1e6)
    return median(times[0]), median(times[1])


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    spec = KVSpec(1, 8, 64, torch.float32)
    cache, _ = spec.empty(256)
    kv = KVView.joint(spec.axes, cache)
    key, slots = torch.randn(1, 8, 64), torch.tensor([63])
    query = torch.randn(1, 8, 64)
    zero, seq, stored = torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([0, 64])
    batch = Batch(CacheIndex.offset(zero), seq, stored)
    table, page_size = batch.index.table, batch.index.page_size
    cases = {
        "store": (
            lambda: ops.store(key, key, slots, kv),
            lambda: schemas.store(key, key, slots, *kv.tensors),
        ),
        "load": (
            lambda: ops.load(slots, kv),
            lambda: schemas.load(slots, *kv.tensors, torch.float32, 1),
        ),
        "attend": (
            lambda: ops.attend(query, kv, batch),
            lambda: schemas.attend(
                query, *kv.tensors, table, None, page_size, seq, stored, 0, None, 0.125, True,
                None, None, None, None, None,
            ),
        ),
    }  # fmt: skip
    rows = {}
    for name, (public, raw) in cases.items():
        public_us, raw_us = paired(public, raw)
        rows[name] = {"public_us": public_us, "raw_us": raw_us, "overhead_us": public_us - raw_us}
    print(json.dumps({"figure": "dispatch", "ops": rows}))


if __name__ == "__main__":
    main()
