"""Recurrent states of a cache's layers: their specs, and getting and setting them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from torch import Tensor

from kvloom.caches.prefixes.states import StateSpec
from kvloom.integrations.transformers.models.layer_specs import StatefulLayer

Specs: TypeAlias = dict[int, tuple[StateSpec, ...]]
"""Specs of the states of each layer, by its number."""
_KINDS: Final = ("conv", "recurrent")


def stateful_layers(layers: Sequence[Any]) -> dict[int, Any]:
    """Layers with recurrent states, by their numbers."""
    return {i: layer for i, layer in enumerate(layers) if isinstance(layer, StatefulLayer)}


def specs_of(layers: Sequence[Any]) -> Specs:
    """Specs of the states of each layer that has any after it was fed tokens."""
    found: Specs = {}
    for i, layer in stateful_layers(layers).items():
        own = tuple(
            StateSpec(kind, number, tuple(x.shape[1:]), x.dtype)
            for kind in _KINDS
            for number, x in getattr(layer, f"{kind}_states").items()
            if x is not None
        )
        if own:
            found[i] = own
    return found


def states_of(layers: Sequence[Any], specs: Mapping[int, Sequence[StateSpec]]) -> dict[int, list[Tensor]]:
    """The states of each layer ``[B, ...]``, in the order of ``specs``."""
    return {i: [getattr(layers[i], f"{x.name}_states")[x.number] for x in own] for i, own in specs.items()}


def restore_states(
    layers: Sequence[Any], specs: Mapping[int, Sequence[StateSpec]], states: Mapping[int, Sequence[Tensor]]
) -> None:
    """Set the states of layers that have none; the tensors are not copied."""
    for i, own in specs.items():
        layer = layers[i]
        for spec, x in zip(own, states[i], strict=True):
            layer.lazy_initialization(**{f"{spec.name}_states": x, "state_idx": spec.number})
            getattr(layer, f"{spec.name}_states")[spec.number] = x
            layer.has_previous_state[spec.number] = True
