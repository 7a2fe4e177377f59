"""One module for each backend. Backends never import one another."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

from torch import Tensor

_Load: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


def by_sequence(load: _Load) -> _Load:
    """Extend a ``load`` of slots ``[T]`` to slots ``[B, N]``, which it reads into ``[B, H, N, D]``."""

    @wraps(load)
    def load_any(slots: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        if slots.ndim == 1:
            return load(slots, *arguments)
        key, value = (
            x.unflatten(0, slots.shape).transpose(1, 2).contiguous()
            for x in load(slots.flatten(), *arguments)
        )
        return key, value

    return load_any
