"""Keys or values of a cache in rows of one group each, for store and load.

Row r of a token is group ``r % G`` of head ``r // G``. A side without scales has one group, the head vector.
A program moves a tile of rows of a few tokens: as many of each as the largest power of two that divides
``H * G``, so that compiled code divides only by numbers that it knows. Shapes: H heads, G groups of a head
vector.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.core.entries import OF_BITS
from kvloom.core.views import Side
from kvloom.ops.impl.triton.configs import tile_of_moves
from kvloom.ops.impl.triton.numerics import LARGEST
from kvloom.ops.impl.triton.places import Shape, View, describe

MAX_GROUP: Final = 4096
"""Maximum stored elements of a group, or of a head vector without scales, in a row of a tile."""


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
    heads: int
    cache: Shape
    scale: Shape
    largest_scale: float
    tokens: int  # tokens of a tile
    rows: int  # rows of each token of a tile
    width: int  # columns of a tile: the group, rounded up to a power of two


def arguments_of(side: Side | None, *, as_bits: bool) -> tuple[SideViews, Form]:
    """Arguments for one side; with ``as_bits`` its elements are moved unchanged."""
    if side is None:
        return SideViews(None, None), Form(0, 1, 1, 1, 0, Shape(1, 1, 0), Shape(1, 1, 0), 0.0, 1, 1, 1)
    cache, scale, bits = side.cache, side.scale, side.bits
    view, shape = describe(cache, bits=as_bits or bits > 0)
    scale_view, scale_shape = (None, shape) if scale is None else describe(scale)
    heads, groups = cache.shape[3], 1 if scale is None else scale.shape[-2] * scale.shape[-1]
    group = cache.shape[-2] * cache.shape[-1] // groups
    width = triton.next_power_of_2(group)
    largest = 0.0 if scale is None else LARGEST[scale.dtype]
    per_element = OF_BITS[bits].per_byte if bits else 1
    fit = max(tile_of_moves().numbers // (width * per_element), 1)
    rows = min(heads * groups & -(heads * groups), fit)
    form = Form(
        bits, per_element, group, groups, heads, shape, scale_shape, largest, fit // rows, rows, width
    )
    return SideViews(view, scale_view), form


def num_programs(tokens: int, *forms: Form) -> tuple[int, int, int]:
    """Programs along tokens, along the rows of a token of the larger side, and along sides that exist."""
    along_tokens = max(-(-tokens // form.tokens) for form in forms)
    along_rows = max(form.heads * form.groups // form.rows for form in forms)
    return along_tokens, along_rows, sum(form.heads > 0 for form in forms)


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
def rows_of(num_tokens, FORM: tl.constexpr):
    """Token, head and group of each row of this program's tile, and whether it exists.

    Head and group are ``[rows, 1]``, and so is the rest unless all rows have one token.
    """
    ROWS: tl.constexpr = FORM.rows
    TOKENS: tl.constexpr = FORM.tokens
    row = tl.arange(0, TOKENS * ROWS)[:, None]
    token = tl.program_id(0) * TOKENS
    if TOKENS > 1:
        token += row // ROWS
    exists = (token < num_tokens) & (tl.program_id(1) < FORM.heads * FORM.groups // ROWS)
    of_token = tl.program_id(1) * ROWS + row % ROWS
    return token.to(tl.int64), of_token // FORM.groups, of_token % FORM.groups, exists


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
