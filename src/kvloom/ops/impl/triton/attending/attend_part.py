"""Attend over some of the stored tokens, by the kernels of attend, with logarithms of sums."""

from typing import Any

from torch import Tensor

from kvloom.ops.impl.triton.attending.attend import NUM_SHARED, launch_attend, why_not

__all__ = ["attend_part", "why_not"]


def attend_part(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Same contract as the reference; lengths and tables are checked if that needs no synchronization."""
    end = NUM_SHARED + 4
    return launch_attend(query, *arguments[:end], positional=arguments[end:], is_part=True)
