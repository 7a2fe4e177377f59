"""Key smoothing: keys of one layer are stored without what they have in common and divided by gains.

A group of codes has one scale, so that a channel which is many times larger than the others takes their bits.
What a model does is not changed: queries are multiplied by the gains, and what was subtracted is a bias of the
products.

Shapes: B sequences, N tokens of each, H key/value heads, Hq query heads, D head dim; T tokens of all.
"""

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvloom.core.checks import can_read, expect
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops.offsets import KeyOffset
from kvloom.ops.scores import Scores


@dataclass(frozen=True, slots=True, eq=False)
class KeySmoothing:
    """How the keys of a layer are smoothed: ``(key - offset at its position) / gain``.

    Scores and keys that are read come back, up to the rounding of codes, whatever these numbers are; good ones
    make all channels of a head alike in what they contribute to scores.

    Attributes:
        gain: ``[H, D]`` float32, positive and finite.
        offset: What is subtracted; ``None`` for nothing.

    Raises:
        ShapeError: ``gain`` is no such tensor, or ``offset`` is of other heads.
        ArgumentError: a gain is not positive and finite.
    """

    gain: Tensor
    offset: KeyOffset | None = None

    def __post_init__(self) -> None:
        sizes = expect("gain", self.gain, "H D", dtype=torch.float32)
        if self.offset is not None:
            found = self.offset.mean.shape[0], self.offset.head_dim
            if found != (sizes["H"], sizes["D"]):
                raise ShapeError(
                    f"offset must have {sizes['H']} heads of {sizes['D']} as gain, got {found[0]} of {found[1]}"
                )
            if self.offset.mean.device != self.gain.device:
                raise ShapeError(
                    f"offset must be on {self.gain.device} as gain, got {self.offset.mean.device}"
                )
        if can_read(self.gain) and not bool(((self.gain > 0) & self.gain.isfinite()).all()):
            got = float(self.gain[~((self.gain > 0) & self.gain.isfinite())][0])
            raise ArgumentError(f"gain must be positive and finite, got {got}")

    def smoothed(self, key: Tensor, positions: Tensor | None) -> Tensor:
        """Keys as they are stored, in their dtype; computed in float32.

        Args:
            key: ``[T, H, D]`` or ``[B, H, N, D]``.
            positions: ``[T]`` or ``[B, N]`` int64; not read without an offset.
        """
        gain = self._like(key)
        if self.offset is None:
            return (key.float() / gain).to(key.dtype)
        return ((key.float() - self._offset(key, positions)) / gain).to(key.dtype)

    def restored(self, key: Tensor, positions: Tensor | None) -> Tensor:
        """Keys as they were; arguments as of ``smoothed``."""
        whole = key.float() * self._like(key)
        return (whole if self.offset is None else whole + self._offset(key, positions)).to(key.dtype)

    def query(self, query: Tensor) -> Tensor:
        """Queries ``[T, Hq, D]`` for keys as they are stored, in their dtype."""
        gain = self.gain.repeat_interleave(query.shape[-2] // self.gain.shape[0], 0)
        return (query.float() * gain).to(query.dtype)

    def scores(self, query: Tensor, scores: Scores, first_position: Tensor | None) -> Scores:
        """``scores`` of queries with stored keys, with what their products lack.

        Args:
            query: ``[T, Hq, D]``, those of the model.
            scores: Without a positional bias.
            first_position: ``[B]``, position of token 0 of each sequence in the index; ``None`` for 0.
        """
        if self.offset is None:
            return scores
        return replace(scores, positional_bias=self.offset.bias(query, first_position))

    def to(self, device: torch.device) -> "KeySmoothing":
        """The same on a device."""
        offset = self.offset
        if offset is not None:
            moved = (x.to(device) for x in (offset.mean, offset.channels, offset.frequencies))
            offset = KeyOffset(*moved, offset.head_dim)
        return KeySmoothing(self.gain.to(device), offset)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, of every number; reads them from their device."""
        found = hashlib.sha256()
        offset = self.offset
        parts = () if offset is None else (offset.mean, offset.channels, offset.frequencies.double())
        for x in (self.gain, *parts):
            found.update(repr(tuple(x.shape)).encode())
            found.update(x.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()[:32]

    def _like(self, key: Tensor) -> Tensor:
        return self.gain if key.dim() == 3 else self.gain.unsqueeze(1)

    def _offset(self, key: Tensor, positions: Tensor | None) -> Tensor:
        if self.offset is None or positions is None:
            raise ArgumentError("positions must be given of keys with an offset, got None")
        vectors = self.offset.at(positions)
        return vectors if key.dim() == 3 else vectors.transpose(1, 2)
