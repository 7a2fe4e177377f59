"""Key smoothing: keys of one layer are stored minus an offset, and divided by gains.

A group of codes has one scale, so an outlier channel costs the precision of the others. The result of
attention does not change: queries are multiplied by the gains, and the offset becomes a bias of the products.

Shapes: B sequences, N tokens of each, H key/value heads, Hq query heads, D head dim; T tokens of all.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kvloom.core.checks import FLOAT_DTYPES, INDEX_DTYPES, can_read, expect, expect_range, expect_tensor
from kvloom.core.memory import refused_memory
from kvloom.core.views import KVView, detached
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops import schemas
from kvloom.ops.choice import run
from kvloom.ops.fast import steps
from kvloom.ops.fast.plain import COMPILED
from kvloom.ops.offsets import KeyOffset
from kvloom.ops.scores import PositionalBias
from kvloom.quant.rotation import LARGEST

_REFUSED = (ValueError, IndexError, RuntimeError, ArithmeticError, TypeError)


@dataclass(frozen=True, slots=True, eq=False)
class KeySmoothing:
    """Smoothing of the keys of a layer: ``(key - offset at its position) / gain``.

    With any numbers, scores and loaded keys are the unsmoothed ones, up to the rounding of codes. With good
    numbers all channels of a head contribute alike to scores.

    Attributes:
        gain: ``[H, D]`` float32; it and its inverse are positive and finite.
        offset: Offset to subtract; ``None`` for none.
        numbers: Factor, mean, channels and frequencies, the operators' arguments to smooth keys.

    Raises:
        ShapeError: ``gain`` is no such tensor, or ``offset`` has other heads.
        ArgumentError: a gain is no such number, or another number is not finite.
        OutOfMemory: there is no memory for contiguous copies.
    """

    gain: Tensor
    offset: KeyOffset | None = None
    numbers: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = expect("gain", self.gain, "H D", dtype=torch.float32)
        if (offset := self.offset) is not None:
            found = offset.mean.shape[0], offset.head_dim
            if found != (sizes["H"], sizes["D"]):
                raise ShapeError(
                    f"offset must have {sizes['H']} heads of {sizes['D']} as gain, "
                    f"got {found[0]} of {found[1]}"
                )
            if offset.mean.device != self.gain.device:
                raise ShapeError(f"offset must be on {self.gain.device} as gain, got {offset.mean.device}")
        try:
            self._prepare()
        except RuntimeError as error:
            raise refused_memory("copies of gain and offset", error) or error from None

    def _prepare(self) -> None:
        """Check numbers, and set the operators' arguments."""
        offset = self.offset
        arrays: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if can_read(self.gain):
            is_good = (self.gain > 0) & self.gain.isfinite() & (1 / self.gain).isfinite()
            if not bool(is_good.all()):
                got = float(self.gain[~is_good][0])
                raise ArgumentError(f"gain must be positive and finite, as its inverse, got {got}")
            for name in ("mean", "frequencies"):
                x = None if offset is None else getattr(offset, name)
                if x is not None and not bool(x.isfinite().all()):
                    raise ArgumentError(f"offset must have finite {name}, got {float(x[~x.isfinite()][0])}")
        if offset is not None:
            arrays = (
                detached(offset.mean).contiguous(),
                offset.channels.contiguous(),
                detached(offset.frequencies),
            )
        object.__setattr__(self, "gain", detached(self.gain).contiguous())
        object.__setattr__(self, "numbers", (1 / self.gain, *arrays))

    def smoothed(
        self, key: Tensor, positions: Tensor | None, block: int = 0, *, is_restored: bool = False
    ) -> Tensor:
        """Smoothed keys in their dtype, saturated.

        The bits of a vector depend only on the vector, its head and its position. Numbers that are not finite
        stay so; a product with a gain beyond float32 becomes infinite.

        Args:
            key: ``[T, H, D]`` or ``[B, H, N, D]`` float32, float16 or bfloat16; its gradient is lost.
            positions: ``[T]`` or ``[B, N]`` int64 or int32; not read without an offset.
            block: Elements that are rotated together afterwards, as of ``ops.rotate``; 0 for none.
            is_restored: Whether to invert the smoothing, as ``restored``.

        Raises:
            ShapeError: these do not fit.
            ArgumentError: ``block`` is no such number.
            OutOfMemory: there is no memory for the result.
        """
        at = None if self.offset is None else positions
        inverse, *arrays = self.numbers
        factor = self.gain if is_restored else inverse
        is_plain = isinstance(key, Tensor) and key.is_cpu and not key.requires_grad
        is_placed = self.offset is None or (isinstance(at, Tensor) and at.is_cpu)
        if COMPILED and is_plain and is_placed and not is_compiling():
            try:
                found: Tensor = schemas.smooth(key, at, factor, *arrays, block, is_restored)
                return found
            except _REFUSED:
                pass  # done, or refused with our message, below
        self.expect_keys(key, positions)
        key = in_rows("key", key, block)
        result: Tensor = _run("smooth", key, at, factor, *arrays, block, is_restored)
        return result

    def expect_keys(self, key: Tensor, positions: Tensor | None) -> None:
        """Check keys and positions; arguments and errors of ``smoothed``."""
        gain = self.gain
        expect_tensor("key", key)
        sizes = key.shape
        if len(sizes) not in (3, 4) or (sizes[1], sizes[-1]) != gain.shape:
            heads, head_dim = gain.shape
            raise ShapeError(
                f"key must be [T, {heads}, {head_dim}] or [B, {heads}, N, {head_dim}], got {list(sizes)}"
            )
        if key.device != gain.device or key.dtype not in FLOAT_DTYPES:
            raise ShapeError(
                f"key must be one of {FLOAT_DTYPES} on {gain.device}, got {key.dtype} on {key.device}"
            )
        if self.offset is not None:
            _expect_positions(positions, sizes[:1] if len(sizes) == 3 else (sizes[0], sizes[2]), key.device)

    def restored(self, key: Tensor, positions: Tensor | None, block: int = 0) -> Tensor:
        """Invert the smoothing of stored keys; arguments as of ``smoothed``."""
        return self.smoothed(key, positions, block, is_restored=True)

    def query(
        self, query: Tensor, first_position: Tensor | None = None, block: int = 0
    ) -> tuple[Tensor, PositionalBias | None]:
        """Queries for smoothed keys, and the bias that restores their products, if there is an offset.

        Args:
            query: ``[T, Hq, D]`` float32, float16 or bfloat16; Hq is a multiple of H.
            first_position: ``[B]``, position of token 0 of each sequence in the index; ``None`` for 0.
            block: As of ``smoothed``.

        Raises:
            ShapeError: ``query`` does not fit.
            ArgumentError: ``block`` is no such number.
            OutOfMemory: there is no memory for the result.
        """
        _, mean, channels, frequencies = self.numbers
        is_plain = isinstance(query, Tensor) and query.is_cpu and not query.requires_grad
        if COMPILED and is_plain and not is_compiling():
            try:
                query, coefficients = schemas.smooth_query(query, self.gain, mean, channels, block)
            except _REFUSED:
                pass  # as above
            else:
                if frequencies is None:
                    return query, None
                return query, PositionalBias(coefficients, frequencies, first_position)
        expect_tensor("query", query)
        heads, head_dim = self.gain.shape
        if query.dim() != 3 or query.shape[2] != head_dim or query.shape[1] % heads:
            raise ShapeError(
                f"query must be [T, Hq, {head_dim}] with a multiple of {heads} heads, got {list(query.shape)}"
            )
        if query.device != self.gain.device or query.dtype not in FLOAT_DTYPES:
            raise ShapeError(
                f"query must be one of {FLOAT_DTYPES} on {self.gain.device}, "
                f"got {query.dtype} on {query.device}"
            )
        query = in_rows("query", query, block)
        query, coefficients = _run("smooth_query", query, self.gain, mean, channels, block)
        return query, _bias(coefficients, frequencies, first_position)

    def to(self, device: torch.device) -> "KeySmoothing":
        """Copy on a device."""
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
        """Digest of every number, 32 hexadecimal digits; reads them from their device."""
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


def transform_arguments(
    blocks: tuple[int, int],
    smoothing: KeySmoothing | None,
    positions: Tensor | None,
    *,
    is_restored: bool = False,
) -> tuple[Any, ...]:
    """Arguments of ``kvloom::store.transformed`` after those of ``store``, or of ``load`` after those there.

    Args:
        blocks: Elements of keys and of values that are rotated together; 0 for none.
        smoothing: Smoothing of keys; ``None`` if they are not smoothed.
        positions: Positions of the tokens; read if ``smoothing`` has an offset.
        is_restored: Whether the transform is inverted.
    """
    if smoothing is None:
        return *blocks, *(None,) * 5
    factor, *arrays = smoothing.numbers
    at = None if smoothing.offset is None else positions
    return *blocks, at, smoothing.gain if is_restored else factor, *arrays


def expect_restored(
    slots: Tensor,
    kv: KVView,
    dtype: torch.dtype,
    smoothing: KeySmoothing | None,
    positions: Tensor | None,
    blocks: tuple[int, int],
) -> None:
    """Check the transform of loaded keys and values; arguments and errors of ``ops.load``."""
    if dtype not in FLOAT_DTYPES:
        raise ShapeError(f"dtype must be one of {FLOAT_DTYPES} with smoothing or blocks, got {dtype}")
    for block, side in zip(blocks, (kv.key, kv.value), strict=True):
        if side is not None:
            expect_block(block, side.head_dim)
    if smoothing is None:
        return
    heads, head_dim = smoothing.gain.shape
    if (heads, head_dim) != (kv.num_heads, kv.key.head_dim):
        raise ShapeError(
            f"smoothing must have {kv.num_heads} heads of {kv.key.head_dim} as kv, got {heads} of {head_dim}"
        )
    if smoothing.gain.device != kv.device:
        raise ShapeError(f"smoothing must be on {kv.device} as kv, got {smoothing.gain.device}")
    if smoothing.offset is not None:
        _expect_positions(positions, tuple(slots.shape), kv.device)


def _expect_positions(positions: Tensor | None, tokens: tuple[int, ...], device: torch.device) -> None:
    """Check that there is one position for each token."""
    if not isinstance(positions, Tensor):
        raise ShapeError(f"positions must be a tensor, got {type(positions).__name__}")
    if positions.shape != tokens:
        raise ShapeError(f"positions must be {list(tokens)}, as tokens of key, got {list(positions.shape)}")
    if positions.dtype not in INDEX_DTYPES or positions.device != device:
        raise ShapeError(
            f"positions must be one of {INDEX_DTYPES} on {device}, "
            f"got {positions.dtype} on {positions.device}"
        )


def expect_block(block: int, head_dim: int) -> None:
    """Raise ArgumentError unless ``block`` is 0, or a power of two of up to 1,024 that divides the dim."""
    if type(block) is not int or not 0 <= block <= LARGEST:
        block = expect_range("block", block, 0, LARGEST + 1)
    if block and (block & (block - 1) or head_dim % block):
        raise ArgumentError(
            f"block must be 0, or a power of two that divides the head dim {head_dim}, got {block}"
        )


def in_rows(name: str, x: Tensor, block: int) -> Tensor:
    """``x`` without its gradient and with contiguous head vectors, which ``block`` must divide.

    Raises:
        ArgumentError: ``block`` is neither 0 nor a power of two of up to 1,024 that divides them.
        OutOfMemory: there is no memory for a copy.
    """
    expect_block(block, x.shape[-1])
    x = detached(x)
    if x.stride(-1) == 1:
        return x
    try:
        return x.clone(memory_format=torch.contiguous_format)
    except RuntimeError as error:
        raise refused_memory(f"a copy of {name}", error) or error from None


def _run(name: str, x: Tensor, *arguments: Any) -> Any:
    """Call an operator; its errors are raised with our messages."""
    if (kernel := steps.vectors_kernel(name, x)) is not None:
        return kernel(x, *arguments)
    with torch.no_grad():
        return run("auto", name, x.device, x, *arguments)


def _bias(
    coefficients: Tensor, frequencies: Tensor | None, first_position: Tensor | None
) -> PositionalBias | None:
    """Positional bias of queries; ``None`` without an offset."""
    return None if frequencies is None else PositionalBias(coefficients, frequencies, first_position)
