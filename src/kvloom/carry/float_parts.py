"""Floats of a side as they are written: some tokens at a time, checked, in the wanted axes and pairs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvloom.carry.carried import CarriedSide, Load, expect_finite, floats_of, not_finite
from kvloom.carry.files.writing import RoomFor
from kvloom.core.pairs import ADJACENT, HALVES
from kvloom.ops.arrangement import arrange


def float_parts(
    name: str,
    layer: int,
    side: CarriedSide,
    dtype: torch.dtype,
    room: RoomFor,
    rotary: int = 0,
    *,
    by_head: bool = False,
) -> Iterator[tuple[int, Tensor]]:
    """Numbers of first tokens with floats ``[t, H, D]`` from there on.

    They are checked and put in order in one pass, and where they lie as they are wanted they are not copied.

    Args:
        name: ``"keys"`` or ``"values"``.
        layer: Number of the layer.
        side: What to read.
        dtype: Dtype of the floats.
        room: What gives memory for those that are copied.
        rotary: Elements whose pairs become adjacent; 0 for none.
        by_head: Whether all tokens of a head are adjacent in memory, and not all heads of a token.

    Raises:
        ArgumentError: there is a NaN or an infinity.
    """
    load: Load = side.load
    moved, order = rotary, ADJACENT
    if side.adjacent is not None and rotary in (0, side.rotary):
        load, moved, order = side.adjacent, side.rotary - rotary, HALVES
    for tokens in side.parts():
        x = floats_of(load(tokens)).to(dtype)
        wanted = x.transpose(0, 1) if by_head else x
        if not moved and wanted.is_contiguous():
            expect_finite(name, layer, x)
        else:
            made = room(wanted.shape, dtype)
            found = made.transpose(0, 1) if by_head else made
            if not arrange(x, found, moved, order):
                raise not_finite(name, layer)
            x = found
        yield tokens.start, x
