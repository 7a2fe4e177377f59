"""Arrays of engines that keep a cache in tensors by name: OpenVINO, ONNX Runtime and ExecuTorch.

Shapes: B is 1, H key/value heads, S slots of a buffer, T tokens of them, D elements of a head vector.

=============  ======================  ====================================================================
engine         axes                    names
=============  ======================  ====================================================================
OpenVINO       ``[B, H, T, D]``        of the graph's variables; float32, whatever the cache has inside
ONNX Runtime   ``[B, H, S, D]``        of the graph's inputs and outputs; past and present may share a
                                       buffer, of which the first T slots count
ExecuTorch     ``[B, S, H, D]``        of the program's buffers ``k_cache`` and ``v_cache``
=============  ======================  ====================================================================

A name must say which layer it is of, by its only number, and which of keys and values, by a word; or names
are given in order. Arrays are tensors of torch, or of numpy by ``torch.from_numpy``.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from kvloom.carry.carried import (
    CarriedCache,
    CarriedLayer,
    CarriedSide,
    expect_exact,
    expect_finite,
    floats_of,
    num_held,
)
from kvloom.carry.geometry import CacheGeometry, expect_layers
from kvloom.carry.rope_pairs import expect_pairs_named, to_adjacent
from kvloom.core.entries import FLOATS
from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import dtype_name
from kvloom.errors import ArgumentError

AXES: Final = {
    "openvino": CacheLayout("B H S D"),
    "onnxruntime": CacheLayout("B H S D"),
    "executorch": CacheLayout("B S H D"),
}
"""Axes of an engine's arrays."""
_KEYS: Final = ("key", "keys", "k")
_VALUES: Final = ("value", "values", "v")


def side_and_layer(name: str) -> tuple[int, int]:
    """0 for keys or 1 for values, and the layer, that the name of an array says.

    Raises:
        ArgumentError: it has no word for a side, words for both, or another number of numbers than one.
    """
    words = re.findall(r"[a-z]+|[0-9]+", name.lower())
    sides = {side for side, known in enumerate((_KEYS, _VALUES)) for word in words if word in known}
    if len(sides) > 1:  # as past_key_values.0.value: the last word says it
        last = [word for word in words if word in (*_KEYS, *_VALUES)][-1]
        sides = {int(last in _VALUES)}
    numbers = [int(word) for word in words if word.isdigit() and len(word) < 7]
    if len(sides) != 1 or len(numbers) != 1:
        raise ArgumentError(f"arrays must have names of a side and a layer, such as 'key.0', got {name!r}")
    return sides.pop(), numbers[0]


def read_arrays(
    arrays: Mapping[str, Tensor],
    engine: str,
    geometry: CacheGeometry,
    *,
    num_tokens: int | None = None,
    names: Sequence[tuple[str, str]] | None = None,
    pairs: str = "halves",
    tokens: Sequence[int] | None = None,
) -> CarriedCache:
    """The cache in an engine's arrays. They are not copied before they are read.

    Args:
        arrays: Tensors by name, of one row.
        engine: One of ``AXES``.
        geometry: Sizes of the model's layers.
        num_tokens: T; ``None`` for all slots. Must be given of ExecuTorch, whose buffers have room behind.
        names: Name of the keys and of the values of each layer, in order; ``None`` if names say it.
        pairs: Order of RoPE's pairs: ``"adjacent"`` with ``rotary_interleaved`` 1.
        tokens: Ids of the tokens that are held.

    Raises:
        ArgumentError: arrays are not those of the model's layers, or have fewer tokens.
    """
    layout = _layout(engine)
    expect_pairs_named("pairs", pairs)
    if num_tokens is None and engine == "executorch":
        raise ArgumentError(
            "num_tokens must be given of buffers of executorch, which have room behind, got None"
        )
    places = _places(arrays, len(geometry.layers), names)
    counts = {_slots(layout, name, arrays[name]) for name in places.values()}
    if num_tokens is None:
        if len(counts) != 1:
            raise ArgumentError(f"num_tokens must be given for arrays of {sorted(counts)} slots, got None")
        num_tokens = counts.pop()
    layers = []
    for i, sizes in enumerate(geometry.layers):
        sides = []
        for side, dim in enumerate((sizes.key_dim, sizes.value_dim)):
            name = places[side, i]
            of_rope = side == (1 if sizes.has_latents else 0)
            rotary = sizes.rotary if of_rope and pairs == "adjacent" else 0
            x = _rows(layout, name, arrays[name], sizes.heads, dim, num_tokens)
            held = x[num_tokens - num_held(num_tokens, sizes.window) :]
            sides.append(CarriedSide.of(held, rotary))
        layers.append(CarriedLayer(sides[0], sides[1], sizes.window, sizes.has_latents))
    ids = None if tokens is None else tuple(tokens)
    return CarriedCache(tuple(layers), num_tokens, ids, (("engine", engine),))


def write_arrays(
    cache: CarriedCache,
    engine: str,
    geometry: CacheGeometry,
    *,
    names: Sequence[tuple[str, str]],
    kind: str | None = None,
    slots: int | None = None,
    pairs: str = "halves",
    rounding: bool = False,
) -> dict[str, Tensor]:
    """New arrays of an engine, by name, contiguous.

    Args:
        cache: What to write.
        engine: One of ``AXES``.
        geometry: Sizes of the model's layers.
        names: Name of the keys and of the values of each layer, in order.
        kind: Dtype; ``None`` for float32 of OpenVINO, and else for what the cache has.
        slots: S, of a shared buffer; zeros behind the tokens. ``None`` for as many as tokens.
        pairs: As of ``read_arrays``.
        rounding: Whether numbers may be rounded to ``kind``.

    Raises:
        ArgumentError: the cache does not fit, has windows that hide tokens, or has a NaN.
    """
    layout = _layout(engine)
    expect_pairs_named("pairs", pairs)
    expect_layers(cache, geometry)
    if len(names) != len(cache.layers):
        raise ArgumentError(
            f"names must be two of each of {len(cache.layers)} layers, got {len(names)} pairs"
        )
    own = cache.kinds[0] if len(cache.kinds) == 1 and engine != "openvino" else "float32"
    kind = kind or (own if own in FLOATS else "float32")
    known = ("float32",) if engine == "openvino" else tuple(FLOATS)
    if kind not in known:
        raise ArgumentError(f"kind must be {' or '.join(known)} for {engine}, got {kind}")
    expect_exact(cache, kind, rounding)
    count = cache.num_tokens
    if slots is not None and slots < count:
        raise ArgumentError(f"slots must be at least {count}, got {slots}")
    made = {}
    for i, (layer, sizes, pair) in enumerate(zip(cache.layers, geometry.layers, names, strict=True)):
        if layer.keys.num_tokens != count:
            raise ArgumentError(
                f"cache must hold all {count} tokens for arrays of {engine}, got {layer.keys.num_tokens} in "
                f"layer {i}, which has a window"
            )
        for side, ((name, carried), array) in enumerate(zip(layer.sides, pair, strict=True)):
            x = floats_of(carried.load()).to(getattr(torch, kind))
            expect_finite(name, i, x)
            of_rope = side == (1 if sizes.has_latents else 0)
            if of_rope and pairs == "adjacent":
                x = to_adjacent(x, sizes.rotary)
            shape = layout.shape(B=1, S=count if slots is None else slots, H=x.shape[1], D=x.shape[2])
            made[array] = torch.zeros(shape, dtype=x.dtype)
            _tokens_of(layout, made[array])[:count] = x
    return made


def _layout(engine: str) -> CacheLayout:
    if engine not in AXES:
        raise ArgumentError(f"engine must be one of {', '.join(AXES)}, got {engine!r}")
    return AXES[engine]


def _places(
    arrays: Mapping[str, Tensor], num_layers: int, names: Sequence[tuple[str, str]] | None
) -> dict[tuple[int, int], str]:
    """Names by side and layer."""
    if names is not None:
        places = {(side, i): name for i, pair in enumerate(names) for side, name in enumerate(pair)}
    else:
        places = {}
        for name in arrays:
            if (place := side_and_layer(name)) in places:
                raise ArgumentError(
                    f"arrays must have one of each side and layer, got {places[place]} and {name}"
                )
            places[place] = name
    wanted = {(side, i) for side in (0, 1) for i in range(num_layers)}
    if places.keys() != wanted or not all(name in arrays for name in places.values()):
        raise ArgumentError(
            f"arrays must be keys and values of {num_layers} layers, got "
            f"{', '.join(sorted(arrays)) or 'none'}"
        )
    return places


def _slots(layout: CacheLayout, name: str, x: Tensor) -> int:
    return _tokens_of(layout, x, name).shape[0]


def _tokens_of(layout: CacheLayout, x: Tensor, name: str = "array") -> Tensor:
    """View ``[S, H, D]`` of an array of one row."""
    if x.ndim != 4 or x.shape[0] != 1:
        raise ArgumentError(
            f"arrays must have one row of the axes [{layout.axes}], got {name} {list(x.shape)}"
        )
    return layout.canonical(x, name=name)[0, 0, 0, :, 0, :, 0, :]


def _rows(layout: CacheLayout, name: str, x: Tensor, heads: int, dim: int, count: int) -> Tensor:
    """The first ``count`` tokens of an array, checked."""
    rows = _tokens_of(layout, x, name)
    if rows.shape[1:] != (heads, dim) or rows.shape[0] < count or count < 1:
        raise ArgumentError(
            f"arrays must have {heads} heads of {dim} and {count} tokens, got {name} {list(x.shape)}"
        )
    if dtype_name(x.dtype) not in FLOATS:
        raise ArgumentError(f"arrays must be {', '.join(FLOATS)}, got {name} of {x.dtype}")
    return rows[:count]
