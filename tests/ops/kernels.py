"""Triton's kernels on whatever there is: interpreted on the CPU, or on a CUDA device.

What tests make is on the CPU; ``there`` lends it to the device, every byte of its storage.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from ops.attention import Case
from torch import Tensor

from kvloom import ops
from kvloom.ops import Scores

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

if find_spec("triton") is None:
    WHY_NOT = "Triton is not installed"
elif INTERPRETED or DEVICE == "cuda":
    WHY_NOT = ""
else:
    WHY_NOT = "neither a CUDA device nor TRITON_INTERPRET=1: make test-triton"

pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    # numpy warns of the NaN and infinities that the interpreter computes with.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@contextmanager
def there(*values: Any) -> Iterator[list[Any]]:
    """``values`` with their tensors on the device; what is written there is here afterwards."""
    storages: dict[int, tuple[Tensor, Tensor]] = {}

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return move_tensor(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {x.name: move(getattr(value, x.name)) for x in dataclasses.fields(value) if x.init}
            return dataclasses.replace(value, **parts)
        return value

    def move_tensor(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in storages:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            storages[storage.data_ptr()] = here, here.to(DEVICE)
        flat = storages[storage.data_ptr()][1].untyped_storage()
        moved = torch.empty(0, dtype=x.dtype, device=DEVICE)
        return moved.set_(flat, x.storage_offset(), x.shape, x.stride())

    yield [move(value) for value in values]
    for here, away in storages.values():
        here.copy_(away)


def attend(case: Case, scores: Scores | None = None, spelling: str = "pages", **how: Any) -> Tensor:
    """By Triton's kernels."""
    with there(case.query, case.kv, case.batch(spelling, **how), scores or Scores()) as moved:
        return ops.attend(*moved, backend="triton").cpu()
