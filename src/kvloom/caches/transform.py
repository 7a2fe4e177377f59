"""What is done to keys and values before they are quantized, and what that asks of those who read them.

Shapes: B sequences, N tokens of each, T tokens of all, H heads, Hq query heads, D head dim.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.checks import FLOAT_DTYPES
from kvloom.core.specs import KVSpec
from kvloom.core.views import KVView
from kvloom.ops import KeySmoothing
from kvloom.quant.rotation import block_of


class Transform(NamedTuple):
    """Smoothing of keys, then rotation of keys and of values.

    Attention over what is stored has the scores of the model with transformed queries, and its result is
    rotated. Positions are those of tokens in their text, ``[T]`` or ``[B, N]`` int64, and ``None`` where
    ``needs_positions`` says so.

    Attributes:
        key: Elements of a head vector of the keys that are rotated together; 0 where none are.
        value: The same of the values.
        smoothing: Of the keys; ``None`` if they are not smoothed.
    """

    key: int = 0
    value: int = 0
    smoothing: KeySmoothing | None = None

    @classmethod
    def of(
        cls, key: KVSpec, value: KVSpec | None, smoothing: KeySmoothing | None = None
    ) -> "Transform | None":
        """That of keys and values which are kept so; ``None`` if they are stored as they are."""
        of_key, of_value = (
            block_of(x.head_dim) if x is not None and x.quant is not None and x.quant.rotated else 0
            for x in (key, value)
        )
        smoothing = smoothing if key.quant is not None else None
        return cls(of_key, of_value, smoothing) if of_key or of_value or smoothing is not None else None

    @property
    def needs_positions(self) -> bool:
        """Whether stored keys depend on where they stand in their text."""
        return self.smoothing is not None and self.smoothing.offset is not None

    def stored(self, key: Tensor, value: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, N, D]`` or ``[T, H, D]`` as they are stored.

        Raises:
            ShapeError: keys that are smoothed do not fit.
        """
        if self.smoothing is not None:
            key = self.smoothing.smoothed(key, positions, self.key)
        elif self.key:
            key = _rotated(key, self.key)
        return key, _rotated(value, self.value) if self.value else value

    def side(self, side: int, x: Tensor, positions: Tensor | None) -> Tensor:
        """Keys (0) or values (1) as they are stored; raises as ``stored``."""
        if side:
            return _rotated(x, self.value) if self.value else x
        if self.smoothing is not None:
            return self.smoothing.smoothed(x, positions, self.key)
        return _rotated(x, self.key) if self.key else x

    def restored(self, key: Tensor, value: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values as they were, of those that were read."""
        if self.smoothing is not None:
            key = self.smoothing.restored(key, positions, self.key)
        elif self.key:
            key = ops.rotate(key, self.key)
        return key, self.output(value)

    def query(
        self, query: Tensor, scores: ops.Scores, first_position: Tensor | None, rank: int = 0
    ) -> tuple[Tensor, ops.Scores]:
        """Queries ``[T, Hq, D]`` for keys as they are stored, and how their scores are formed.

        Args:
            query: As the model has them.
            scores: Of the model, without a positional bias.
            first_position: ``[B]``, positions of the first token of each sequence in the index; ``None``
                for 0.
            rank: Elements of the keys that are latents, behind which a query has what is for the values, the
                rope keys; 0 where keys are no latents.
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
        """Attention's result ``[T, Hq, D]``, unrotated, or values that were read.

        Of latents, of which ``rank`` says how many elements they have, it is made of keys.
        """
        if rank:
            return self._latents(out, rank, is_restored=True)
        return ops.rotate(out, self.value) if self.value else out

    def attended(self, out: Tensor, rank: int = 0) -> Tensor:
        """A result of attention to what is not transformed as if it were; arguments as of ``output``."""
        return self._latents(out, rank, is_restored=False) if rank else self.output(out)

    def _latents(self, out: Tensor, rank: int, *, is_restored: bool) -> Tensor:
        """Sums of latents ``[T, Hq, D]`` as latents are stored, or of stored ones as they were."""
        if self.smoothing is None:
            return ops.rotate(out, self.key) if self.key else out
        rows = out.reshape(-1, 1, rank)
        return self.smoothing.smoothed(rows, None, self.key, is_restored=is_restored).view(out.shape)


def attend(
    query: Tensor,
    view: KVView,
    batch: ops.Batch,
    scores: ops.Scores,
    transform: Transform | None,
    first_position: Tensor | None = None,
    is_latent: bool = False,
) -> Tensor:
    """``ops.attend`` to what was transformed before it was stored.

    Args:
        query: As of ``ops.attend``.
        view: The same.
        batch: The same.
        scores: The same, without a positional bias.
        transform: What was done; ``None`` for nothing.
        first_position: As of ``Transform.query``.
        is_latent: As of ``ops.attend``.
    """
    if transform is None:
        return ops.attend(query, view, batch, scores, is_latent=is_latent)
    rank = view.key.head_dim if is_latent else 0
    query, scores = transform.query(query, scores, first_position, rank)
    return transform.output(ops.attend(query, view, batch, scores, is_latent=is_latent), rank)


def _rotated(x: Tensor, block: int) -> Tensor:
    """What is rotated before it is stored; what cannot be stored is left to be refused."""
    if not isinstance(x, Tensor) or x.dim() not in (3, 4) or x.dtype not in FLOAT_DTYPES:
        return x
    return x if x.shape[-1] % block else ops.rotate(x, block)
