"""Attend to latents and rope keys, by the kernels of attend: latents are keys and values."""

from typing import Any, Final

from torch import Tensor

from kvloom.core.views import head_dim_of
from kvloom.ops.impl.triton.attending.attend import MAX_HEAD_DIM, launch_attend

MAX_LATENT_DIM: Final = 512
"""Largest latent: the float32 sums of a tile of rows must fit in the registers of a program."""


def why_not(
    query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    latent_scale: Tensor | None,
    rope_scale: Tensor | None,
    *_: object,
) -> str | None:
    """Reason why these kernels cannot attend to such latents, or ``None``."""
    rank, rope = head_dim_of(latent_cache, latent_scale), head_dim_of(rope_cache, rope_scale)
    if rank <= MAX_LATENT_DIM and rope <= MAX_HEAD_DIM:
        return None
    most = f"latents up to {MAX_LATENT_DIM} and rope keys up to {MAX_HEAD_DIM}"
    return f"attends to {most} elements, got {rank} and {rope}"


def attend_latent(query: Tensor, *arguments: Any) -> Tensor:
    """Same contract as the reference; lengths and tables are checked if that needs no synchronization."""
    return launch_attend(query, *arguments, is_latent=True)[0]
