"""Offsets of keys: subtracted before keys are stored, added when they are loaded, a bias in attention.

Shapes: H key/value heads, K pairs of channels, D head dim; Tq new tokens, Hq query heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvloom.core.checks import FLOAT_DTYPES, INDEX_DTYPES, INT64_END, can_read, expect, expect_range
from kvloom.core.memory import refused_memory
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops.choice import run
from kvloom.ops.scores import MAX_PAIRS, PositionalBias
from kvloom.quant.smoothing import coefficients_of, offset_at


@dataclass(frozen=True, slots=True, eq=False)
class KeyOffset:
    """Vector of each head that rotates with the position as RoPE rotates keys; nonzero in K pairs only.

    With the mean of the keys before RoPE, and RoPE's frequencies, it is the common part of the keys after
    RoPE. The rest is small, which is good for codes::

        ops.store(key - offset.at(positions), value, slots, kv)
        ops.load(slots, kv, offset=offset, positions=positions)  # the keys
        ops.attend(query, kv, batch, Scores(positional_bias=offset.bias(query)))  # the scores of the keys

    Any numbers are correct: scores and keys are those without it, up to the rounding of codes.

    Attributes:
        mean: ``[H, K, 2]`` float32, the vector at position 0 in each pair.
        channels: ``[H, K, 2]`` int64, the two channels of each pair in the head dim; no channel of a head is
            in two pairs.
        frequencies: ``[H, K]`` float64 or float32, radians by which each pair rotates from one position to
            the next; K is at most 64.
        head_dim: D.
    """

    mean: Tensor
    channels: Tensor
    frequencies: Tensor
    head_dim: int

    def __post_init__(self) -> None:
        """Raise ShapeError or ArgumentError if an attribute does not fit the others, or OutOfMemory."""
        sizes = expect("mean", self.mean, "H K 2", dtype=torch.float32)
        pairs, device = sizes["K"], self.mean.device
        if not 1 <= pairs <= MAX_PAIRS:
            raise ShapeError(f"mean must be [H, K, 2] with K from 1 to {MAX_PAIRS}, got K={pairs}")
        expect_range("head_dim", self.head_dim, 2 * pairs, INT64_END)
        known = {name: sizes[name] for name in ("H", "K")}
        expect("channels", self.channels, "H K 2", dtype=torch.int64, device=device, **known)
        dtypes = (torch.float64, torch.float32)
        expect("frequencies", self.frequencies, "H K", dtype=dtypes, device=device, **known)
        if not can_read(self.channels):
            return
        try:
            self._check_channels()
        except RuntimeError as error:
            raise refused_memory("the order of channels", error) or error from None

    def _check_channels(self) -> None:
        """Check that channels are within the head dim and distinct."""
        found = self.channels.flatten(1)
        outside = (found < 0) | (found >= self.head_dim)
        if bool(outside.any()):
            got = int(found[outside][0])
            raise ArgumentError(f"channels must be in [0, {self.head_dim}), got {got}")
        in_order = found.sort(dim=1).values
        twice = in_order[:, 1:] == in_order[:, :-1]
        if bool(twice.any()):
            got = int(in_order[:, 1:][twice][0])
            raise ArgumentError(f"channels of a head must be distinct, got {got} twice")

    def at(self, positions: Tensor) -> Tensor:
        """Vectors at positions ``[...]`` int64 or int32, ``[..., H, D]`` float32.

        A vector's bits depend on its position alone.
        """
        return offset_at(positions, self.mean, self.channels, self.frequencies, self.head_dim)

    def bias(self, query: Tensor, first_position: Tensor | None = None) -> PositionalBias:
        """Bias that restores the products of queries with the keys before subtraction.

        Args:
            query: ``[Tq, Hq, D]`` float32, float16 or bfloat16; Hq is a multiple of H.
            first_position: ``[B]``, position of token 0 of each sequence; ``None`` for 0.

        Raises:
            ShapeError: ``query`` does not fit.
        """
        heads = self.mean.shape[0]
        sizes = expect(
            "query", query, "Tq Hq D", dtype=FLOAT_DTYPES, device=self.mean.device, D=self.head_dim
        )
        if sizes["Hq"] % heads:
            raise ShapeError(f"query must have a multiple of {heads} heads, got {sizes['Hq']}")
        coefficients = coefficients_of(query.unflatten(1, (heads, -1)), self.mean, self.channels)
        return PositionalBias(coefficients, self.frequencies, first_position)


def expect_offset(
    offset: KeyOffset | None, positions: Tensor | None, slots: Tensor, kv: KVView
) -> tuple[KeyOffset, Tensor] | None:
    """Check the offset of loaded keys and its positions; returns both, or ``None`` without an offset."""
    if offset is None:
        if positions is not None:
            raise ArgumentError("positions must be None without an offset, got some")
        return None
    if not isinstance(offset, KeyOffset):
        raise ArgumentError(f"offset must be a KeyOffset, got {type(offset).__name__}")
    if positions is None:
        raise ArgumentError("positions must be given with an offset, got None")
    if (offset.mean.shape[0], offset.head_dim) != (kv.num_heads, kv.key.head_dim):
        raise ShapeError(
            f"offset must have {kv.num_heads} heads of {kv.key.head_dim} as kv, "
            f"got {offset.mean.shape[0]} of {offset.head_dim}"
        )
    if offset.mean.device != kv.device:
        raise ShapeError(f"offset must be on {kv.device} as kv, got {offset.mean.device}")
    expect("positions", positions, "B N" if slots.ndim == 2 else "T", dtype=INDEX_DTYPES, device=kv.device,
           **dict(zip("BN" if slots.ndim == 2 else "T", slots.shape, strict=True)))  # fmt: skip
    if torch.float32 not in kv.key.dtypes:
        raise ShapeError(
            f"kv must have keys of floats or codes to add an offset to, got {kv.key.cache.dtype}"
        )
    return offset, positions


def load_with_offset(
    slots: Tensor,
    kv: KVView,
    dtype: torch.dtype,
    num_repeat: int,
    offset: KeyOffset,
    positions: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """``ops.load`` with an offset; keys are loaded in float32, so that only the sum is rounded."""
    key_cache, value_cache, key_scale, value_scale = kv.tensors
    of_keys = (slots, key_cache, None, key_scale, None, torch.float32, 1)
    key, _ = run(backend, "load", kv.device, *of_keys)
    added = offset.at(positions)
    key = (key + (added if slots.ndim == 1 else added.transpose(1, 2))).to(dtype)
    if num_repeat > 1:
        key = key.repeat_interleave(num_repeat, dim=1)
    if value_cache is None:
        return key, key.new_empty((*key.shape[:-1], 0))
    of_values = (slots, value_cache, None, value_scale, None, dtype, num_repeat)
    value: Tensor = run(backend, "load", kv.device, *of_values)[0]
    return key, value
