"""Launch of kernels on the device of the tensors, or interpreted on the CPU."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final

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
def overlap(device: torch.device) -> dict[str, bool]:
    """Options of launches that overlap: a kernel is launched before the one before it has ended.

    It must call ``wait_for_earlier`` first. NVIDIA's devices can from compute capability 9.0 on.
    """
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr, IS_SHORT: tl.constexpr):
    """Wait for the end of all earlier kernels of the stream.

    The next kernel is launched beside a short one. Beside a long one it would only take its place.
    """
    if OVERLAPS:
        if IS_SHORT:
            gdc_launch_dependents()
        gdc_wait()
