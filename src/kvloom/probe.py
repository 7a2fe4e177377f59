"""How long attention takes with each instruction set of this machine, for ``kvloom info --probe``."""

import time
from statistics import median
from typing import Final

import torch

from kvloom import ops
from kvloom.caches.storage import Storage
from kvloom.core.indexing import CacheIndex
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import UnsupportedError
from kvloom.ops.choice import choose_isa, cpu_kernels, runnable_isas, why_unavailable

CASES: Final = {
    "decode bfloat16": (None, 1, 1024),
    "decode int8": (QuantSpec(8, 64), 1, 1024),
    "prompt bfloat16": (None, 256, 256),
}
"""What is timed: how keys and values are kept, new tokens, stored ones."""

_HEADS, _QUERY_HEADS, _HEAD_DIM = 8, 32, 128
_PAGE, _ROUNDS = 16, 7


def probe_isas() -> dict[str, dict[str, float]]:
    """Microseconds of a call of ``attend``, bfloat16 queries of 32 heads over pages of 8 heads of 128.

    Medians of rounds in which the instruction sets take turns, in as many threads as torch has. Nothing else
    may run operators of this library meanwhile; afterwards the instruction set is the one it was.

    Returns:
        For each instruction set that runs here, the best first, the time of each of ``CASES``.

    Raises:
        UnsupportedError: there are no compiled kernels.
    """
    chosen, isas = cpu_kernels(), runnable_isas()
    if chosen is None:
        raise UnsupportedError(f"there are no compiled kernels to time: {why_unavailable('cpu')}")
    calls = {name: _problem(*case) for name, case in CASES.items()}
    times: dict[str, dict[str, list[float]]] = {isa: {name: [] for name in calls} for isa in isas}
    try:
        for turn in range(_ROUNDS + 1):
            for isa in isas:
                choose_isa(isa)
                for name, (query, kv, batch) in calls.items():
                    start = time.perf_counter()
                    ops.attend(query, kv, batch)
                    if turn:  # the first one warms up
                        times[isa][name].append((time.perf_counter() - start) * 1e6)
    finally:
        choose_isa(chosen)
    return {isa: {name: median(taken) for name, taken in cases.items()} for isa, cases in times.items()}


def _problem(quant: QuantSpec | None, new: int, stored: int) -> tuple[torch.Tensor, KVView, ops.Batch]:
    spec = KVSpec(1, _HEADS, _HEAD_DIM, torch.bfloat16, quant=quant)
    num_pages = stored // _PAGE
    storage = Storage(spec, spec, _PAGE, torch.device("cpu"), "auto")
    storage.reserve(1, num_pages)
    key = torch.randn(stored, _HEADS, _HEAD_DIM, dtype=torch.bfloat16)
    ops.store(key, key, torch.arange(stored), storage.view)
    index = CacheIndex.pages(torch.arange(num_pages)[None] * _PAGE, _PAGE)
    batch = ops.Batch(index, torch.tensor([0, new]), torch.tensor([0, stored]))
    return torch.randn(new, _QUERY_HEADS, _HEAD_DIM, dtype=torch.bfloat16), storage.view, batch
