"""What makes the host wait for a device, told on a CPU: tensors that are read, and tensors made of lists."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kvloom

SOURCES = str(Path(kvloom.__file__).parent)
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")


class Waits(TorchFunctionMode):
    """Where tensors are read (``reads``), or made of numbers of the host (``copies``): files of kvloom."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.copies: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``, and note it if it waits."""
        name = getattr(func, "__name__", "")
        found = self.reads if name in READS else self.copies if func is torch.tensor else None
        if found is not None:
            frames = [x for x in traceback.extract_stack() if x.filename.startswith(SOURCES)]
            last = frames[-1] if frames else None
            where = "others" if last is None else f"{last.filename.removeprefix(SOURCES)}:{last.name}"
            found.append(f"{name} in {where}")
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Names of the operators of kvloom that are called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``, and note its name."""
        if str(func).startswith("kvloom."):
            self.names.append(str(func).removeprefix("kvloom.").removesuffix(".default"))
        return func(*args, **(kwargs or {}))
