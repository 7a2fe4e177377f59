"""Cache formats of the Ascend operators, as kvloom layouts.

Shapes: nb blocks, bs slots in a block, H heads, D head size, last elements in 32 bytes.
"""

from typing import Final

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.checks import expect
from kvloom.core.layouts import ASCEND_NORM, HUGGING_FACE, CacheLayout, ascend_fractal_nz
from kvloom.core.views import KVView
from kvloom.errors import ShapeError

NORM: Final = ASCEND_NORM  # [nb, bs, H, D]
NHSD: Final = HUGGING_FACE  # [nb, H, bs, D]
_PIECE_BYTES: Final = 32


def open_caches(
    layout: CacheLayout | None, key_cache: Tensor, value_cache: Tensor | None
) -> tuple[KVView, KVView | None]:
    """Canonical views of the key cache and of the value cache, which have the same blocks and slots.

    A ``layout`` of ``None`` is FRACTAL_NZ, whose chunks span all heads: it is viewed as one head of ``H * D``
    elements. Each side may have its own dtype, and so its own chunk.
    """
    key = _open("key_cache", layout, key_cache)
    if value_cache is None:
        return key, None
    value = _open("value_cache", layout, value_cache)
    if (key.num_blocks, key.block_size) != (value.num_blocks, value.block_size):
        raise ShapeError(
            f"value_cache must have the blocks and slots of key_cache {list(key_cache.shape)}, "
            f"got {list(value_cache.shape)}"
        )
    return key, value


def store_sides(
    rows: tuple[Tensor, Tensor | None], slots: Tensor, caches: tuple[KVView, KVView | None]
) -> None:
    """Store keys ``[T, H, D]`` and values in their caches, in one call if they have one dtype.

    The second of two calls must not fail, so the caller has made all checks of ``store`` before.
    """
    (key, value), (keys, values) = rows, caches
    if value is None or values is None:
        ops.store(key, None, slots, keys)
    elif key.dtype == value.dtype and keys.num_heads == values.num_heads:
        ops.store(key, value, slots, KVView(keys.key, values.key))
    else:
        ops.store(key, None, slots, keys)
        ops.store(value, None, slots, values)


def _open(name: str, layout: CacheLayout | None, cache: Tensor) -> KVView:
    if layout is not None:
        expect(name, cache, "nb bs H D" if layout == NORM else "nb H bs D")
        return KVView.split(layout, cache, None)
    cache = _as_4d_nz(name, cache)
    return KVView.split(ascend_fractal_nz(cache.shape[-1]), cache, None, heads=1)


def _as_4d_nz(name: str, cache: Tensor) -> Tensor:
    """View of a FRACTAL_NZ cache as ``[nb, H * D / last, bs, last]``."""
    last = _PIECE_BYTES // cache.itemsize
    if cache.ndim not in (4, 5) or cache.shape[-1] != last:
        raise ShapeError(
            f"{name} must be [nb, H * D / {last}, bs, {last}] or [nb, H, D / {last}, bs, {last}] "
            f"for {cache.dtype} in PA_NZ, got {list(cache.shape)}"
        )
    if cache.ndim == 4:
        return cache
    heads, pieces = cache.shape[1:3]
    if heads > 1 and pieces > 1 and cache.stride(1) != pieces * cache.stride(2):
        raise ShapeError(f"{name} must have one stride over heads and pieces, got strides {cache.stride()}")
    return cache.flatten(1, 2)


def nd_to_nz(cache: Tensor) -> Tensor:
    """Convert a cache ``[nb, bs, H, D]`` to FRACTAL_NZ, ``[nb, H * D / last, bs, last]``.

    Args:
        cache: Any dtype; ``last = 32 / itemsize`` must divide ``H * D``.

    Returns:
        A new contiguous tensor; ``nz[b, j // last, s, j % last] == nd.flatten(2)[b, s, j]``.

    Raises:
        ShapeError: rank or size does not fit.
    """
    expect("cache", cache, "nb bs H D")
    last = _PIECE_BYTES // cache.itemsize
    features: Tensor = cache.flatten(2)
    if features.shape[2] % last:
        raise ShapeError(
            f"cache must have H * D divisible by {last} for {cache.dtype}, got {list(cache.shape)}"
        )
    pieces: Tensor = features.unflatten(2, (-1, last))
    return pieces.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def nz_to_nd(cache: Tensor, num_heads: int) -> Tensor:
    """Convert a FRACTAL_NZ cache back: the inverse of ``nd_to_nz``.

    Args:
        cache: ``[nb, H * D / last, bs, last]``.
        num_heads: H, which the format does not have.

    Returns:
        A new contiguous tensor ``[nb, bs, H, D]``.

    Raises:
        ShapeError: rank or last axis does not fit, or ``num_heads`` does not divide ``H * D``.
    """
    features = _as_4d_nz("cache", cache).transpose(1, 2).flatten(2)
    if num_heads < 1 or features.shape[2] % num_heads:
        raise ShapeError(f"num_heads must divide {features.shape[2]} elements, got {num_heads}")
    cache = features.unflatten(2, (num_heads, -1))
    return cache.clone(memory_format=torch.contiguous_format)
