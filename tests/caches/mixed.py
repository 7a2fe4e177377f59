"""What attention should give over tokens of which the newest are as they were computed, and others codes."""

from __future__ import annotations

import torch
from oracles.bits import generator
from torch import Tensor

from kvloom.caches import CacheFormat, PagedLayer
from kvloom.core.specs import QuantSpec

HEADS, DIM, RECENT = 2, 32, 20
INT4 = QuantSpec(4, 16)


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
) -> Tensor:
    """What one row ``[H, N, D]`` should give: the newest tokens of each query exact, as far as known."""
    new, stored = query.shape[1], key.shape[1]
    position, token = torch.arange(stored - new, stored).unsqueeze(1), torch.arange(stored)
    is_exact = (token > position - recent) & (token >= known)
    key_codes, value_codes = (as_codes(x[None], quant)[0] for x in (key, value))
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
