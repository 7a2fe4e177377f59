"""The steps of a session: which requests the next one feeds, and its attention in every layer.

Shapes: T new tokens of all requests, H key/value heads, Hq query
heads, D head dim of keys, Dv of values.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.prefixes.step import Step
from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.session.requests.cuts import Cuts
from kvloom.integrations.transformers.session.requests.held import Held
from kvloom.integrations.transformers.session.steps.mixer_calls import Feed
from kvloom.integrations.transformers.session.steps.recurrent import MixerCalls


@dataclass(frozen=True)
class SharedKeys:
    """New keys of a layer with the cache that stores them; the model passes them on.

    Later layers attend to them, too, or the model tells its attention of no cache.

    Attributes:
        cache: Cache that stores them.
        layer: Index of the layer.
        keys: ``[1, H, T, D]``.
    """

    cache: Any
    layer: int
    keys: Tensor


class Steps:
    """The steps of a session: each stores its new tokens, and attends for all requests that it feeds.

    Args:
        codes: Groups of all layers that keep keys and values.
        residuals: Groups of the residual windows of layers that keep codes.
        num_newest: Residual window: the last tokens that each token reads unquantized.
        sources: For each layer that attends to keys of another layer, that layer's index.
        stateful: Layers of any cache for a model with recurrent states; ``None`` for other models.
        device: Device of the model.
        lock: Lock of the pages, held while a step is made.
        cuts: Where texts are cut for mixers, as in ``MixerCalls``.

    Attributes:
        num_steps: Number of steps that have begun.
        num_tokens: Number of tokens in them.
        num_drafted: Number of drafted tokens among these.
        num_accepted: Number of drafted tokens that were chosen.
        num_assisted: Number of these that an assistant had drafted.
    """

    def __init__(
        self,
        codes: Sequence[PrefixGroup],
        residuals: Sequence[PrefixGroup],
        num_newest: int,
        sources: Mapping[int, int],
        stateful: Sequence[Any] | None,
        device: torch.device,
        lock: AbstractContextManager[Any],
        cuts: Cuts | None = None,
    ) -> None:
        self._num_newest, self._sources, self._shared = num_newest, sources, {*sources.values()}
        self._every, self._stateful, self._device = [*codes, *residuals], stateful, device
        self._codes = {i: (n, x, own.window) for n, own in enumerate(codes) for i, x in own.storages.items()}
        numbered = enumerate(residuals, len(codes))
        self._residuals = {i: (n, x) for n, own in numbered for i, x in own.storages.items()}
        self._lock, self._cuts = lock, cuts
        self.num_steps = self.num_tokens = self.num_drafted = self.num_accepted = self.num_assisted = 0
        self.clear()

    def clear(self) -> None:
        """Remove all requests from the next step."""
        self._feeds: list[Feed] = []
        self._step: Step | None = None
        self._calls: MixerCalls | None = None

    def add(self, held: Held, past: int, new: int) -> None:
        """Add a request with ``new`` tokens after ``past`` stored ones; begins a new step if needed."""
        if self._step is not None:
            self.clear()
        self._feeds.append(Feed(held, past, new))

    def begin(self) -> Step:
        """The step, made at the first call.

        Raises:
            StateError: as ``MixerCalls``.
        """
        if self._step is None:
            with self._lock:
                rows = [*zip(*(x.held.groups for x in self._feeds), strict=True)]
                step = Step([(x.past, x.new) for x in self._feeds], self._every, rows)
                if self._stateful is not None:
                    self._calls = MixerCalls(self._stateful, self._feeds, self._device, self._cuts)
            self._step = step
            self.num_steps += 1
            self.num_tokens += step.num_tokens
            return step
        return self._step

    @property
    def calls(self) -> MixerCalls | None:
        """The calls of mixers in this step; ``None`` for a model without recurrent states."""
        if self._stateful is not None:
            self.begin()
        return self._calls

    def handed_on(self, cache: Any, layer: int, key: Tensor) -> Tensor | SharedKeys:
        """New keys of a layer as the model passes them on: ``SharedKeys`` if later layers attend to them."""
        return SharedKeys(cache, layer, key) if layer in self._shared else key

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | SharedKeys,
        value: Tensor,
        scores: ops.Scores,
        is_latent: bool = False,
    ) -> Tensor:
        """Attention of a layer. A layer with a source stores nothing.

        Args:
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
        step, source = self._step or self.begin(), self._sources.get(layer, layer)
        if isinstance(key, SharedKeys):
            if key.layer != source:
                raise UnsupportedError(f"layer {layer} must get the keys of layer {source}, got {key.layer}")
            key = key.keys
        if query.shape[2] != step.num_tokens:
            raise StateError(
                f"query must have the {step.num_tokens} tokens of the step, got {query.shape[2]}"
            )
        number, storage, window = self._codes[source]
        slots, batch, first = step.groups[number]
        key, value, query = (x[0].transpose(0, 1) for x in (key, value, query))
        if source == layer:
            storage.store(key, value, slots, step.positions)
        if window is not None:
            scores = replace(scores, window=window)
        beside = None
        if source in self._residuals:
            number, exact = self._residuals[source]
            slots, newest, _ = step.groups[number]
            if source == layer:
                exact.store(key, value, slots)
            beside = exact, newest, self._num_newest
        return storage.attend(query, batch, scores, first, is_latent, beside)[None]
