"""Where an element of a cache tensor lies, by counting digits. Imports nothing from the library."""

from __future__ import annotations

import re
from typing import TypeVar

import torch
from torch import Tensor

Place = TypeVar("Place", int, Tensor)


def address(axes: str, sizes: dict[str, int], at: dict[str, Place]) -> Place:
    """Row-major offset of the element ``at`` of a tensor with ``axes``; merged axes change no address."""
    offset: Place = at["D"] * 0
    for word in axes.replace("(", " ").replace(")", " ").split():
        match = re.fullmatch(r"(\w)(?:([/%])(\d+))?", word)
        assert match is not None, word
        axis, part, chunk = match[1], match[2], int(match[3] or 1)
        extent, digit = sizes[axis], at[axis]
        if part == "/":
            extent, digit = extent // chunk, digit // chunk
        elif part == "%":
            extent, digit = chunk, digit % chunk
        offset = offset * extent + digit
    return offset


def address_table(axes: str, sizes: dict[str, int], layer: int = 0, side: int = 0) -> Tensor:
    """Offsets ``[slots, H, D]`` of one layer's keys (``side`` 0) or values (1)."""
    num_slots = sizes["T"] if "T" in axes else sizes["B"] * sizes["S"]
    slot = torch.arange(num_slots).view(-1, 1, 1)
    at = {
        "L": torch.tensor(layer),
        "2": torch.tensor(side),
        "T": slot,
        "B": slot // sizes.get("S", 1),
        "S": slot % sizes.get("S", 1),
        "H": torch.arange(sizes["H"]).view(1, -1, 1),
        "D": torch.arange(sizes["D"]).view(1, 1, -1),
    }
    return address(axes, {"2": 2, **sizes}, at)


def extents(axes: str, sizes: dict[str, int]) -> list[int]:
    """Shape of a tensor with ``axes``."""
    shape = []
    for dim in re.findall(r"\([^)]*\)|\S+", axes):
        extent = 1
        for axis, part, chunk in re.findall(r"(\w)([/%]?)(\d*)", dim):
            whole = {"2": 2, **sizes}[axis]
            extent *= int(chunk) if part == "%" else whole // int(chunk or 1)
        shape.append(extent)
    return shape
