"""Key smoothing: keys of one layer are stored without what they have in common, and divided by gains.

A group of codes has one scale, so that a channel which is many times larger than the others takes their
bits. What attention computes stays the same: queries are multiplied by the gains, and what was subtracted is
a bias of the products.

Shapes: B sequences, N tokens of each, H key/value heads, Hq query heads, D head dim; T tokens of all.
"""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvloom.core.checks import FLOAT_DTYPES, can_read, expect
from kvloom.core.views import detached
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops import schemas
from kvloom.ops.offsets import KeyOffset
from kvloom.ops.scores import PositionalBias


@dataclass(frozen=True, slots=True, eq=False)
class KeySmoothing:
    """How the keys of a layer are smoothed: ``(key - offset at its position) / gain``.

    Scores and keys that are read come back, up to the rounding of codes, whatever these numbers are; good
    ones make all channels of a head alike in what they contribute to scores.

    Attributes:
        gain: ``[H, D]`` float32, positive and finite.
        offset: What is subtracted; ``None`` for nothing.

    Raises:
        ShapeError: ``gain`` is no such tensor, or ``offset`` is of other heads.
        ArgumentError: a gain is not positive, or a number is not finite.
    """

    gain: Tensor
    offset: KeyOffset | None = None
    _inverse: Tensor = field(init=False, repr=False)
    _arrays: tuple[Tensor | None, Tensor | None, Tensor | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = expect("gain", self.gain, "H D", dtype=torch.float32)
        arrays: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if (offset := self.offset) is not None:
            found = offset.mean.shape[0], offset.head_dim
            if found != (sizes["H"], sizes["D"]):
                raise ShapeError(
                    f"offset must have {sizes['H']} heads of {sizes['D']} as gain, "
                    f"got {found[0]} of {found[1]}"
                )
            if offset.mean.device != self.gain.device:
                raise ShapeError(f"offset must be on {self.gain.device} as gain, got {offset.mean.device}")
            arrays = offset.mean.contiguous(), offset.channels.contiguous(), offset.frequencies
        if can_read(self.gain):
            is_good = (self.gain > 0) & self.gain.isfinite()
            if not bool(is_good.all()):
                got = float(self.gain[~is_good][0])
                raise ArgumentError(f"gain must be positive and finite, got {got}")
            for name in ("mean", "frequencies"):
                x = None if offset is None else getattr(offset, name)
                if x is not None and not bool(x.isfinite().all()):
                    raise ArgumentError(f"offset must have finite {name}, got {float(x[~x.isfinite()][0])}")
        object.__setattr__(self, "gain", self.gain.contiguous())
        object.__setattr__(self, "_inverse", 1 / self.gain)
        object.__setattr__(self, "_arrays", arrays)

    def smoothed(
        self, key: Tensor, positions: Tensor | None, block: int = 0, *, is_restored: bool = False
    ) -> Tensor:
        """Keys as they are stored, in their dtype; a finite key gives a finite one.

        Args:
            key: ``[T, H, D]`` or ``[B, H, N, D]`` float32, float16 or bfloat16; its gradient is lost.
            positions: ``[T]`` or ``[B, N]`` int64 or int32; not read without an offset.
            block: Elements that are then rotated together, as of ``ops.rotate``; 0 for none.
            is_restored: As ``restored``.

        Raises:
            ShapeError: these do not fit.
        """
        sizes, gain = key.shape, self.gain
        tokens = sizes[:1] if len(sizes) == 3 else (sizes[0], sizes[-2])
        is_placed = self.offset is None or (positions is not None and positions.shape == tokens)
        if len(sizes) not in (3, 4) or (sizes[1], sizes[-1]) != gain.shape or not is_placed:
            heads, head_dim = gain.shape
            raise ShapeError(
                f"key must be [T, {heads}, {head_dim}] or [B, {heads}, N, {head_dim}] with a position for "
                f"each token, got {list(sizes)} with {None if positions is None else list(positions.shape)}"
            )
        if key.device != gain.device or key.dtype not in FLOAT_DTYPES:
            raise ShapeError(
                f"key must be one of {FLOAT_DTYPES} on {gain.device}, got {key.dtype} on {key.device}"
            )
        key = detached(key) if key.requires_grad else key
        key = key if key.stride(-1) == 1 else key.contiguous()
        positions = None if self.offset is None else positions
        factor = gain if is_restored else self._inverse
        result: Tensor = schemas.smooth(key, positions, factor, *self._arrays, block, is_restored)
        return result

    def restored(self, key: Tensor, positions: Tensor | None, block: int = 0) -> Tensor:
        """Keys as they were; arguments as of ``smoothed``."""
        return self.smoothed(key, positions, block, is_restored=True)

    def query(
        self, query: Tensor, first_position: Tensor | None = None, block: int = 0
    ) -> tuple[Tensor, PositionalBias | None]:
        """Queries for keys as they are stored, and what their products lack, if there is an offset.

        Args:
            query: ``[T, Hq, D]`` float32, float16 or bfloat16; Hq is a multiple of H.
            first_position: ``[B]``, position of token 0 of each sequence in the index; ``None`` for 0.
            block: As of ``smoothed``.

        Raises:
            ShapeError: ``query`` does not fit.
        """
        heads, head_dim = self.gain.shape
        if query.dim() != 3 or query.shape[2] != head_dim or query.shape[1] % heads:
            raise ShapeError(
                f"query must be [T, Hq, {head_dim}] with a multiple of {heads} heads, got {list(query.shape)}"
            )
        mean, channels, frequencies = self._arrays
        query = detached(query) if query.requires_grad else query
        query = query if query.stride(-1) == 1 else query.contiguous()
        query, coefficients = schemas.smooth_query(query, self.gain, mean, channels, block)
        if frequencies is None:
            return query, None
        return query, PositionalBias(coefficients, frequencies, first_position)

    def to(self, device: torch.device) -> "KeySmoothing":
        """The same on a device."""
        if self.gain.device == device:
            return self
        offset = self.offset
        if offset is not None:
            mean, channels, frequencies = (
                x.to(device) for x in (offset.mean, offset.channels, offset.frequencies)
            )
            offset = KeyOffset(mean, channels, frequencies, offset.head_dim)
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

    def __reduce__(self) -> tuple[object, ...]:
        return KeySmoothing, (self.gain, self.offset)

    def __deepcopy__(self, memo: dict[int, object]) -> "KeySmoothing":
        return self
