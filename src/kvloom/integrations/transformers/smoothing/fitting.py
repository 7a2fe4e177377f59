"""Offsets and gains of one layer, fitted to some of its keys and the size of its queries.

Shapes: H key/value heads, Hq query heads, T tokens, D head dim, P pairs of channels.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvloom.integrations.transformers.smoothing.rotations import Rotation, constant, rotation_of
from kvloom.ops.offsets import KeyOffset
from kvloom.ops.smoothing import KeySmoothing

_SKIPPED: Final = 4
"""Number of first tokens that are skipped, since their keys are unlike all others."""
_MOST_PAIRS: Final = 8
_WORTH: Final = 0.05
"""Least part of a head's error that the offset of a pair must remove."""
_SMALLEST: Final = 1 / 64
"""Least size of keys and queries of a channel, relative to the median of a head; least gain."""


class LayerSmoothing(NamedTuple):
    """Key smoothing of a layer.

    Attributes:
        smoothing: Smoothing of the keys; ``None`` if keys are stored unchanged.
        reason: Sentence that says how keys are smoothed, or why they are not.
    """

    smoothing: KeySmoothing | None
    reason: str


def fit(key: Tensor, power: Tensor, turns: Sequence[Tensor], shift: int, still: bool) -> LayerSmoothing:
    """The smoothing of a layer; tensors are on the CPU.

    Args:
        key: ``[B, H, T, D]``. With ``shift`` B is 2, and the second row has the same tokens ``shift``
            positions later.
        power: ``[Hq, D]``, mean squares of queries.
        turns: Frequencies that RoPE may have.
        shift: Shift of positions; 0 without a second row.
        still: Whether keys are known not to be rotated.
    """
    key = key.float()
    if not bool(key.isfinite().all()) or not bool(power.isfinite().all()):
        return LayerSmoothing(None, "its keys or queries are not finite")
    query = power.unflatten(0, (key.shape[1], -1)).mean(1)
    rotation = turning = None
    if shift:
        found = rotation_of(key, turns, shift)
        rotation, turning = (None, None) if found is None else found
    elif still:
        rotation = constant(key.shape[-1], key.device)
    first = key[0]
    if rotation is None:
        gain = _gains(first[:, _SKIPPED:].square().mean(1), query)
        return LayerSmoothing(KeySmoothing(gain.cpu()), "gains only: the rotation of its keys is not known")
    mean, sizes = _means(first, rotation, query, turning)
    gain = _gains(_evened(sizes, rotation), _evened(query, rotation)).cpu()
    if not bool(mean.any()):
        return LayerSmoothing(
            KeySmoothing(gain), "gains only: no pair of channels has a mean worth an offset"
        )
    offset = _offset(mean, rotation, key.shape[-1])
    count = offset.mean.shape[1]
    return LayerSmoothing(
        KeySmoothing(gain, offset), f"offsets of {count} pair{'s' if count > 1 else ''}, gains"
    )


def _means(first: Tensor, rotation: Rotation, query: Tensor, turning: Tensor | None) -> tuple[Tensor, Tensor]:
    """Means ``[H, P, 2]`` of pairs that get an offset, else zeros; mean squares ``[H, D]`` without them."""
    before = rotation.before(first)[:, _SKIPPED:]
    mean = before.mean(1)
    spread = (before - mean[:, None]).square().mean((1, 3))  # [H, P], of one channel
    whole = before.square().mean((1, 3))
    weight = query[:, rotation.channels].mean(-1).sqrt()
    worth = weight * (whole.sqrt() - spread.sqrt())
    eligible = _explains(before) & (worth > 0)
    if turning is not None:
        eligible &= turning
    worth = worth.where(eligible, torch.zeros_like(worth))
    error = (weight * whole.sqrt()).sum(1)
    kept = torch.zeros_like(eligible)
    for _ in range(min(_MOST_PAIRS, worth.shape[1])):
        best = worth.max(1)
        takes = best.values > _WORTH * error
        kept[takes, best.indices[takes]] = True
        error = error - best.values * takes
        worth = worth.scatter(1, best.indices[:, None], 0.0)
    mean = _rounded(mean, spread) * kept[..., None]
    positions = torch.arange(first.shape[1], device=first.device)
    at_each = mean[:, None].expand(-1, len(positions), -1, -1)
    left = first.clone()
    left[..., rotation.channels] -= rotation.turned(at_each, positions)
    return mean, left[:, _SKIPPED:].square().mean(1)


def _evened(squares: Tensor, rotation: Rotation) -> Tensor:
    """Mean squares ``[H, D]`` as in long texts: both channels of a rotated pair have their average."""
    pairs = squares[:, rotation.channels]
    turns = rotation.frequencies.ne(0).unsqueeze(-1)
    evened = squares.clone()
    evened[:, rotation.channels] = torch.where(turns, pairs.mean(-1, keepdim=True), pairs)
    return evened


def _explains(before: Tensor) -> Tensor:
    """``[H, P]``: whether subtracting the mean of two thirds of ``[H, T, P, 2]`` makes the rest smaller."""
    result = torch.ones(before.shape[0], before.shape[2], dtype=torch.bool, device=before.device)
    thirds = before.tensor_split(3, dim=1)
    for i, third in enumerate(thirds):
        mean = torch.cat([x for j, x in enumerate(thirds) if j != i], 1).mean(1, keepdim=True)
        result &= (third - mean).square().sum((1, 3)) < third.square().sum((1, 3))
    return result


def _rounded(mean: Tensor, spread: Tensor) -> Tensor:
    """Means ``[H, P, 2]`` in steps of about a quarter of the standard deviation."""
    least = torch.maximum(spread.sqrt() / 4, mean.abs().amax(-1) / 4096).clamp(min=1e-30)
    step = torch.exp2(least.log2().floor())[..., None]
    return (mean / step).round() * step


def _gains(sizes: Tensor, query: Tensor) -> Tensor:
    """Gains ``[H, D]`` for mean squares of stored keys and of queries.

    They are powers of two, so that dividing keys and multiplying queries by them does not round.
    """
    key, query = _bounded(sizes.sqrt()), _bounded(query.sqrt())
    gain = (key / query).sqrt()
    gain = gain / gain.mean(-1, keepdim=True)
    return torch.exp2(gain.log2().round()).clamp(_SMALLEST, 1 / _SMALLEST)


def _bounded(x: Tensor) -> Tensor:
    """Sizes of channels, at least ``_SMALLEST`` times the median of their head."""
    return torch.maximum(x, x.median(-1, keepdim=True).values * _SMALLEST).clamp(min=1e-12)


def _offset(mean: Tensor, rotation: Rotation, head_dim: int) -> KeyOffset:
    """Offset of the pairs that have a mean; heads with fewer pairs than others are filled with zeros."""
    mean, channels, frequencies = mean.cpu(), rotation.channels.cpu(), rotation.frequencies.cpu()
    has_mean = mean.ne(0).any(-1)
    count = int(has_mean.sum(1).max())
    chosen = has_mean.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :count]
    return KeyOffset(
        mean.gather(1, chosen[..., None].expand(-1, -1, 2)).contiguous(),
        channels[chosen],
        frequencies[chosen],
        head_dim,
    )
