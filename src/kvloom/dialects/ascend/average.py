"""Mean of a window for Rope compression: an exact sum, one division, one rounding."""

import torch
from torch import Tensor


def group_means(rows: Tensor, group: Tensor, num_groups: int, counts: Tensor) -> Tensor:
    """Mean of the rows of each group.

    Floats are summed in float64. Integers are summed exactly and divided towards zero; of a 32-bit sum only
    the low 32 bits count, as in an accumulator of that width.

    Args:
        rows: ``[N, D]``, any dtype that the operator supports.
        group: Group of each row, ``[N]`` int64; ``num_groups`` for rows that belong to none.
        num_groups: G.
        counts: Rows in each group, ``[G]`` int64; groups without rows give 0.

    Returns:
        ``[G, D]`` in the dtype of ``rows``.
    """
    dtype = rows.dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    # Rows of no group are added to an extra group: they may have NaN, which a factor of 0 does not remove.
    total = torch.zeros(num_groups + 1, rows.shape[1], dtype=wide, device=rows.device)
    total = total.index_add(0, group, rows.to(wide))[:num_groups]
    count = counts.clamp_min(1).unsqueeze(1)
    if dtype.is_floating_point:
        return (total / count).to(dtype)
    if dtype == torch.int32:
        total = (total + (1 << 31)) % (1 << 32) - (1 << 31)
    elif dtype == torch.uint32:
        total = total % (1 << 32)
    return torch.div(total, count, rounding_mode="trunc").to(dtype)
