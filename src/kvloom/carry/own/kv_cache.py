"""A ``KVCache`` as a ``CarriedCache``, and back.

Shapes: B rows, T tokens, N of them that a layer holds, H key/value heads, D elements of a head vector.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvloom import ops
from kvloom.carry.carried import (
    ALL,
    CarriedCache,
    CarriedLayer,
    CarriedSide,
    Int8Codes,
)
from kvloom.carry.geometry import expect_layers
from kvloom.carry.own.filling import ROWS, SIDES, columns, expect_holds, fill, formats_of
from kvloom.carry.own.model_geometry import geometry_of
from kvloom.core.entries import SideFormat
from kvloom.core.spelling import parse_kind
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.layers import KVCacheLayer
from kvloom.paging.arguments import token_ids
from kvloom.quant.rotation import block_of


def from_cache(cache: KVCache, model: Any, tokens: Sequence[int] | None = None) -> CarriedCache:
    """What a ``KVCache`` of one row holds.

    Codes of int8 without smoothing stay codes; all others are dequantized to float32. The cache may change
    afterwards: what is carried is what it held.

    Args:
        cache: The cache, paged or static.
        model: The model that it is of.
        tokens: Ids of its tokens, all of them computed.

    Raises:
        ArgumentError: the cache has other than one row, is empty or padded, is not of the model, or
            ``tokens`` are not as many as it has seen, or no integers.
        UnsupportedError: a layer keeps anything else than keys and values of the tokens.
    """
    geometry = geometry_of(model)
    if not isinstance(cache, KVCache) or cache.num_rows != 1:
        got = f"{cache.num_rows} rows" if isinstance(cache, KVCache) else type(cache).__name__
        raise ArgumentError(f"cache must be a KVCache of one row, cropped to its tokens, got {got}")
    held, count = cache.fork(), int(cache.get_seq_length())
    if len(held.layers) != len(geometry.layers):
        raise ArgumentError(f"cache must have {len(geometry.layers)} layers, got {len(held.layers)}")
    ids = None if tokens is None else tuple(token_ids(tokens))
    layers = []
    for i, (layer, sizes) in enumerate(zip(held.layers, geometry.layers, strict=True)):
        if not isinstance(layer, KVCacheLayer):
            raise UnsupportedError(
                f"cache must have keys and values in layer {i}, got {type(layer).__name__}"
            )
        layers.append(_held(i, layer, sizes.window, sizes.has_latents))
    found = CarriedCache(tuple(layers), count, ids)
    expect_layers(found, geometry)
    return found


def _held(number: int, layer: KVCacheLayer, window: int | None, has_latents: bool) -> CarriedLayer:
    storage = layer.pages.storage
    removed: int = getattr(layer.pages, "num_removed", False)
    if storage is None or removed:
        raise ArgumentError(f"cache must hold all tokens that it has seen in layer {number}")
    begins = layer.pages.stored().index.begins
    if begins is not None and bool(begins.any()):
        raise ArgumentError(f"cache must have no padding before its tokens, got some in layer {number}")
    entry, exact, smoothed = storage.entry, layer.pages.format.recent == 0, storage.smoothing is not None
    count = int(layer.get_seq_length())
    count = count if window is None else min(count, window - 1)
    sides = []
    for side, (name, format) in enumerate(zip(SIDES, entry.sides, strict=True)):
        are_codes = format.bits == 8 and exact and not (smoothed and name == "keys")
        kind = format.kind if are_codes or not format.bits else "float32"
        load = partial(_codes_of if are_codes else _floats_of, layer, side, count, format)
        sides.append(CarriedSide(count, entry.heads, format.head_dim, kind, load, format.kind, is_whole=True))
    return CarriedLayer(sides[0], sides[1], window, has_latents)


def _floats_of(layer: KVCacheLayer, side: int, count: int, format: SideFormat, tokens: slice = ALL) -> Tensor:
    """Floats ``[N, H, D]``, in the dtype in which they are stored; of codes float32."""
    dtype = torch.float32 if format.bits else getattr(torch, format.dtype)
    found: Tensor = layer.pages.stored().gather(dtype)[side][0, :, columns(layer, count)].transpose(0, 1)
    return found[tokens].cpu()


def _codes_of(
    layer: KVCacheLayer, side: int, count: int, format: SideFormat, tokens: slice = ALL
) -> Int8Codes:
    """Codes and scales of the tokens."""
    stored = layer.pages.stored()
    slots = stored.index.slots[0, columns(layer, count)][tokens]
    target = _empty_view(stored.view, len(slots))
    ops.copy(stored.view, slots, target, torch.arange(len(slots), device=target.device))
    found = (target.key, target.value)[side]
    if found is None or found.scale is None:
        raise ArgumentError(f"cache must have codes in both sides, got none in {SIDES[side]}")
    codes, scales = (x.flatten(-2).flatten(0, 2) for x in (found.cache, found.scale))
    return Int8Codes(codes.cpu(), scales.half().cpu(), block_of(format.head_dim) if format.rotated else 0)


def _empty_view(like: KVView, count: int) -> KVView:
    """Tensors ``[T, H, D]`` for some tokens of a view."""
    tensors: list[Tensor | None] = []
    for x in like.tensors:
        made = (
            None
            if x is None
            else torch.empty(count, x.shape[3], x.shape[4] * x.shape[5], dtype=x.dtype, device=x.device)
        )
        tensors.append(made)
    return KVView.split(ROWS, *tensors)  # type: ignore[arg-type]


def to_cache(
    cache: CarriedCache,
    model: Any,
    kv: str | None = None,
    *,
    values: str | None = None,
    rounding: bool = False,
    **options: Any,
) -> KVCache:
    """A ``KVCache`` with which a model goes on from what is carried.

    Args:
        cache: What is carried.
        model: A ``PreTrainedModel`` with the weights that computed it.
        kv: Format, as of ``KVCache.for_model``; ``None`` for what is carried, codes among it.
        values: Format of the values, if it differs.
        rounding: Whether numbers may be rounded to the format.
        options: Other arguments of ``KVCache.for_model``.

    Raises:
        ArgumentError: layers are not those of the model, the format does not hold what is carried without
            rounding, or there is a NaN.
        UnsupportedError: as ``from_cache``.
    """
    expect_layers(cache, geometry_of(model))
    is_exact = True
    if kv is None:
        kv, values = formats_of(cache)
    else:
        kinds = [(name, text) for name, text in (("kv", kv), ("values", values)) if text is not None]
        is_exact = not any(parse_kind(name, text).bits for name, text in kinds)
        for name, text in kinds if not rounding else ():
            expect_holds(cache, model, name, text)
    made = KVCache.for_model(model, kv, values=values, **options)
    fill(made, cache, model, is_exact)
    return made
