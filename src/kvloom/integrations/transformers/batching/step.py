"""A step of a session: where its tokens lie, made once, and attention over them in every layer.

Shapes: T new tokens of all requests, B requests, P pages of a request, H key/value heads, Hq query
heads, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvloom import ops
from kvloom.caches.storage import Storage
from kvloom.caches.tokens import attend_behind, scores_of_newest
from kvloom.core.indexing import CacheIndex
from kvloom.errors import StateError
from kvloom.integrations.transformers.batching.newest import Newest, NewestStep, Span


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What all layers of a forward share.

    Attributes:
        slots: ``[T]``, where the new tokens go.
        batch: Where all tokens lie.
        newest: The same for those that are kept unquantized, too.
    """

    slots: Tensor
    batch: ops.Batch
    newest: NewestStep | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[tuple[int, int]],
        tables: Sequence[Tensor],
        page_size: int,
        newest: Newest | None = None,
        spans: Sequence[Span] = (),
    ) -> "Step":
        """The step of some requests.

        Args:
            lengths: Stored and new tokens of each.
            tables: First slots ``[P]`` of the pages of each.
            page_size: Tokens in a page.
            newest: Where new tokens are kept unquantized, too.
            spans: Of each request there.
        """
        device = tables[0].device
        stored, new = torch.tensor(lengths, device=device).unbind(1)
        starts = torch.zeros(2, len(lengths) + 1, dtype=torch.int64, device=device)
        torch.cumsum(torch.stack((new, stored + new)), 1, out=starts[:, 1:])
        seqstarts, kvstarts = starts
        index = CacheIndex.pages(pad_sequence(list(tables), True, -1.0), page_size)
        sequence = torch.repeat_interleave(new)
        position = torch.arange(len(sequence), device=device) + (stored - seqstarts[:-1])[sequence]
        exact = None if newest is None else newest.step(spans, lengths, sequence, position, seqstarts)
        return cls(index.slots(sequence, position), ops.Batch(index, seqstarts, kvstarts), exact)


class StepAttention:
    """Stores the new tokens of a step in a layer and attends to all of its requests.

    Args:
        storages: Of each layer.
        windows: The same, ``None`` for no window.
        newest: Tokens that are read unquantized, if there are such.
    """

    def __init__(
        self, storages: Mapping[int, Storage], windows: Sequence[int | None], newest: Newest | None
    ) -> None:
        self._storages, self._windows, self._newest = storages, windows, newest

    def __call__(
        self, step: Step, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ops.Scores
    ) -> Tensor:
        """Attention of a layer.

        Args:
            step: The step.
            layer: Index of the layer.
            query: ``[1, Hq, T, D]``.
            key: ``[1, H, T, D]``.
            value: As ``key``.
            scores: Without a window, which is the layer's.

        Returns:
            ``[1, T, Hq, D]``.

        Raises:
            StateError: T is not that of the step.
        """
        storage, newest = self._storages[layer], step.newest
        if query.shape[2] != step.slots.shape[0]:
            raise StateError(
                f"query must have the {step.slots.shape[0]} tokens of the step, got {query.shape[2]}"
            )
        key, value, query = (x[0].transpose(0, 1) for x in (key, value, query))
        storage.store(key, value, step.slots)
        window = self._windows[layer]
        if window:
            scores = replace(scores, window=window)
        if newest is None or self._newest is None or layer not in self._newest.storages:
            return storage.attend(query, step.batch, scores)[None]
        exact, count = self._newest.storages[layer], self._newest.num_tokens
        exact.store(key, value, newest.slots)
        part = ops.attend_part(query, exact.view, newest.batch, scores_of_newest(scores, count))
        tokens = storage.view, step.batch, scores, storage.rotation
        return attend_behind(part, query, *tokens, skip=count, skip_from=newest.known)[None]
