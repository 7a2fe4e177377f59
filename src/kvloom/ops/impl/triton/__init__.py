"""Triton backend, for CUDA. Importing this package imports no Triton; running an operator does.

``TRITON_INTERPRET=1`` in the environment makes Triton interpret the same kernels on the CPU: slow, for tests.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

OPERATORS = {
    "store": "store",
    "load": "load",
    "copy": "copy",
    "attend": "attend",
    "attend.biased": "attend",
    "attend.latent": "attend_latent",
    "attend_part": "attend_part",
    "attend_part.biased": "attend_part",
    "attend_part.latent": "attend_latent_part",
    "smooth": "smooth",
    "smooth_query": "smooth_query",
    "rotate": "rotate",
}
"""Overloads with a kernel; each value is the operator's name."""

_MODULES = {
    **dict.fromkeys(("smooth", "smooth_query", "rotate"), "vectors.transform"),
    **{
        name: f"attending.{name}" for name in ("attend", "attend_part", "attend_latent", "attend_latent_part")
    },
}
"""Modules that have an operator and its limits; others have the operator's name."""


def operator(name: str) -> Callable[..., Any]:
    """Operator by name, with the arguments of the schema."""
    found: Callable[..., Any] = getattr(module(_MODULES.get(name, name)), name)
    return found


def why_not(name: str, device: torch.device, *args: Any) -> str | None:
    """Reason why the operator cannot run with these arguments, after "backend 'triton'", or ``None``."""
    if why_not_installed() is not None:
        return why_not_installed()
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs tensors on a CUDA device (or TRITON_INTERPRET=1 in the environment), got {device}"
    refused: str | None = module(_MODULES.get(name, name)).why_not(*args)
    return refused


@cache
def why_not_installed() -> str | None:
    """Reason why there is no Triton, or ``None``."""
    return None if find_spec("triton") else "needs Triton: pip install triton numpy"


def triton_version() -> str:
    """Version of the installed Triton."""
    try:
        return version("triton")
    except PackageNotFoundError:  # another distribution has the module, as on ROCm
        return "of this torch"


@cache
def module(name: str) -> Any:
    """Module of this package, imported at the first call."""
    return import_module(f"{__name__}.{name}")
