"""Smoothing and rotation of keys and values before quantization, and their inverse when read.

Shapes: B sequences, N tokens of each, T tokens of all, H heads, Hq query heads, D head dim.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.specs import KVSpec
from kvloom.core.views import KVView
from kvloom.ops import KeySmoothing
from kvloom.ops.gathered import attention as gathered
from kvloom.ops.gathered.plan import GatheredRun, Others
from kvloom.quant.rotation import block_of


class Transform(NamedTuple):
    """Smoothing of keys, then rotation of keys and of values.

    Attention of transformed queries over stored keys has the model's scores, and its result is rotated as the
    values are. Positions are those of tokens in their text, ``[T]`` or ``[B, N]`` int64; they may be ``None``
    unless ``needs_positions``.

    Attributes:
        key: Elements of a head vector of the keys that are rotated together; 0 where none are.
        value: Elements of a head vector of the values that are rotated together; 0 where none are.
        smoothing: Smoothing of the keys; ``None`` if they are not smoothed.
    """

    key: int = 0
    value: int = 0
    smoothing: KeySmoothing | None = None

    @classmethod
    def of(
        cls, key: KVSpec, value: KVSpec | None, smoothing: KeySmoothing | None = None
    ) -> "Transform | None":
        """Transform for keys and values of these specs; ``None`` if they are stored unchanged."""
        of_key, of_value = (
            block_of(x.head_dim) if x is not None and x.quant is not None and x.quant.rotated else 0
            for x in (key, value)
        )
        smoothing = smoothing if key.quant is not None else None
        return cls(of_key, of_value, smoothing) if of_key or of_value or smoothing is not None else None

    @property
    def needs_positions(self) -> bool:
        """Whether stored keys depend on their positions in the text."""
        return self.smoothing is not None and self.smoothing.offset is not None

    def side(self, side: int) -> "Transform":
        """Transform of keys (0) or values (1) alone, as the keys of a storage without values."""
        return Transform(self.value) if side else Transform(self.key, 0, self.smoothing)

    def query(
        self, query: Tensor, scores: ops.Scores, first_position: Tensor | None, rank: int = 0
    ) -> tuple[Tensor, ops.Scores]:
        """Transform queries ``[T, Hq, D]`` and scores for stored keys.

        Args:
            query: Queries of the model.
            scores: Scores of the model, without a positional bias.
            first_position: ``[B]``, positions of the first token of each sequence in the index; ``None`` for
                0.
            rank: Elements of a latent, where keys are latents and values are rope keys: a query has its part
                for the latent first, then that for the rope key. 0 where keys are not latents.
        """
        if rank:
            latent, rope = query[..., :rank], query[..., rank:]
            if self.smoothing is not None:
                latent = self.smoothing.query(latent, None, self.key)[0]
            elif self.key:
                latent = ops.rotate(latent, self.key)
            return torch.cat((latent, ops.rotate(rope, self.value) if self.value else rope), -1), scores
        if self.smoothing is None:
            return ops.rotate(query, self.key) if self.key else query, scores
        query, bias = self.smoothing.query(query, first_position, self.key)
        return query, scores if bias is None else replace(scores, positional_bias=bias)

    def output(self, out: Tensor, rank: int = 0) -> Tensor:
        """Invert the transform of attention's result ``[T, Hq, D]``, or of stored values.

        With ``rank``, the elements of a latent, the result is a sum of latents, which are stored as keys.
        """
        if rank:
            return self._latents(out, rank, is_restored=True)
        return ops.rotate(out, self.value) if self.value else out

    def attended(self, out: Tensor, rank: int = 0) -> Tensor:
        """Transform a result of attention to untransformed tokens; arguments as of ``output``."""
        return self._latents(out, rank, is_restored=False) if rank else self.output(out)

    def _latents(self, out: Tensor, rank: int, *, is_restored: bool) -> Tensor:
        """Transform sums of latents ``[T, Hq, D]``, or, with ``is_restored``, invert the transform."""
        if self.smoothing is None:
            return ops.rotate(out, self.key) if self.key else out
        rows = out.reshape(-1, 1, rank)
        return self.smoothing.smoothed(rows, None, self.key, is_restored=is_restored).view(out.shape)


def stored_by(transform: Transform | None, positions: Tensor | None = None) -> dict[str, Any]:
    """Arguments of ``ops.store`` and ``ops.load`` for tokens that are stored with a transform."""
    if transform is None:
        return {}
    return {"smoothing": transform.smoothing, "positions": positions, "blocks": transform[:2]}


def attend(
    query: Tensor,
    view: KVView,
    batch: ops.Batch,
    scores: ops.Scores,
    transform: Transform | None,
    first_position: Tensor | None = None,
    is_latent: bool = False,
) -> Tensor:
    """``ops.attend`` to keys and values that were stored with a transform.

    Args:
        query: As of ``ops.attend``.
        view: The same.
        batch: The same.
        scores: The same, without a positional bias.
        transform: Transform of the stored tokens; ``None`` for none.
        first_position: As of ``Transform.query``.
        is_latent: As of ``ops.attend``.
    """
    if transform is None:
        return ops.attend(query, view, batch, scores, is_latent=is_latent)
    if (
        batch.counts is not None
        and transform.needs_positions
        and gathered.is_gathered(query, view, batch, scores, is_latent)
    ):
        return _attend_restored(query, view, batch, scores, transform, first_position)
    rank = view.key.head_dim if is_latent else 0
    query, scores = transform.query(query, scores, first_position, rank)
    return transform.output(ops.attend(query, view, batch, scores, is_latent=is_latent), rank)


def _attend_restored(
    query: Tensor,
    view: KVView,
    batch: ops.Batch,
    scores: ops.Scores,
    transform: Transform,
    first_position: Tensor | None,
) -> Tensor:
    """``attend`` by torch's attention, which adds no offset to products: keys and values are restored."""

    def rest(others: Others) -> Tensor:
        first = None if first_position is None else first_position[others.sequences]
        return attend(query[others.rows], view, others.batch, scores, transform, first)

    load = _restoring(view, query.dtype, transform, first_position)
    return gathered.attend(query, view, batch, scores, load, rest)


def attend_part(
    query: Tensor,
    view: KVView,
    batch: ops.Batch,
    scores: ops.Scores,
    transform: Transform | None,
    first_position: Tensor | None = None,
    is_latent: bool = False,
    *,
    skip: int | None,
    skip_from: Tensor | None = None,
    prior: ops.AttendedPart | None = None,
) -> ops.AttendedPart:
    """``ops.attend_part`` to keys and values that were stored with a transform.

    Args:
        query: As of ``ops.attend_part``.
        view: The same.
        batch: The same.
        scores: The same, without a positional bias.
        transform: As of ``attend``.
        first_position: The same.
        is_latent: As of ``ops.attend_part``.
        skip: The same.
        skip_from: The same.
        prior: The same, of tokens that are not transformed.

    Returns:
        As of ``ops.attend_part``, of tokens that are not transformed.
    """
    how: dict[str, Any] = {"is_latent": is_latent, "skip": skip, "skip_from": skip_from}
    given = query, view, batch, scores
    if transform is None:
        return ops.attend_part(*given, **how, prior=prior)
    if (
        batch.counts is not None
        and transform.needs_positions
        and gathered.is_part_gathered(*given, is_latent, skip, skip_from, prior)
    ):
        return _attend_part_restored(*given, transform, first_position, skip)
    rank = view.key.head_dim if is_latent else 0
    is_changed = bool(rank or transform.value)
    query, scores = transform.query(query, scores, first_position, rank)
    if is_changed and prior is not None:
        prior = prior._replace(out=transform.attended(prior.out, rank))
    part = ops.attend_part(query, view, batch, scores, **how, prior=prior)
    return part._replace(out=transform.output(part.out, rank)) if is_changed else part


def _attend_part_restored(
    query: Tensor,
    view: KVView,
    batch: ops.Batch,
    scores: ops.Scores,
    transform: Transform,
    first_position: Tensor | None,
    skip: int | None,
) -> ops.AttendedPart:
    """``attend_part`` as ``_attend_restored``."""

    def rest(others: Others) -> ops.AttendedPart:
        first = None if first_position is None else first_position[others.sequences]
        return attend_part(query[others.rows], view, others.batch, scores, transform, first, skip=skip)

    load = _restoring(view, query.dtype, transform, first_position)
    return ops.AttendedPart(*gathered.attend_part(query, view, batch, scores, skip, load, rest))


def _restoring(
    view: KVView, dtype: torch.dtype, transform: Transform, first_position: Tensor | None
) -> gathered.Load:
    """What loads keys and values, the transform inverted."""

    def load(run: GatheredRun) -> tuple[Tensor, Tensor]:
        positions = run.positions
        if first_position is not None:
            positions = positions + first_position[run.sequences].unsqueeze(1)
        return ops.load(run.slots, view, dtype=dtype, **stored_by(transform, positions))

    return load
