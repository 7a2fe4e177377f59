"""Steps as on a GPU where there is none: machine code is compiled, and what would launch it notes the launch.

Tensors are on the CPU, and hold what they held before.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvloom.core import checks
from kvloom.ops import rotation, smoothing
from kvloom.ops.fast import steps
from kvloom.ops.impl import triton as backend
from kvloom.ops.impl.triton import store
from kvloom.ops.impl.triton.attending import attend, launch, plan

LAUNCHED: list[tuple[Any, ...]] = []
"""Launches: the number of the machine code, the grid, and the arguments."""

_NUMBERS = itertools.count(1)
_KEPT: list[torch.library.Library] = []


class Launcher:
    """In the place of what launches machine code."""

    def __init__(self, source: object, metadata: object) -> None: ...

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: object, launch: object,
        enter: object, leave: object, *arguments: Any,
    ) -> None:  # fmt: skip
        LAUNCHED.append((function, (x, y, z), arguments))


class Utils:
    """Loads machine code nowhere, and gives it a number."""

    def load_binary(self, *kernel: object) -> tuple[int, int, int, int, int]:
        number = next(_NUMBERS)
        return number, number, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def unload_module(self, module: int) -> None: ...


class Driver:
    """A device of compute capability 9.0 that does nothing."""

    utils, launcher_cls = Utils(), Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0


def install() -> None:
    """From now on, for this process: tensors on the CPU are launched as on a GPU."""
    driver.set_active(Driver())
    checks.can_read = attend.can_read = store.can_read = lambda x: False
    launch.overlaps = plan.overlaps = lambda device: True
    smoothing.COMPILED = rotation.COMPILED = ()  # else the CPU's kernels smooth and rotate
    backend.why_not = lambda *arguments: None
    library = torch.library.Library("kvloom", "IMPL", "CPU")
    _KEPT.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("store", "attend", "attend_part"):
            library.impl(name, backend.operator(name), allow_override=True)
    steps.DEVICES[:] = ["cpu"]
