"""ALiBi slopes by head count, for whole and for sharded heads."""

import torch
from torch import Tensor

from kvloom.core.checks import expect_range


def alibi_slopes(
    num_heads: int,
    *,
    offset: int = 0,
    total_heads: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Slopes of heads ``offset .. offset + num_heads`` of a model with ``total_heads`` heads.

    With p the largest power of two <= total: ``2^(-8 n / p)`` for n = 1..p, then ``2^(-4 n / p)`` for n = 1,
    3, 5... A rank with some of the heads must pass ``offset`` and ``total_heads``, or its slopes are wrong.

    Args:
        num_heads: Query heads held here.
        offset: Index of the first of these heads in the whole model.
        total_heads: Query heads of the whole model; ``num_heads`` if ``None``.
        device: Device of the result.

    Returns:
        ``[num_heads]`` float32, for ``Scores(alibi_slopes=...)``.

    Source: Press, Smith, Lewis, "Train Short, Test Long", 2022.
    """
    total = expect_range("total_heads", num_heads if total_heads is None else total_heads, 1)
    expect_range("num_heads", num_heads, 1)
    expect_range("offset", offset, 0, total - num_heads + 1)
    power = 1 << (total.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / power) for n in range(1, power + 1)]
    slopes += [2.0 ** (-4 * n / power) for n in range(1, 2 * (total - power), 2)]
    return torch.tensor(slopes[offset : offset + num_heads], dtype=torch.float32, device=device)
