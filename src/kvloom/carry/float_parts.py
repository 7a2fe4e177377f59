"""Floats of a side as they are written: some tokens at a time, checked, in the wanted order of pairs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvloom.carry.carried import CarriedSide, expect_finite, floats_of
from kvloom.carry.rope_pairs import to_adjacent


def float_parts(
    name: str, layer: int, side: CarriedSide, dtype: torch.dtype, rotary: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Numbers of first tokens with floats ``[t, H, D]`` from there on.

    Args:
        name: ``"keys"`` or ``"values"``.
        layer: Number of the layer.
        side: What to read.
        dtype: Dtype of the floats.
        rotary: Elements whose pairs become adjacent; 0 for none.

    Raises:
        ArgumentError: there is a NaN or an infinity.
    """
    for first, vectors in side.parts():
        x = floats_of(vectors).to(dtype)
        expect_finite(name, layer, x)
        yield first, to_adjacent(x, rotary) if rotary else x
