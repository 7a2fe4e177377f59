"""What attention should give over tokens of which the newest are as they were computed, and others codes."""

from __future__ import annotations

import torch
from oracles.bits import generator
from torch import Tensor

from kvloom.caches import CacheFormat, PagedLayer
from kvloom.core.specs import QuantSpec
from kvloom.ops import KeyOffset, KeySmoothing

HEADS, DIM, RECENT = 2, 32, 20
INT4 = QuantSpec(4, 16)


def smoothing(seed: int = 7, heads: int = HEADS, pairs: int = 3) -> KeySmoothing:
    """An offset as large as the keys that ``tokens`` makes, in some pairs of channels, and gains."""
    draw = generator(seed)
    channels = torch.stack([torch.randperm(DIM, generator=draw)[: 2 * pairs] for _ in range(heads)])
    mean = 2 * torch.randn(heads, pairs, 2, generator=draw)
    frequencies = torch.rand(heads, pairs, generator=draw, dtype=torch.float64)
    offset = KeyOffset(mean, channels.view(heads, pairs, 2), frequencies, DIM)
    return KeySmoothing(torch.rand(heads, DIM, generator=draw) + 0.5, offset)


def tokens(rows: int, count: int, seed: int, heads: int = HEADS) -> Tensor:
    return torch.randn(rows, heads, count, DIM, generator=generator(seed))


def as_codes(x: Tensor, quant: QuantSpec | None = INT4) -> Tensor:
    """A round trip through codes, if there are any."""
    return x if quant is None else PagedLayer(CacheFormat(quant=quant)).update(x, x)[0]


def mixed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recent: int,
    known: int = 0,
    window: int | None = None,
    quant: QuantSpec | None = INT4,
    shown: Tensor | None = None,
    smooth: KeySmoothing | None = None,
) -> Tensor:
    """What one row ``[H, N, D]`` should give: the newest tokens of each query exact, as far as known."""
    new, stored = query.shape[1], key.shape[1]
    position, token = torch.arange(stored - new, stored).unsqueeze(1), torch.arange(stored)
    is_exact = (token > position - recent) & (token >= known)
    positions, key_codes, value_codes = token[None], key[None], as_codes(value[None], quant)[0]
    key_codes = key_codes if smooth is None else smooth.smoothed(key_codes, positions)
    key_codes = as_codes(key_codes, quant)
    key_codes = (key_codes if smooth is None else smooth.restored(key_codes, positions))[0]
    ratio = query.shape[0] // key.shape[0]
    key, key_codes, value, value_codes = (
        x.repeat_interleave(ratio, 0) for x in (key, key_codes, value, value_codes)
    )
    scores = torch.where(is_exact, query @ key.mT, query @ key_codes.mT) / DIM**0.5
    hidden = token > position
    if window is not None:
        hidden = hidden | (token <= position - window)
    hidden = hidden if shown is None else ~shown
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return ((weights * is_exact) @ value + (weights * ~is_exact) @ value_codes).transpose(0, 1)
