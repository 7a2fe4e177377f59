"""Keys or values of a cache in rows of one group each, for store and load.

Row r is group ``r % G`` of head ``r // G % H`` of token ``r // (G * H)``. A side without scales has one
group, the head vector. Shapes: H heads, G groups of a head vector.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.core.entries import OF_BITS
from kvloom.core.views import Side
from kvloom.ops.impl.triton.numerics import LARGEST
from kvloom.ops.impl.triton.places import Shape, View, describe

MAX_GROUP: Final = 4096
"""Maximum stored elements of a group, or of a head vector without scales, in a row of a tile."""

TILE_ELEMENTS: Final = 2048
"""Number of elements that one program moves, 16 for each of its 128 threads."""


class SideViews(NamedTuple):
    """Views of a side's cache and scale, for kernels."""

    cache: View | None
    scale: View | None


@dataclass(frozen=True)
class Form:
    """Compile-time constants of a side. Sizes are in stored elements."""

    bits: int
    per_element: int  # number of codes in a byte, or 1
    group: int
    groups: int
    cache: Shape
    scale: Shape
    largest_scale: float
    rows: int  # rows of a tile
    width: int  # columns of a tile: the group, rounded up to a power of two


def arguments_of(side: Side | None, *, as_bits: bool) -> tuple[SideViews, Form]:
    """Arguments for one side; with ``as_bits`` its elements are moved unchanged."""
    if side is None:
        return SideViews(None, None), Form(0, 1, 1, 0, Shape(1, 1, 0), Shape(1, 1, 0), 0.0, 1, 1)
    cache, scale, bits = side.cache, side.scale, side.bits
    view, shape = describe(cache, bits=as_bits or bits > 0)
    scale_view, scale_shape = (None, shape) if scale is None else describe(scale)
    groups = 1 if scale is None else scale.shape[-2] * scale.shape[-1]
    group = cache.shape[-2] * cache.shape[-1] // groups
    width = triton.next_power_of_2(group)
    largest = 0.0 if scale is None else LARGEST[scale.dtype]
    per_element, rows = OF_BITS[bits].per_byte if bits else 1, max(TILE_ELEMENTS // width, 1)
    form = Form(bits, per_element, group, groups, shape, scale_shape, largest, rows, width)
    return SideViews(view, scale_view), form


def num_programs(tokens: int, heads: int, *forms: Form) -> int:
    """Number of programs for the larger side; a side that is ``None`` has no groups."""
    return max(-(-tokens * heads * form.groups // form.rows) for form in forms)


def why_not(cache: Tensor | None, scale: Tensor | None) -> str | None:
    """Reason why these kernels cannot move the elements of a side, or ``None``."""
    if cache is None:
        return None
    group = cache.shape[-2] * cache.shape[-1] // (1 if scale is None else scale.shape[-2] * scale.shape[-1])
    if group > MAX_GROUP:
        return f"moves groups, or head vectors without scales, of at most {MAX_GROUP} elements, got {group}"
    if cache.itemsize > torch.int64.itemsize:
        return f"moves elements of at most 8 bytes, got {cache.dtype}"
    return None


@triton.jit
def rows_of(heads, FORM: tl.constexpr):
    """Token, head and group of each row of this program's tile, all ``[rows, 1]``."""
    ROWS: tl.constexpr = FORM.rows
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    vector = row // FORM.groups
    return vector // heads, vector % heads, row % FORM.groups


@triton.jit
def elements_of(group, FORM: tl.constexpr):
    """Stored elements of each row, ``[rows, width]``, and a mask of those in the group, ``[1, width]``."""
    WIDTH: tl.constexpr = FORM.width
    within = tl.arange(0, WIDTH)[None, :]
    return group * FORM.group + within, within < FORM.group


@triton.jit
def numbers_of(group, FORM: tl.constexpr):
    """Numbers in the elements, ``[rows, width * per_element]``, and their mask, as ``elements_of``."""
    WIDTH: tl.constexpr = FORM.width * FORM.per_element
    within = tl.arange(0, WIDTH)[None, :]
    return group * (FORM.group * FORM.per_element) + within, within < FORM.group * FORM.per_element
