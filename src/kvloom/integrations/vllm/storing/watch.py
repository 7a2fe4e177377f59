"""Watch of a model's weights, which notices changes since they were loaded; does not import vLLM."""

import gc
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn

from kvloom.errors import UnsupportedError
from kvloom.integrations.tensor_state import address_of, elements_at, spread, version_of
from kvloom.store.sums import checksum

_SAMPLED: Final = 4096
"""Number of elements of a model that are compared each time, if it has few tensors."""
_SAMPLED_EACH: Final = 32
"""Least number of elements of each tensor that are compared."""


class WeightWatch:
    """Watch that notices changes of a model's parameters and buffers.

    A change is noticed by the tensor's identity, address and version, and by a sample of its elements, since
    a write through ``.data`` changes no version. Packed weights, which vLLM keeps in a function of their
    layer, are compared by the identity of the function.

    A model that has changed once counts as changed, even if the weights are written back.

    Args:
        model: A model with its weights in memory. Tensors that it replaces are not kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_changed = False
        modules = list(model.modules())
        self._held = [known for m in modules for known in (m._parameters, m._buffers, m._modules)]
        self._packed = [
            (vars(module), name, ref(value))
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, FunctionType)
        ]
        values = list(self._values())
        self._objects = [None if value is None else ref(value) for value in values]
        tensors = list({id(value): value for value in values if isinstance(value, Tensor)}.values())
        self._tensors = [ref(tensor) for tensor in tensors]
        self._states = list(map(_state, tensors))
        self._memories = [_memory(tensor) for tensor in tensors if _is_readable(tensor)]
        count = max(_SAMPLED_EACH, _SAMPLED // max(1, len(self._memories)))
        self._elements = [spread(memory, count) for memory in self._memories]
        self._sample, self._sums = self._sampled(), self._summed()

    def is_changed(self, exactly: bool = False) -> bool:
        """Whether anything changed so far.

        Args:
            exactly: Whether all elements are compared, rather than a sample.
        """
        if not self._is_changed:
            # Memory is read at the first addresses, so only if the tensors still have them.
            self._is_changed = not (
                self._has_objects()
                and self._sampled() == self._sample
                and not (exactly and self._summed() != self._sums)
            )
        return self._is_changed

    def _has_objects(self) -> bool:
        """Whether all objects are unchanged, at their first addresses, with their first versions."""
        values = list(self._values())
        return (
            len(values) == len(self._objects)
            and all(map(_is_same, values, self._objects))
            and all(_is_same(known.get(name), function) for known, name, function in self._packed)
            and [None if (x := tensor()) is None else _state(x) for tensor in self._tensors] == self._states
        )

    def _values(self) -> Iterator[Any]:
        for known in self._held:
            yield from known.values()

    def _sampled(self) -> list[bytes]:
        return [elements.tobytes() for elements in self._elements]

    def _summed(self) -> list[bytes]:
        return list(map(checksum, self._memories))


def model_of(layer: nn.Module) -> nn.Module:
    """The model that a layer is a part of, since vLLM passes only attention layers to a connector.

    Raises:
        UnsupportedError: the layer is not part of a model.
    """
    modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    owners = {id(child): module for module in modules for child in module.children()}
    model = layer
    while id(model) in owners:
        model = owners[id(model)]
    if model is layer:
        raise UnsupportedError("layers must be modules of a model for a store, got one that is in no model")
    return model


def _is_same(value: Any, known: Any) -> bool:
    return value is None if known is None else value is not None and known() is value


def _state(tensor: Tensor) -> tuple[int, int]:
    return address_of(tensor), version_of(tensor)


def _is_readable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0


def _memory(tensor: Tensor) -> memoryview:
    """The memory of a tensor's elements, which is not kept alive."""
    behind = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    return elements_at(tensor.data_ptr(), int(min(tensor.nbytes, behind)), tensor.itemsize)
