"""What follows from an object alone, worked out once and kept with it, and what that depends on."""

from collections.abc import Hashable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

MOST_KEPT: Final = 64
"""Maximum number of results that one object keeps."""


class TensorForm(NamedTuple):
    """What the choice of a kernel depends on: a tensor without the place and the values of its elements."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_aligned: bool  # to 16 bytes, as wide loads need


def form_of(x: Tensor | None) -> TensorForm | None:
    """Form of a tensor."""
    return None if x is None else TensorForm(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)


class Memo:
    """Base of objects that do not change: keeps what others derive from them, by key.

    Copies, and objects that were saved, begin with nothing.
    """

    __slots__ = ("_derived",)

    _derived: dict[Hashable, Any]

    def recall(self, key: Hashable) -> Any:
        """What was kept, or ``None``."""
        try:
            return self._derived.get(key)
        except AttributeError:  # a copy
            return None

    def keep(self, key: Hashable, derived: Any) -> None:
        """Keep what follows from this object alone; if there is too much, forget what there was."""
        try:
            kept = self._derived
        except AttributeError:
            kept = {}
            object.__setattr__(self, "_derived", kept)
        if len(kept) >= MOST_KEPT:
            kept.clear()
        kept[key] = derived
