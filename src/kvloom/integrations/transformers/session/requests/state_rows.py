"""Recurrent states of the requests of a session, a row for each, in caches that several requests share.

Shapes: B requests.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvloom.errors import StateError
from kvloom.integrations.transformers.states.logs import Key, State
from kvloom.integrations.transformers.states.rollback import empty_layers, keys_of


class StateRows(Cache):  # type: ignore[misc]
    """Cache with the states of B requests, a row for each.

    Attributes:
        touched: Keys of the states that a mixer read or wrote since it was cleared.
        recording: Object that records the calls of mixers with this cache; ``None`` for none.

    Args:
        layers: Layers of any cache for the model, with its kinds and numbers of states.
    """

    recording: Any = None

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers=empty_layers(layers))
        self.touched: set[Key] = set()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Read a state, and record it in ``touched``."""
        self.touched.add(Key(layer_idx, "conv", state_idx))
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Read a state, and record it in ``touched``."""
        self.touched.add(Key(layer_idx, "recurrent", state_idx))
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        """Write a state, and record it in ``touched``."""
        self.touched.add(Key(layer_idx, "conv", state_idx))
        return super().update_conv_state(conv_states, layer_idx, state_idx=state_idx, **kwargs)

    def update_recurrent_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        """Write a state, and record it in ``touched``."""
        self.touched.add(Key(layer_idx, "recurrent", state_idx))
        return super().update_recurrent_state(states, layer_idx, state_idx=state_idx, **kwargs)

    @property
    def num_rows(self) -> int:
        """B; 0 before any state was computed."""
        return next((len(x) for x in self.tensors().values()), 0)

    def tensors(self) -> dict[Key, Tensor]:
        """All states ``[B, ...]``."""
        found = {key: State.of(self.layers[key.layer], key).tensor for key in keys_of(self.layers)}
        return {key: x for key, x in found.items() if x is not None}

    def copy_rows(self, rows: Sequence[int], keys: Iterable[Key], other: Cache) -> None:
        """Copy some states of some requests to another cache, as its only rows."""
        tensors = self.tensors()
        for key in keys:
            if key in tensors:
                State(tensors[key][[*rows]], True).put(other.layers[key.layer], key)


class RequestStates(NamedTuple):
    """The recurrent states of one request.

    Attributes:
        cache: Cache with the states, and possibly those of other requests.
        row: Row of the request.
        num_tokens: Number of tokens that the states include.
    """

    cache: StateRows
    row: int
    num_tokens: int

    def copied(self) -> "RequestStates":
        """A copy in a cache of its own."""
        cache = StateRows(self.cache.layers)
        self.cache.copy_rows([self.row], self.cache.tensors(), cache)
        return self._replace(cache=cache, row=0)


def side_by_side(states: Sequence[RequestStates]) -> StateRows:
    """One cache with the states of B requests; their present cache if it has exactly these rows in order."""
    first: StateRows = states[0].cache
    is_all = all(x.cache is first and x.row == i for i, x in enumerate(states))
    if is_all and first.num_rows == len(states):
        return first
    new, known = StateRows(first.layers), {id(x.cache): x.cache.tensors() for x in states}
    for key in known[id(first)]:
        rows = torch.stack([known[id(x.cache)][key][x.row] for x in states])
        State(rows, True).put(new.layers[key.layer], key)
    return new


def nbytes_of(states: Iterable[RequestStates]) -> int:
    """Bytes of the caches with the states of requests, including rows that are no longer used."""
    caches = {id(x.cache): x.cache for x in states}
    return sum(x.nbytes for cache in caches.values() for x in cache.tensors().values())


def expect_apart(states: Iterable[RequestStates]) -> None:
    """Raise StateError if two requests have the same states."""
    places = [(id(x.cache), x.row) for x in states]
    if len({*places}) < len(places):
        raise StateError("requests must have recurrent states of their own, got two with the same")
