"""Filling a ``KVCache`` with what is carried, and the formats that hold it."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor

from kvloom import ops
from kvloom.carry.carried import (
    CarriedCache,
    CarriedLayer,
    CarriedSide,
    Int8Codes,
    Vectors,
    expect_exact,
    expect_finite,
    floats_of,
)
from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import dtype_name
from kvloom.core.spelling import parse_kind
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.layers import KVCacheLayer

SIDES: Final = ("keys", "values")
"""Names of both sides of a layer."""
ROWS: Final = CacheLayout("T H D")
"""Axes of head vectors on their way."""
_PIECE: Final = 512
"""Tokens before a window that are given to a cache at once, as zeros that it forgets."""


def columns(layer: KVCacheLayer, count: int) -> slice:
    """Columns of the last ``count`` tokens among those that a layer has stored."""
    first, length = int(layer.pages.stored().index.positions()[0, 0]), int(layer.get_seq_length())
    return slice(length - count - first, length - first)


def formats_of(cache: CarriedCache) -> tuple[str, str]:
    """Format strings of keys and of values that hold what is carried."""
    keys, values = (_format_of(side, name) for name, side in cache.layers[0].sides)
    return keys, values


def fill(made: KVCache, cache: CarriedCache, model: Any, is_exact: bool) -> None:
    """Give all layers of an empty cache what is carried.

    Args:
        made: The cache.
        cache: What is carried.
        model: The model of both.
        is_exact: Whether the format holds what is carried, or floats of it, so that it can be put into the
            cache as it is.

    Raises:
        ArgumentError: there is a NaN or an infinity, or codes are in one side of some layers alone.
    """
    groups = sorted(range(len(cache.layers)), key=lambda i: cache.layers[i].window or 0)
    for _, numbers in groupby(groups, key=lambda i: cache.layers[i].window):
        _fill(made, cache, [*numbers], model, is_exact)


def _format_of(side: CarriedSide, name: str) -> str:
    """Format string that holds what a side has."""
    if not side.has_codes:
        return side.kind
    vectors = side.load()
    if not isinstance(vectors, Int8Codes):
        return "float32"
    rotate = name if vectors.rotated else "none"
    return f"int8:g{vectors.group},rotate={rotate},smooth=none"


def expect_holds(cache: CarriedCache, model: Any, name: str, text: str, *, rounding: bool = False) -> None:
    """Raise ArgumentError unless floats of a format hold what is carried, rounded only if asked for."""
    kind = parse_kind(name, text)
    if kind.bits:
        raise ArgumentError(
            f"{name} must hold {', '.join(cache.kinds)} without rounding, got {text}: rounding was not asked "
            f"for"
        )
    expect_exact(cache, dtype_name(model.dtype) if kind.name == "auto" else kind.name, rounding)


def _fill(made: KVCache, cache: CarriedCache, numbers: Sequence[int], model: Any, is_exact: bool) -> None:
    """Give tokens to the layers of one window, as forwards would; those before a window are zeros."""
    held = cache.layers[numbers[0]].keys.num_tokens
    skipped = cache.num_tokens - held
    for start in range(0, skipped, _PIECE):
        for i in numbers:
            _update(made, cache.layers[i], i, min(_PIECE, skipped - start), model)
    for i in numbers:
        loaded = []
        for name, side in cache.layers[i].sides:
            loaded.append(side.load())
            expect_finite(name, i, loaded[-1])
        if is_exact:
            _update(made, cache.layers[i], i, held, model)
            _put(i, made.layers[i], loaded)
        else:
            rows = [floats_of(x).to(model.device, model.dtype).transpose(0, 1)[None] for x in loaded]
            made.update(rows[0], rows[1], i)


def _update(made: KVCache, layer: CarriedLayer, number: int, count: int, model: Any) -> None:
    """Give zeros to a layer."""
    zero = torch.zeros((), dtype=model.dtype, device=model.device)
    keys, values = (zero.expand(1, side.heads, count, side.head_dim) for _, side in layer.sides)
    made.update(keys, values, number)


def _put(number: int, layer: KVCacheLayer, loaded: Sequence[Vectors]) -> None:
    """Write vectors over the newest tokens of a layer, as they are."""
    stored = layer.pages.stored()
    tensors = list[tuple[Tensor, Tensor | None]]()
    for name, side, vectors in zip(SIDES, (stored.view.key, stored.view.value), loaded, strict=True):
        if side is None or (side.scale is not None and not isinstance(vectors, Int8Codes)):
            raise ArgumentError(
                f"cache must have codes in {name} of all layers or of none, got none in {number}"
            )
        if side.scale is None:
            x = floats_of(vectors).to(side.cache.device, side.cache.dtype)
            expect_finite(name, number, x)
            tensors.append((x.contiguous(), None))
        elif isinstance(vectors, Int8Codes):
            scales = vectors.scales.to(side.scale.device, side.scale.dtype)
            tensors.append((vectors.codes.to(side.cache.device), scales))
    (keys, key_scales), (values, value_scales) = tensors
    view = KVView.split(ROWS, keys, values, key_scales, value_scales)
    count = keys.shape[0]
    ops.copy(
        view,
        torch.arange(count, device=view.device),
        stored.view,
        stored.index.slots[0, columns(layer, count)],
    )
