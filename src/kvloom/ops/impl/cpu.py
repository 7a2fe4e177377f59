"""Compiled backend: finds and loads the library, chooses the instruction set.

``csrc`` has the kernels. Loading registers them under the CPU dispatch key; without a library every operator
runs on the reference.
"""

import ctypes
import logging
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import torch

from kvloom.errors import ArgumentError, ConfigError, KVError, OutOfMemory, ShapeError

COMPILED: Final = (
    "store",
    "load",
    "copy",
    "attend",
    "attend_part",
    "rotate",
    "arrange",
    "smooth",
    "smooth_query",
)
"""The operators that have a compiled kernel."""
MAX_SMOOTHED: Final = 4096
"""Largest head dim that they can smooth."""
ISAS: Final = ("baseline", "neon", "avx2", "avx512", "amx", "amx-emulated")
"""Values of ``KVLOOM_ISA``. The last one emulates AMX in plain C++, for tests; by default the library chooses
the last of the others that runs."""
PREFETCHES: Final = ("l1", "l2")
"""Values of ``KVLOOM_PREFETCH``: cache level into which attention prefetches. The default is the faster one
on processors that were measured. Only time depends on it."""
_ERRORS: Final = {error.__name__: error for error in (ArgumentError, ShapeError, OutOfMemory)}
_REFUSAL: Final = re.compile(rf"kvloom\.errors\.({'|'.join(_ERRORS)}): (.*)")


def find_library(folders: Iterable[str]) -> Path | None:
    """Find the compiled library in one of ``folders``; an editable install has one for build results."""
    suffixes = (".so", ".dylib")
    places = (Path(folder) / f"libkvloom_cpu{suffix}" for folder in folders for suffix in suffixes)
    return next((place for place in places if place.exists()), None)


class Library(NamedTuple):
    """The kernels that were loaded."""

    isa: str | None  # None without kernels
    why_not: str | None = None  # reason if there are no kernels, a sentence
    max_head_dim: int = 0  # of attention
    why_no_amx: str | None = None  # reason if they are not those of AMX, a sentence
    handle: ctypes.CDLL | None = None
    prefetch: str | None = None  # one of PREFETCHES


def load_library() -> Library:
    """Load the library and choose the instruction set: ``KVLOOM_ISA``, or the best that this machine runs.

    In the environment ``KVLOOM_LIBRARY`` may name another library than the installed one, and
    ``KVLOOM_PREFETCH`` one of ``PREFETCHES``.

    Raises:
        ConfigError: ``KVLOOM_ISA`` or ``KVLOOM_PREFETCH`` is unknown, or this machine does not support the
            former.
    """
    named = os.environ.get("KVLOOM_LIBRARY")
    path = Path(named) if named else find_library(sys.modules[__package__ or ""].__path__)
    if path is None:
        return Library(
            None, "this installation has no compiled kernels (no C++20 compiler or torch when it was built)"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return Library(None, f"the compiled kernels do not load into torch {torch.__version__}: {error}")
    library = ctypes.CDLL(str(path))
    library.kvloom_isa.restype = ctypes.c_char_p
    library.kvloom_max_head_dim.restype = ctypes.c_int64
    library.kvloom_why_not.restype = ctypes.c_char_p
    library.kvloom_hold_batch_invariance.argtypes = [ctypes.c_int64]
    library.kvloom_hold_batch_invariance.restype = None
    wanted = os.environ.get("KVLOOM_ISA")
    if wanted:
        if wanted not in ISAS:
            raise ConfigError(f"KVLOOM_ISA must be {', '.join(ISAS[:-1])} or {ISAS[-1]}, got {wanted!r}")
        if library.kvloom_choose_isa(wanted.encode()):
            why_not = library.kvloom_why_not(wanted.encode()).decode()
            raise ConfigError(f"KVLOOM_ISA must be one that runs here, got {wanted!r}: {why_not}")
    prefetch = os.environ.get("KVLOOM_PREFETCH")
    if prefetch and prefetch not in PREFETCHES:
        raise ConfigError(f"KVLOOM_PREFETCH must be {' or '.join(PREFETCHES)}, got {prefetch!r}")
    to_l2 = library.kvloom_prefetch_to_l2(PREFETCHES.index(prefetch) if prefetch else -1)
    isa = library.kvloom_isa().decode()
    why_no_amx = None
    if isa != "amx":
        refused = library.kvloom_why_not(b"amx")
        why_no_amx = f"KVLOOM_ISA is {wanted}" if refused is None else refused.decode()
    return Library(isa, None, library.kvloom_max_head_dim(), why_no_amx, library, PREFETCHES[to_l2])


ISA, WHY_NOT, MAX_HEAD_DIM, WHY_NO_AMX, _HANDLE, PREFETCH = load_library()
if WHY_NOT is not None:
    logging.getLogger("kvloom").warning(
        "%s: store, load, copy and attend run in plain torch, several times slower. Remedy: install "
        "torch>=2.10 and a C++20 compiler, then in a checkout of kvloom: "
        "pip install --force-reinstall --no-deps .",
        WHY_NOT,
    )


def refused(error: Exception) -> KVError | None:
    """Convert the error of a call that a kernel refused; ``None`` for every other exception.

    The text of the error identifies it, see ``csrc/refusals.h``, since the class differs between versions of
    torch.
    """
    said = _REFUSAL.search(str(error))
    return said and _ERRORS[said[1]](said[2])


def runnable_isas() -> list[str]:
    """Instruction sets that this machine runs, the best first; emulated ones are for tests."""
    if _HANDLE is None:
        return []
    return [isa for isa in reversed(ISAS[:-1]) if _HANDLE.kvloom_why_not(isa.encode()) is None]


def choose_isa(isa: str) -> None:
    """Run all later calls on one of ``runnable_isas()``; only while no call is running."""
    if _HANDLE is None or _HANDLE.kvloom_choose_isa(isa.encode()):
        raise ConfigError(f"isa must be one of {', '.join(runnable_isas())}, got {isa!r}")


def choose_prefetch(prefetch: str) -> None:
    """Prefetch as one of ``PREFETCHES`` in all later calls of attention; only while none is running."""
    if _HANDLE is None or prefetch not in PREFETCHES:
        raise ConfigError(f"prefetch must be {' or '.join(PREFETCHES)}, got {prefetch!r}")
    _HANDLE.kvloom_prefetch_to_l2(PREFETCHES.index(prefetch))


def hold_batch_invariance(change: int) -> None:
    """Add ``change`` to the number of holders of batch invariance; from any thread, at any time."""
    with _HOLDING:
        _NUM_HOLDERS[0] += change
    if _HANDLE is not None:
        _HANDLE.kvloom_hold_batch_invariance(change)


def is_batch_invariant() -> bool:
    """Whether batch invariance of attention has a holder."""
    return _NUM_HOLDERS[0] > 0


_HOLDING: Final = Lock()
_NUM_HOLDERS: Final = [0]


def why_not_batch_invariant(dtype: torch.dtype) -> str | None:
    """Reason why attention of queries of this dtype is not batch invariant without a holder, or ``None``."""
    if dtype != torch.bfloat16 or ISA not in ("amx", "amx-emulated"):
        return None
    return "on AMX calls of up to 16 new tokens have other bits than those of more"
