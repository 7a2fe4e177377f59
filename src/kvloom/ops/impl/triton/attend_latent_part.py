"""Attend to some of the latents and rope keys: the kernels of attend, with the logarithms of their sums."""

from typing import Any

from torch import Tensor

from kvloom.ops.impl.triton.attend import launch_attend
from kvloom.ops.impl.triton.attend_latent import why_not

__all__ = ["attend_latent_part", "why_not"]


def attend_latent_part(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """As the reference. The values of lengths and tables are checked where that is free."""
    return launch_attend(query, *arguments, is_part=True, is_latent=True)
