"""A state of llama.cpp as a ``CarriedCache``."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvloom.carry.carried import (
    ALL,
    CarriedCache,
    CarriedLayer,
    CarriedSide,
    Vectors,
    num_held,
    own_tokens,
    part_of,
)
from kvloom.carry.files.bytes import Source, typed
from kvloom.carry.geometry import CacheGeometry, LayerGeometry
from kvloom.carry.llama.codes import can_be_int8, int8_of
from kvloom.carry.llama.conventions import (
    architecture_of,
    expect_rotation_said,
    kind_of_codes,
    rotation_of,
    rotation_said,
)
from kvloom.carry.llama.ggml import blocks_of
from kvloom.carry.llama.state import LlamaState, StoredRows, parse_state
from kvloom.carry.rope_pairs import to_halves
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.quant.rotation import rotate


def read_llama(
    source: Source,
    geometry: CacheGeometry,
    *,
    pairs: str | None = None,
    rotated: bool | None = None,
    tokens: Sequence[int] | None = None,
) -> CarriedCache:
    """The cache in a state of llama.cpp, or in a file of a sequence or a context.

    Only headers are read at once; numbers are read, layer by layer, when they are asked for.

    Args:
        source: A path, or bytes as of ``llama_state_seq_get_data``.
        geometry: Sizes of the model's layers.
        pairs: Order of RoPE's pairs in the keys, one of ``PAIRS``; ``None`` for that of the architecture.
        rotated: Whether codes are rotated; must be given for codes of heads of a multiple of 64 unless the
            source says it, as those of llama.cpp 0.6.0 do.
        tokens: Ids of the tokens that are held; ``None`` for those of the file, if it has some.

    Raises:
        ArgumentError: the source is damaged or of another model, its positions are not 0 to T - 1, a window
            lacks tokens, or tokens are others.
        UnsupportedError: elements have a type that is not carried.
        OSError: the file cannot be read.
    """
    found = architecture_of(geometry.architecture, pairs)
    has_latents = any(x.has_latents for x in geometry.layers)
    state = parse_state(source, has_values=not has_latents)
    if state.architecture and found.name not in ("", state.architecture):
        raise ArgumentError(f"source must be of architecture {found.name}, got {state.architecture!r}")
    groups = layer_groups(geometry)
    if len(state.caches) != len(groups):
        raise ArgumentError(
            f"source must have {len(groups)} caches for layers of this model, got {len(state.caches)}"
        )
    rows = [x for cache in state.caches for x in (*cache.keys, *cache.values)]
    has_codes = any(x.type.dtype is None for x in rows)
    if has_codes and has_latents:
        raise UnsupportedError(f"source must have latents in floats, got {rows[0].type.name}")
    dims = [dim for x in geometry.layers for dim in (x.key_dim, x.value_dim)]
    how = _How(
        found.pairs == "adjacent", expect_rotation_said(_rotated(state, geometry, rotated), has_codes, dims)
    )
    num_tokens = max(int(cache.positions.max()) for cache in state.caches) + 1
    layers = dict[int, CarriedLayer]()
    for numbers, cache in zip(groups, state.caches, strict=True):
        own = [geometry.layers[i] for i in numbers]
        if len(cache.keys) != len(numbers):
            raise ArgumentError(
                f"source must have {len(numbers)} layers {_name_of(own[0])}, got {len(cache.keys)}"
            )
        cells = _cells(cache.positions, num_tokens, own[0].window)
        for i, layer, keys, values in zip(numbers, own, cache.keys, cache.values or cache.keys, strict=True):
            layers[i] = _layer(i, layer, keys, values, cells, how)
    ids = _tokens(state, tokens, num_tokens)
    return CarriedCache(tuple(x for _, x in sorted(layers.items())), num_tokens, ids, _said(state))


def _rotated(state: LlamaState, geometry: CacheGeometry, given: bool | None) -> bool | None:
    """Whether codes are rotated, as the caller or the state says."""
    rows = state.caches[0]
    are_codes = rows.keys[0].type.dtype is None, bool(rows.values) and rows.values[0].type.dtype is None
    dims = geometry.layers[0].key_dim, geometry.layers[0].value_dim
    said = rotation_said([x.rotations for x in state.caches], are_codes, dims)
    if given is not None and said is not None and given != said:
        raise ArgumentError(f"rotated must be {said}, as the source says, got {given}")
    return given if said is None else said


def layer_groups(geometry: CacheGeometry) -> list[list[int]]:
    """Numbers of the layers in each cache of a state: those that see all tokens, then those with a window."""
    full = [i for i, x in enumerate(geometry.layers) if x.window is None]
    windowed = [i for i, x in enumerate(geometry.layers) if x.window is not None]
    return [x for x in (full, windowed) if x]


class _How(NamedTuple):
    """How keys and codes are kept: adjacent pairs, and rotated codes."""

    is_adjacent: bool
    rotated: bool


def _name_of(layer: LayerGeometry) -> str:
    return "that see all tokens" if layer.window is None else f"with a window of {layer.window}"


def _cells(positions: Tensor, num_tokens: int, window: int | None) -> Tensor | slice:
    """Cells of the tokens that a layer holds, in order of positions."""
    ordered, cells = positions.sort()
    first, count = int(ordered[0]), len(ordered)
    if first < 0 or not torch.equal(ordered, torch.arange(first, first + count, dtype=torch.int32)):
        raise ArgumentError(
            f"source must have each position once, got {count:,} from {first:,} to {int(ordered[-1]):,}"
        )
    if first + count != num_tokens:
        raise ArgumentError(
            f"source must have the same last position in each cache, {num_tokens - 1:,}, got "
            f"{first + count - 1:,}"
        )
    wanted = num_held(num_tokens, window)
    if count < wanted:
        raise ArgumentError(
            f"source must have positions {num_tokens - wanted:,} to {num_tokens - 1:,}, got those from "
            f"{first:,} on: keys carry their positions"
        )
    if torch.equal(positions, ordered):
        return slice(count - wanted, count)
    return cells[count - wanted :]


def _layer(
    number: int,
    layer: LayerGeometry,
    keys: StoredRows,
    values: StoredRows,
    cells: Tensor | slice,
    how: _How,
) -> CarriedLayer:
    if layer.has_latents:
        _expect_elements(f"keys of layer {number}", keys, layer.key_dim + layer.value_dim)
        load = partial(_latents, keys, cells, layer.key_dim)
        latents, rope = (
            CarriedSide.of_adjacent(_count(cells), 1, dim, keys.type.kind, partial(load, side), rotary)
            for side, (dim, rotary) in enumerate(
                ((layer.key_dim, 0), (layer.value_dim, layer.rotary if how.is_adjacent else 0))
            )
        )
        return CarriedLayer(latents, rope, layer.window, has_latents=True)
    _expect_elements(f"keys of layer {number}", keys, layer.heads * layer.key_dim)
    _expect_elements(f"values of layer {number}", values, layer.heads * layer.value_dim)
    rotary = layer.rotary if how.is_adjacent else 0
    return CarriedLayer(
        _side(keys, cells, layer.heads, layer.key_dim, rotary, how, is_keys=True),
        _side(values, cells, layer.heads, layer.value_dim, 0, how, is_keys=False),
        layer.window,
    )


def _side(
    rows: StoredRows, cells: Tensor | slice, heads: int, dim: int, rotary: int, how: _How, *, is_keys: bool
) -> CarriedSide:
    count = _count(cells)
    if rows.type.dtype is not None:
        load = partial(_head_floats, rows, cells, heads)
        return CarriedSide.of_adjacent(count, heads, dim, rows.type.kind, load, rotary)
    rotation = rotation_of(dim, is_keys) if how.rotated else 0
    codes = partial(_codes, rows, cells, heads, rotary, rotation)
    return CarriedSide(count, heads, dim, kind_of_codes(rows.type.name, how.rotated, dim), codes)


def _count(cells: Tensor | slice) -> int:
    return cells.stop - cells.start if isinstance(cells, slice) else len(cells)


def _expect_elements(what: str, rows: StoredRows, wanted: int) -> None:
    if rows.row_elements != wanted:
        raise ArgumentError(f"source must have {what} of {wanted} elements a token, got {rows.row_elements}")


def _floats(rows: StoredRows, cells: Tensor | slice) -> Tensor:
    """Rows of float elements ``[T, n]``."""
    if rows.type.dtype is None:
        raise UnsupportedError(f"source must have floats, got {rows.type.name}")
    if rows.is_transposed:
        return typed(rows.raw, rows.type.dtype).t()[cells]
    return typed(rows.raw[cells], rows.type.dtype)


def _head_floats(rows: StoredRows, cells: Tensor | slice, heads: int, tokens: slice = ALL) -> Tensor:
    """Head vectors of a side of floats, as they lie in the state."""
    x: Tensor = _floats(rows, part_of(cells, tokens)).unflatten(-1, (heads, -1))
    return x


def _codes(
    rows: StoredRows, cells: Tensor | slice, heads: int, rotary: int, rotation: int, tokens: slice = ALL
) -> Vectors:
    """Head vectors of a side of codes in halves; ``rotary`` is 0 where nothing is permuted."""
    codes, scales = blocks_of(rows.raw[part_of(cells, tokens)], rows.type)
    head_dim = codes.shape[-1] // heads
    if rotary in (0, head_dim) and can_be_int8(head_dim, bool(rotary), rotation):
        return int8_of(codes, scales, heads, bool(rotary), rotation)
    x = int8_of(codes, scales, 1, False, 0).floats().unflatten(-1, (heads, -1)).flatten(1, 2)
    x = rotate(x, rotation) if rotation else x
    return to_halves(x, rotary) if rotary else x


def _latents(
    rows: StoredRows, cells: Tensor | slice, latent_dim: int, side: int, tokens: slice = ALL
) -> Tensor:
    """Latents (0) or rope keys (1) ``[T, 1, D]`` of rows that have both, as they lie in the state."""
    x = _floats(rows, part_of(cells, tokens))[:, None]
    return x[..., latent_dim:] if side else x[..., :latent_dim]


def _tokens(state: LlamaState, given: Sequence[int] | None, num_tokens: int) -> tuple[int, ...] | None:
    if state.tokens and len(state.tokens) != num_tokens:
        raise ArgumentError(
            f"source must have the ids of its {num_tokens:,} tokens, got {len(state.tokens):,}"
        )
    if given is None:
        return state.tokens or None
    return own_tokens(state.tokens, given) if state.tokens else tuple(given)


def _said(state: LlamaState) -> tuple[tuple[str, str], ...]:
    return (("form", state.form), ("architecture", state.architecture))
