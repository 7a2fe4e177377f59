"""Smoothing of keys before quantization: an offset is subtracted, and channels are divided by gains.

The offset is a vector of each head that rotates with the position in K pairs of channels, as RoPE does.
Everything is float32 and rounded once, even if a rotation follows; angles are float64.

Shapes: H key/value heads, Hq query heads, D head dim, K pairs of channels; keys are ``[T, H, D]`` with
positions ``[T]``, or ``[B, H, N, D]`` with positions ``[B, N]``.
"""

import torch
from torch import Tensor

from kvloom.quant.affine import saturate
from kvloom.quant.rotation import rotate


def offset_at(
    positions: Tensor, mean: Tensor, channels: Tensor, frequencies: Tensor, head_dim: int
) -> Tensor:
    """Offset at positions ``[...]``, ``[..., H, D]`` float32; its bits depend on the position alone.

    Args:
        positions: As above, int64 or int32.
        mean: ``[H, K, 2]`` float32, the offset at position 0 in each pair.
        channels: ``[H, K, 2]`` int64, the channels of each pair.
        frequencies: ``[H, K]``, radians from one position to the next.
        head_dim: D.
    """
    angle = positions.double()[..., None, None] * frequencies.double()
    cos, sin = angle.cos().float(), angle.sin().float()
    x, y = mean.unbind(-1)
    pairs = torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1).flatten(-2)
    vectors = pairs.new_zeros((*pairs.shape[:-1], head_dim))
    return vectors.scatter(-1, channels.flatten(1).expand_as(pairs), pairs)


def smooth(
    key: Tensor,
    positions: Tensor | None,
    factor: Tensor,
    mean: Tensor | None,
    channels: Tensor | None,
    frequencies: Tensor | None,
    block: int,
    is_restored: bool,
) -> Tensor:
    """Smooth keys, or invert the smoothing.

    Args:
        key: As above, float32, float16 or bfloat16.
        positions: As above; ``None`` without an offset.
        factor: ``[H, D]`` float32, what keys are multiplied by: one over the gains, or the gains.
        mean: As of ``offset_at``; ``None`` without an offset.
        channels: The same.
        frequencies: The same.
        block: Elements that are rotated together, 0 for no rotation.
        is_restored: Whether to invert the smoothing of stored keys.
    """
    x, offset = key.float(), None
    factor = factor if key.dim() == 3 else factor.unsqueeze(1)
    if positions is not None and mean is not None and channels is not None and frequencies is not None:
        offset = offset_at(positions, mean, channels, frequencies, key.shape[-1])
        offset = offset if key.dim() == 3 else offset.transpose(1, 2)
    if is_restored:
        x = (rotate(x, block) if block else x) * factor
        return _rounded(x if offset is None else x + offset, key.dtype)
    x = (x if offset is None else x - offset) * factor
    return _rounded(rotate(x, block) if block else x, key.dtype)


def smooth_query(
    query: Tensor, gain: Tensor, mean: Tensor | None, channels: Tensor | None, block: int
) -> tuple[Tensor, Tensor]:
    """Queries ``[T, Hq, D]`` for smoothed keys, and coefficients of the bias that restores their scores.

    Args:
        query: As above, float32, float16 or bfloat16.
        gain: ``[H, D]`` float32.
        mean: As of ``offset_at``; ``None`` without an offset.
        channels: The same.
        block: As of ``smooth``.

    Returns:
        Queries in their dtype, and ``[T, Hq, 2K]`` float32, as those of a ``PositionalBias``.
    """
    heads = gain.shape[0]
    by_head = query.float().unflatten(1, (heads, -1))
    scaled = (by_head * gain.unsqueeze(1)).flatten(1, 2)
    result = _rounded(rotate(scaled, block) if block else scaled, query.dtype)
    if mean is None or channels is None:
        return result, query.new_empty((*query.shape[:2], 0), dtype=torch.float32)
    return result, coefficients_of(by_head, mean, channels)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast with saturation: finite numbers stay finite."""
    return torch.where(x.isfinite(), saturate(x, dtype), x.to(dtype))


def coefficients_of(by_head: Tensor, mean: Tensor, channels: Tensor) -> Tensor:
    """Coefficients ``[T, Hq, 2K]`` of queries ``[T, H, Hq / H, D]``: of K cosines, then of K sines."""
    where = channels.flatten(1).unsqueeze(1).expand(*by_head.shape[:3], -1)
    x, y = by_head.gather(-1, where).float().unflatten(-1, (-1, 2)).unbind(-1)
    of_x, of_y = mean.unsqueeze(1).unbind(-1)
    return torch.cat((x * of_x + y * of_y, y * of_x - x * of_y), dim=-1).flatten(1, 2)
