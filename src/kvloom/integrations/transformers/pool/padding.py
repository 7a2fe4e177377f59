"""Left padding of a batch in a pool, whose rows have different lengths.

Shapes: B rows, T columns.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.checks import expect
from kvloom.errors import ArgumentError

_DTYPES: Final = (torch.int64, torch.int32, torch.bool)


def padding_of(mask: Tensor | None, num_rows: int, num_columns: int) -> list[int]:
    """Number of padding columns in front of each row.

    Args:
        mask: ``[B, T]`` as a tokenizer makes it, 0 for padding and 1 for tokens; ``None`` for no padding.
        num_rows: B.
        num_columns: T.

    Raises:
        ArgumentError: a row has padding elsewhere, or no token.
        ShapeError: the mask has other sizes, or another dtype than int64, int32 and bool.
    """
    if mask is None:
        return [0] * num_rows
    expect("attention_mask", mask, "B T", dtype=_DTYPES, B=num_rows, T=num_columns)
    padding = []
    for row, shown in enumerate(mask.tolist()):
        first = next((i for i, x in enumerate(shown) if x), num_columns)
        if first == num_columns or any(x != 1 for x in shown[first:]):
            raise ArgumentError(
                f"attention_mask must be 0 in front of the tokens of a row, and then 1 up to its end, got "
                f"{shown} in row {row}: pad on the left"
            )
        padding.append(first)
    return padding


def expect_mask_of_padding(mask: Any, begins: Sequence[int], end: int) -> None:
    """Check that the mask of a forward hides the padding in front of rows, and nothing else.

    Args:
        mask: Mask given to the model.
        begins: Column of the first token of each row.
        end: Number of columns, new tokens included.

    Raises:
        ArgumentError: the mask hides other columns, or has another shape.
    """
    if isinstance(mask, Tensor) and mask.shape == (len(begins), end):
        first = torch.tensor(begins, device=mask.device).unsqueeze(1)
        if bool((mask.bool() == (torch.arange(end, device=mask.device) >= first)).all()):
            return
    got = f"one of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"{mask!r}"
    raise ArgumentError(
        f"attention_mask must be [{len(begins)}, {end}] and hide the padding of the cache, columns before "
        f"{list(begins)} of its rows, and nothing else, got {got}"
    )
