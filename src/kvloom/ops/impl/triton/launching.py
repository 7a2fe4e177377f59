"""Launch of kernels on the device of the tensors, or interpreted on the CPU."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final

import torch
from torch import Tensor

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
