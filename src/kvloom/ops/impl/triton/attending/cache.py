"""Keys and values of a cache as arguments of attention's kernels.

Shapes: H key/value heads, Dk and Dv head dims.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from kvloom.core.entries import OF_BITS
from kvloom.core.memo import form_of
from kvloom.core.views import Side
from kvloom.ops.impl.triton.attending.tile import SideForm
from kvloom.ops.impl.triton.numerics import LARGEST
from kvloom.ops.impl.triton.places import describe
from kvloom.ops.impl.triton.sides import SideViews

LEAST_WIDTH: Final = 16
"""Minimum number of elements of a product on tensor cores; 8 along one axis, to which fewer rows go."""

MAX_CHUNKS: Final = 8
"""Number of groups up to which each has its own product, so that its scale can multiply scores."""


@dataclass(frozen=True, eq=False, slots=True)
class CacheKind:
    """What decides how kernels read a cache: one object for all layers of which it is the same.

    Attributes:
        key: Form of the keys, or of latents.
        rope: Form of the rope keys; ``None`` if keys are no latents.
        few_values: Form of the values for tiles of few new tokens.
        many_values: Form of the values for tiles of many.
        heads: H.
        width: Smallest power of two of at least both head dims.
        value_dim: Dv.
        rope_dim: Head dim of the rope keys, 0 without.
        bits: Bits of a code of the keys, or of the values; 0 if both are floats.
        dtypes: Of keys and of values as stored.
        device: Device of the cache.
        tensors: Strides of its tensors, and whether they are aligned.
    """

    key: SideForm
    rope: SideForm | None
    few_values: SideForm
    many_values: SideForm
    heads: int
    width: int
    value_dim: int
    rope_dim: int
    bits: int
    dtypes: tuple[torch.dtype, torch.dtype]
    device: torch.device
    tensors: tuple[tuple[tuple[int, ...], bool], ...]


_kind = lru_cache(CacheKind)


class CacheViews(NamedTuple):
    """The tensors of a cache as arguments of kernels, and the number of its slots."""

    keys: SideViews
    ropes: SideViews | None
    few_values: SideViews
    many_values: SideViews
    num_slots: int


def describe_cache(
    key: Side, value: Side, dtype: torch.dtype, is_latent: bool
) -> tuple[CacheViews, CacheKind]:
    """Views of a cache for queries of ``dtype``, and their kind; latents have rope keys as values."""
    ropes, rope_form, rope_dim = None, None, 0
    dtypes = key.cache.dtype, value.cache.dtype
    forms = (form_of(x) for side in (key, value) for x in (side.cache, side.scale))
    tensors = tuple((x.strides, x.is_aligned) for x in forms if x is not None)
    if is_latent:
        ropes, rope_form = describe_side(value, dtype)
        value, rope_dim = key, value.head_dim
    keys, key_form = describe_side(key, dtype)
    # Values of latents are read by many heads.
    few, few_form = describe_side(value, dtype, of_values=True, few_rows=not is_latent)
    many, many_form = describe_side(value, dtype, of_values=True)
    width: int = triton.next_power_of_2(max(key.head_dim, value.head_dim))
    kind = _kind(
        key_form, rope_form, few_form, many_form, key.num_heads, width, value.head_dim, rope_dim,
        key.bits or value.bits, dtypes, key.device, tensors,
    )  # fmt: skip
    return CacheViews(keys, ropes, few, many, key.cache.shape[:3].numel()), kind


def describe_side(
    side: Side, dtype: torch.dtype, *, of_values: bool = False, few_rows: bool = False
) -> tuple[SideViews, SideForm]:
    """Arguments for keys or values, with the choice of what their scales multiply.

    "products": one product for each group, if its rounding is no worse than that of the query's dtype.
    "numbers": values that many rows share, multiplied in the dtype of the scales, as the reference rounds
    them. "one by one": codes are dequantized, as in the reference.
    """
    cache, scale, bits = side.cache, side.scale, side.bits
    dim = cache.shape[-2] * cache.shape[-1]
    if scale is None:
        view, shape = describe(cache)
        form = SideForm(0, dim, width_of(dim), 1, 1, 1, dim, False, "", shape, shape, 1, False, 0.0)
        return SideViews(view, None), form
    groups = scale.shape[-2] * scale.shape[-1]
    planes, group = OF_BITS[bits].per_byte, dim // groups
    # All but the way of reading depends only on the kind, so that all layouts have the same bits.
    has_words = bits > 2 and group % (2 * LEAST_WIDTH) == 0
    scaling = "one by one"
    if groups <= MAX_CHUNKS and dtype != torch.float32:
        # Weights times scales exceed the range of float16.
        is_coarse = dtype == torch.bfloat16 or (dtype == scale.dtype and not of_values)
        is_exact = has_words and of_values and scale.dtype in (dtype, torch.float16)
        if is_exact and not (few_rows and is_coarse):
            scaling = "numbers"
        # Four planes of bytes for each group would spill registers.
        elif is_coarse and group == width_of(group) and planes <= 2:
            scaling = "products"
    words = None
    if has_words := has_words and scaling != "one by one":
        dim, group, planes = dim // 2, group // 2, planes * 2
        words = _words_of(cache, torch.int16)
    two = _words_of(scale, torch.int32) if scale.itemsize == 2 and scaling != "one by one" else None
    view, shape = describe(cache if words is None else words, bits=True)
    scale_view, scale_shape = describe(scale if two is None else two)
    chunks, width = (groups, group) if scaling == "products" else (1, width_of(dim))
    form = SideForm(
        bits, dim, width, chunks, planes, chunks * planes, group, has_words and words is None, scaling,
        shape, scale_shape, 1 if two is None else 2, scale.dtype == torch.float16, LARGEST[scale.dtype],
    )  # fmt: skip
    return SideViews(view, scale_view), form


def _words_of(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """View of pairs of adjacent elements of head vectors, as integers; ``None`` if they are not adjacent."""
    chunks = x.transpose(-1, -2) if x.shape[-1] == 1 else x
    is_even = all(n % 2 == 0 for n in (chunks.shape[-1], *chunks.stride()[:-1]))
    if chunks.stride(-1) != 1 or not is_even or x.data_ptr() % dtype.itemsize:
        return None
    return chunks.view(dtype)


def width_of(dim: int) -> int:
    """Smallest power of two of at least ``dim`` and ``LEAST_WIDTH``."""
    width: int = triton.next_power_of_2(dim)
    return max(width, LEAST_WIDTH)
