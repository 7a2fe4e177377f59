"""Launch of kernels on the device of the tensors, or interpreted on the CPU."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels are interpreted on the CPU; Triton reads the same variable when it is imported."""

if INTERPRETED:
    from kvloom.ops.impl.triton.interpreter import install

    install()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Context in which kernels are launched on the device of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of the device; 2 if kernels are interpreted."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one before it has ended, if it has ``LAUNCHED_EARLY``.

    It must call ``wait_for_earlier`` first. NVIDIA's devices can from compute capability 9.0 on.
    """
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


LAUNCHED_EARLY: Final = {True: {"launch_pdl": True}, False: {}}
"""Options of launches of kernels that overlap or not; other devices than NVIDIA's have no such option."""


class Launcher:
    """Launches of one kernel with arguments for which Triton runs the same machine code.

    Finding that code takes Triton longer than a launch: it looks at each argument. So the caller vouches that
    all calls have tensors of the same forms, and the same integers but for those that are not specialized.

    Args:
        kernel: The kernel.
        options: Options of Triton.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch with all arguments of the kernel in order, constants included."""
        if self._compiled is not None:
            self._compiled[grid](*arguments)
            return
        compiled = self._kernel[grid](*arguments, **self._options)  # None where kernels are interpreted
        # On AMD's devices the code depends on the sizes of tensors, too.
        self._compiled = None if torch.version.hip else compiled


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr, IS_SHORT: tl.constexpr):
    """Wait for the end of all earlier kernels of the stream.

    The next kernel is launched beside a short one. Beside a long one it would only take its place.
    """
    if OVERLAPS:
        if IS_SHORT:
            gdc_launch_dependents()
        gdc_wait()
