"""Attention of a step of a session in every layer.

Shapes: T new tokens of all requests, H key/value heads, Hq query
heads, D head dim of keys, Dv of values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvloom import ops
from kvloom.caches.prefixes.step import Step
from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.session.groups import SessionGroup


@dataclass(frozen=True)
class SharedKeys:
    """New keys of a layer that later layers also attend to; the model passes them on.

    Attributes:
        cache: Cache that stores them.
        layer: Index of the layer.
        keys: ``[1, H, T, D]``.
    """

    cache: Any
    layer: int
    keys: Tensor


class StepAttention:
    """Attention of a step in one layer: stores the new tokens, and attends for all requests.

    Args:
        groups: Groups of all layers that keep keys and values.
        residuals: Groups of the residual windows of layers that keep codes.
        num_newest: Residual window: the last tokens that each token reads unquantized.
        sources: For each layer that attends to keys of another layer, that layer's index.
    """

    def __init__(
        self,
        groups: Sequence[SessionGroup],
        residuals: Sequence[SessionGroup],
        num_newest: int,
        sources: Mapping[int, int],
    ) -> None:
        self._num_newest, self._sources, self._shared = num_newest, sources, {*sources.values()}
        self._groups = {i: (n, group) for n, group in enumerate(groups) for i in group.storages}
        self._residuals = {
            i: (len(groups) + n, group) for n, group in enumerate(residuals) for i in group.storages
        }

    def handed_on(self, cache: Any, layer: int, key: Tensor) -> Tensor | SharedKeys:
        """New keys of a layer as the model passes them on: ``SharedKeys`` if later layers attend to them."""
        return SharedKeys(cache, layer, key) if layer in self._shared else key

    def __call__(
        self,
        step: Step,
        layer: int,
        query: Tensor,
        key: Tensor | SharedKeys,
        value: Tensor,
        scores: ops.Scores,
        is_latent: bool = False,
    ) -> Tensor:
        """Attention of a layer. A layer with a source stores nothing.

        Args:
            step: The step.
            layer: Index of the layer.
            query: ``[1, Hq, T, D]``, for latents ``[1, Hq, T, D + Dv]``.
            key: ``[1, H, T, D]``.
            value: ``[1, H, T, Dv]``.
            scores: Options of the scores without a window, which the layer's group adds.
            is_latent: As in ``ops.attend``.

        Returns:
            ``[1, T, Hq, Dv]``, for latents ``[1, T, Hq, D]``.

        Raises:
            StateError: T is not that of the step.
            UnsupportedError: ``key`` is of another layer than the layer's source.
        """
        source = self._sources.get(layer, layer)
        if isinstance(key, SharedKeys):
            if key.layer != source:
                raise UnsupportedError(f"layer {layer} must get the keys of layer {source}, got {key.layer}")
            key = key.keys
        if query.shape[2] != step.num_tokens:
            raise StateError(
                f"query must have the {step.num_tokens} tokens of the step, got {query.shape[2]}"
            )
        number, group = self._groups[source]
        storage, (slots, batch, first) = group.storages[source], step.groups[number]
        key, value, query = (x[0].transpose(0, 1) for x in (key, value, query))
        if source == layer:
            storage.store(key, value, slots, step.positions)
        if group.window is not None:
            scores = replace(scores, window=group.window)
        if source not in self._residuals:
            return storage.attend(query, batch, scores, first, is_latent)[None]
        number, residual = self._residuals[source]
        exact, (slots, newest, _) = residual.storages[source], step.groups[number]
        if source == layer:
            exact.store(key, value, slots)
        beside = exact, newest, self._num_newest, first, is_latent
        return storage.attend_beside(query, batch, scores, *beside)[None]
