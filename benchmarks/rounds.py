"""Contenders timed in turn, round after round in one process, and the yardsticks that run among them.

What slows the machine down for a while meets all of them: ratios within a round hold where seconds do not.
"""

import ctypes
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from processor import last_level_cache
from torch import Tensor

from kvloom.ops.impl import cpu

COLD = max(320 << 20, last_level_cache())
"""Bytes that a contender reads between two uses of the same memory; the others of a round read the same."""

PAUSE = 0.005
"""Seconds until idle threads sleep."""

PROBE_PAGE = 4096
"""Bytes; the probes read and copy whole pages."""


def in_turn(functions: dict[str, Callable[[], float]], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Results of each function in each round; every round starts with the next function."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for i in range(-warmup, rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            took = functions[name]()
            if i >= 0:
                times[name].append(took)
    return times


Clock = Callable[[], float]
"""Seconds since some moment."""


def seconds(function: Callable[[int], object], turn: int, clock: Clock = time.perf_counter) -> float:
    """Time of one call."""
    start = clock()
    function(turn)
    return clock() - start


def timed(
    function: Callable[[int], object], turns: int, *, is_short: bool = True, clock: Clock = time.perf_counter
) -> Callable[[], float]:
    """Seconds of one call, on the next of ``turns`` memories; before a short one, another wakes its threads.

    Libraries have threads of their own: those of the contender before wait in a loop for more work at first.
    """
    turn = itertools.count()

    def run() -> float:
        time.sleep(PAUSE)
        if is_short:
            function(next(turn) % turns)
        return seconds(function, next(turn) % turns, clock)

    return run


def turns_for(num_bytes: int, rounds: int) -> int:
    """Copies of ``num_bytes`` that calls take in turn, so that no cache has what the next one reads."""
    return min(max(2, COLD // max(num_bytes, 1)), 2 * rounds)


def ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """Median over the rounds of one time by another."""
    return round(median(a / b for a, b in zip(above, below, strict=True)), 3)


def microseconds(times: Iterable[float]) -> float:
    """Median of seconds."""
    return round(median(times) * 1e6, 1)


def needs_compiled_backend() -> None:
    """Ends the program where there is nothing to measure."""
    if cpu.ISA is None:
        sys.exit(f"this benchmark needs the compiled backend: {cpu.WHY_NOT}")


class Probes:
    """``probes.cpp``, compiled here for this machine."""

    def __init__(self) -> None:
        source = Path(__file__).with_name("probes.cpp")
        torch_lib = Path(torch.__file__).parent / "lib"
        flags = ["-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probes.so"
            command = ["c++", *flags, "-o", path, source, f"-L{torch_lib}", "-ltorch_cpu"]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(path))
        self._library.read_all.restype = self._library.read_in_order.restype = ctypes.c_int64

    @contextmanager
    def own_cores(self) -> Iterator[None]:
        """Each of torch's threads keeps to one core.

        Some schedulers leave two threads that wait for each other on one core for milliseconds.
        """
        if not hasattr(os, "sched_getaffinity"):
            yield
            return
        cores = os.sched_getaffinity(0)
        self._share_cores(cores, one_each=True)
        try:
            yield
        finally:
            self._share_cores(cores, one_each=False)

    def _share_cores(self, cores: set[int], one_each: bool) -> None:
        numbers = (ctypes.c_int64 * len(cores))(*sorted(cores))
        self._library.share_cores(
            numbers,
            ctypes.c_int64(len(cores)),
            ctypes.c_int64(torch.get_num_threads()),
            ctypes.c_bool(one_each),
        )

    def read(self, x: Tensor) -> object:
        """Every byte of ``x`` up to a whole page."""
        return self._library.read_all(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.nbytes // PROBE_PAGE))

    def read_pieces(self, x: Tensor, order: Tensor, to_l2: bool) -> object:
        """Every byte of ``x``, cut into equal pieces, which are read in the order of the int64 ``order``.

        Prefetches into the first-level cache, or ``to_l2``: which is faster depends on the processor.
        """
        return self._library.read_in_order(
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(order.data_ptr()),
            ctypes.c_int64(len(order)),
            ctypes.c_int64(x.nbytes // len(order)),
            ctypes.c_bool(to_l2),
        )

    def copy(self, to: Tensor, source: Tensor) -> None:
        """``source`` to ``to``, past the caches, up to a whole page."""
        self._library.copy_all(
            ctypes.c_void_p(to.data_ptr()),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_int64(to.nbytes // PROBE_PAGE),
        )


@contextmanager
def all_cores() -> Iterator[None]:
    """This thread may use every core, as will threads that it starts."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def probe_memory(num_bytes: int, turns: int) -> list[Tensor]:
    """``turns`` buffers of ``num_bytes`` for a read probe, in whole pages."""
    size = max(num_bytes // PROBE_PAGE, 1) * PROBE_PAGE
    return [torch.ones(size, dtype=torch.uint8) for _ in range(turns)]
