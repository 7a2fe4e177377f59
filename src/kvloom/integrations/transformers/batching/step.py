"""A step of a session: where its tokens lie, made once, and attention over them in every layer.

Shapes: T new tokens of all requests, B requests, P pages of a request, H key/value heads, Hq query
heads, D head dim of keys, Dv of values.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.prefixes import GroupTable
from kvloom.errors import StateError
from kvloom.integrations.transformers.batching.groups import SessionGroup


class GroupStep(NamedTuple):
    """Of one group of layers.

    Attributes:
        slots: ``[T]``, where the new tokens go.
        batch: What their attention reads.
        first_position: ``[B]``, position of the first token of each request that its index has; ``None`` for
            0.
    """

    slots: Tensor
    batch: ops.Batch
    first_position: Tensor | None


class Step:
    """Attention metadata of one forward pass, shared by all layers.

    Args:
        lengths: Stored and new tokens of each request.
        groups: Of layers.
        tables: Of each group, the pages of each request.

    Attributes:
        groups: Of each group.
        num_tokens: T.
        positions: ``[T]``, of the new tokens in their texts.
    """

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        groups: Sequence[SessionGroup],
        tables: Sequence[Sequence[GroupTable]],
    ) -> None:
        storages = [next(iter(group.storages.values())) for group in groups]
        device = storages[0].device
        stored, new = torch.tensor(lengths, device=device).unbind(1)
        seqstarts = _starts(new)
        sequence = torch.repeat_interleave(new)
        position = torch.arange(len(sequence), device=device) + (stored - seqstarts[:-1])[sequence]
        self.positions = position
        self.num_tokens = len(sequence)
        self.groups: list[GroupStep] = []
        for group, held, storage in zip(groups, tables, storages, strict=True):
            index, begins = group.index_of(held, storage)
            ends, own, bases = stored + new, position, None
            if any(begins):
                bases = torch.tensor(begins, device=device)
                ends, own = ends - bases, position - bases[sequence]
            batch = ops.Batch(index, seqstarts, _starts(ends))
            self.groups.append(GroupStep(index.slots(sequence, own), batch, bases))


class StepAttention:
    """Stores the new tokens of a step in a layer and attends to all of its requests.

    Args:
        groups: Of all layers.
        residuals: Of those that keep tokens unquantized beside codes.
        num_newest: Newest tokens that each token reads so.
    """

    def __init__(
        self, groups: Sequence[SessionGroup], residuals: Sequence[SessionGroup], num_newest: int
    ) -> None:
        self._num_newest = num_newest
        self._groups = {i: (n, group) for n, group in enumerate(groups) for i in group.storages}
        self._residuals = {
            i: (len(groups) + n, group) for n, group in enumerate(residuals) for i in group.storages
        }

    def __call__(
        self,
        step: Step,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: ops.Scores,
        is_latent: bool = False,
    ) -> Tensor:
        """Attention of a layer.

        Args:
            step: The step.
            layer: Index of the layer.
            query: ``[1, Hq, T, D]``, of latents ``[1, Hq, T, D + Dv]``.
            key: ``[1, H, T, D]``.
            value: ``[1, H, T, Dv]``.
            scores: Without a window, which is the layer's.
            is_latent: As of ``ops.attend``.

        Returns:
            ``[1, T, Hq, Dv]``, or of latents ``[1, T, Hq, D]``.

        Raises:
            StateError: T is not that of the step.
        """
        if query.shape[2] != step.num_tokens:
            raise StateError(
                f"query must have the {step.num_tokens} tokens of the step, got {query.shape[2]}"
            )
        number, group = self._groups[layer]
        storage, (slots, batch, first) = group.storages[layer], step.groups[number]
        key, value, query = (x[0].transpose(0, 1) for x in (key, value, query))
        storage.store(key, value, slots, step.positions)
        if group.window is not None:
            scores = replace(scores, window=group.window)
        if layer not in self._residuals:
            return storage.attend(query, batch, scores, first, is_latent)[None]
        number, residual = self._residuals[layer]
        exact, (slots, newest, _) = residual.storages[layer], step.groups[number]
        exact.store(key, value, slots)
        beside = exact, newest, self._num_newest, first, is_latent
        return storage.attend_beside(query, batch, scores, *beside)[None]


def _starts(lengths: Tensor) -> Tensor:
    """``[B + 1]``, sums of ``lengths``."""
    starts = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, out=starts[1:])
    return starts
