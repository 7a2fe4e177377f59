"""Times of attention with each choice of kernels, for ``kvloom info --probe``."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, TypeAlias

import torch

from kvloom import ops
from kvloom.caches.tensors.storage import Storage
from kvloom.core.indexing import CacheIndex
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import UnsupportedError
from kvloom.ops.choice import (
    PREFETCHES,
    choose_isa,
    choose_prefetch,
    cpu_kernels,
    prefetched_cache,
    runnable_isas,
    why_unavailable,
)

CASES: Final = {
    "decode bfloat16": (None, 1, 1024),
    "decode int8": (QuantSpec(8, 64), 1, 1024),
    "prompt bfloat16": (None, 256, 256),
}
"""Cases to time: quantization, number of new tokens, number of stored tokens."""
LONG_CASES: Final = {
    "decode bfloat16": (None, 1, 8192),
    "decode int8": (QuantSpec(8, 64), 1, 16384),
}
"""Cases with keys and values from memory, not caches: each call reads other 32 MiB; as ``CASES``."""

_HEADS, _QUERY_HEADS, _HEAD_DIM = 8, 32, 128
_PAGE, _ROUNDS = 16, 7
_COPIES = 8  # number of copies of long cases, used in turn


def probe_isas() -> dict[str, dict[str, float]]:
    """Microseconds of a call of ``attend``, bfloat16 queries of 32 heads over pages of 8 heads of 128.

    Medians of rounds in which the instruction sets take turns, in as many threads as torch has. Nothing else
    may run operators of this library meanwhile; afterwards the instruction set is the one it was.

    Returns:
        For each instruction set that runs here, the best first, the time of each of ``CASES``.

    Raises:
        UnsupportedError: there are no compiled kernels.
    """
    chosen = cpu_kernels()
    if chosen is None:
        raise UnsupportedError(f"there are no compiled kernels to time: {why_unavailable('cpu')}")
    calls = {name: [_problem(*case)] for name, case in CASES.items()}
    return _in_turn(runnable_isas(), choose_isa, chosen, calls)


def probe_prefetches() -> dict[str, dict[str, float]]:
    """Microseconds as of ``probe_isas``, for ``LONG_CASES`` by the cache level of prefetches.

    Raises:
        UnsupportedError: there are no compiled kernels.
    """
    chosen = prefetched_cache()
    if chosen is None:
        raise UnsupportedError(f"there are no compiled kernels to time: {why_unavailable('cpu')}")
    calls = {name: [_problem(*case) for _ in range(_COPIES)] for name, case in LONG_CASES.items()}
    return _in_turn(PREFETCHES, choose_prefetch, chosen, calls)


_Problem: TypeAlias = tuple[torch.Tensor, KVView, ops.Batch]


def _in_turn(
    choices: Sequence[str], choose: Callable[[str], None], chosen: str, calls: dict[str, list[_Problem]]
) -> dict[str, dict[str, float]]:
    """Median microseconds of a call for each case with each choice, over the problems of the case."""
    times: dict[str, dict[str, list[float]]] = {choice: {name: [] for name in calls} for choice in choices}
    try:
        for turn in range(_ROUNDS + 1):
            for choice in choices:
                choose(choice)
                for name, problems in calls.items():
                    for problem in problems:
                        start = time.perf_counter()
                        ops.attend(*problem)
                        if turn:  # the first turn is a warm-up
                            times[choice][name].append((time.perf_counter() - start) * 1e6)
    finally:
        choose(chosen)
    return {choice: {name: median(taken) for name, taken in cases.items()} for choice, cases in times.items()}


def _problem(quant: QuantSpec | None, new: int, stored: int) -> _Problem:
    spec = KVSpec(1, _HEADS, _HEAD_DIM, torch.bfloat16, quant=quant)
    num_pages = stored // _PAGE
    storage = Storage(spec, spec, _PAGE, torch.device("cpu"), "auto")
    storage.reserve(1, num_pages)
    key = torch.randn(stored, _HEADS, _HEAD_DIM, dtype=torch.bfloat16)
    ops.store(key, key, torch.arange(stored), storage.view)
    index = CacheIndex.pages(torch.arange(num_pages)[None] * _PAGE, _PAGE)
    batch = ops.Batch(index, torch.tensor([0, new]), torch.tensor([0, stored]))
    return torch.randn(new, _QUERY_HEADS, _HEAD_DIM, dtype=torch.bfloat16), storage.view, batch
