"""Attend to some of the latents and rope keys, by the kernels of attend, with logarithms of sums."""

from typing import Any

from torch import Tensor

from kvloom.ops.impl.triton.attending.attend import launch_attend
from kvloom.ops.impl.triton.attending.attend_latent import why_not

__all__ = ["attend_latent_part", "why_not"]


def attend_latent_part(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Same contract as the reference; lengths and tables are checked if that needs no synchronization."""
    return launch_attend(query, *arguments, is_part=True, is_latent=True)
