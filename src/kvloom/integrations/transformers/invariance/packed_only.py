"""Linear layers whose weights are kept in oneDNN's order only, which takes the memory of one copy.

``state_dict`` and ``layer.weight`` give a copy in the usual order. ``load_state_dict`` and ``model.to`` pack
the new weight.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvloom.caches.layers.read_only import ReadOnly
from kvloom.integrations.transformers.invariance.packing import PackedRows, PackedWeight
from kvloom.integrations.transformers.invariance.rules import NONE

_WEIGHT: Final = "weight"


class _Weight(ReadOnly):
    """A copy of a packed weight."""

    refusal = (
        "the weight of a layer that is packed only cannot be changed in place: use load_state_dict, or "
        "disable packing first"
    )


class PackedOnly(PackedRows):
    """A linear layer without its weight in the usual order."""

    requires_grad: bool

    @property
    def weight(self) -> Any:
        """A read-only copy of the weight in the usual order, made at each use."""
        return _Weight.of(self.packed.dense(self))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + _WEIGHT] = self.packed.dense(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with _unpacked(self):
            self._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with _unpacked(self):
            return self._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle, with the weight in the usual order."""
        return super().__getstate__() | {"_dense": self.packed.dense(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, dense = type(self), state.pop("_dense")
        self.__class__ = self.original  # type: ignore[assignment]
        self.__setstate__(state)
        self._parameters = {_WEIGHT: nn.Parameter(dense), **self._parameters}
        keep_packed_only(self, kind, self.row_rule != NONE)


class PackedOnlyLinear(PackedOnly, nn.Linear):  # type: ignore[override]
    original = nn.Linear


class PackedOnlyConv1D(PackedOnly, Conv1D):  # type: ignore[misc]
    original = Conv1D


PACKED_ONLY: Final = {nn.Linear: PackedOnlyLinear, Conv1D: PackedOnlyConv1D}
"""For each class of linear layers, its class with a packed weight only."""


def keep_packed_only(layer: Any, kind: type[PackedOnly], is_invariant: bool) -> None:
    """Pack a layer of the original class and free its weight; a weight that cannot be packed stays."""
    packed = PackedWeight(layer, is_invariant)
    if packed.tensor is None:
        return
    packed.forget_weight()
    layer.packed = packed
    layer.requires_grad = layer._parameters.pop(_WEIGHT).requires_grad
    layer.__class__ = kind


@contextmanager
def _unpacked(layer: Any) -> Iterator[None]:
    """Context in which a layer has its weight and its original class."""
    kind, is_invariant = type(layer), layer.packed.is_invariant
    unpack(layer)
    try:
        yield
    finally:
        keep_packed_only(layer, kind, is_invariant)


def unpack(layer: Any) -> None:
    """Restore a layer's weight and its original class."""
    kind, packed = type(layer), layer.__dict__.pop("packed")
    with torch.no_grad():
        weight = nn.Parameter(packed.dense(layer), requires_grad=layer.__dict__.pop("requires_grad"))
    layer.__class__ = kind.original
    layer._parameters = {_WEIGHT: weight, **layer._parameters}
