"""Arrays by the names of exported models in a safetensors file, which ``kvloom store convert`` reads, too.

The file has ``past_key_values.{layer}.key`` and ``.value``, ``[1, H, T, D]``, and ``input_ids`` ``[1, T]`` if
the tokens are known.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kvloom.carry.arrays import read_arrays
from kvloom.carry.carried import CarriedCache, CarriedSide, expect_exact, own_tokens
from kvloom.carry.files.bytes import Source, bytes_of
from kvloom.carry.files.tensor_file import FLOAT_NAMES, TensorToWrite, read_tensors, write_tensors
from kvloom.carry.files.writing import RoomFor, written_whole
from kvloom.carry.float_parts import float_parts
from kvloom.carry.geometry import CacheGeometry, expect_layers
from kvloom.core.entries import FLOATS
from kvloom.errors import ArgumentError, UnsupportedError

_IDS: Final = "input_ids"


def read_array_file(
    source: Source, geometry: CacheGeometry, *, tokens: Sequence[int] | None = None
) -> CarriedCache:
    """The cache in such a file; arguments and errors as of ``read_arrays``."""
    stored, _ = read_tensors(bytes_of("source", source))
    ids = stored.pop(_IDS, None)
    arrays = {name: x.load() for name, x in stored.items()}
    found = read_arrays(arrays, "onnxruntime", geometry, tokens=tokens)
    if ids is None:
        return found
    if ids.shape != (1, found.num_tokens) or ids.dtype != "I64":
        raise ArgumentError(f"source must have input_ids [1, {found.num_tokens}], got {list(ids.shape)}")
    own = own_tokens(ids.load()[0].tolist(), tokens)
    return CarriedCache(found.layers, found.num_tokens, own, found.said)


def write_array_file(
    cache: CarriedCache,
    target: str | os.PathLike[str],
    geometry: CacheGeometry,
    *,
    kind: str | None = None,
    rounding: bool = False,
) -> None:
    """Write such a file, array by array; it has its name when it is complete.

    Args:
        cache: What to write.
        target: Path of the file.
        geometry: Sizes of the model's layers.
        kind: Dtype; ``None`` for what the cache has, float32 of codes.
        rounding: Whether numbers may be rounded to ``kind``.

    Raises:
        ArgumentError: the cache does not fit, or has a NaN; nothing was written.
        UnsupportedError: a layer holds less than all tokens, which names cannot say.
        OSError: the file cannot be written.
    """
    expect_layers(cache, geometry)
    if any(x.keys.num_tokens != cache.num_tokens for x in cache.layers):
        raise UnsupportedError(
            "cache must hold all tokens in every layer for arrays, got layers with a window"
        )
    own = cache.kinds[0] if len(cache.kinds) == 1 else "float32"
    kind = kind or (own if own in FLOATS else "float32")
    if kind not in FLOAT_NAMES:
        raise ArgumentError(f"kind must be one of {', '.join(FLOAT_NAMES)}, got {kind!r}")
    expect_exact(cache, kind, rounding)
    tensors = {}
    for i, layer in enumerate(cache.layers):
        for name, side in layer.sides:
            shape = (1, side.heads, side.num_tokens, side.head_dim)
            make = partial(_parts, name, i, side, getattr(torch, kind))
            tensors[f"past_key_values.{i}.{name[:-1]}"] = TensorToWrite(FLOAT_NAMES[kind], shape, make)
    if cache.tokens is not None:
        make_ids = partial(torch.tensor, [[*cache.tokens]], dtype=torch.int64)
        tensors = {_IDS: TensorToWrite.whole("I64", (1, cache.num_tokens), make_ids), **tensors}
    with written_whole(target) as file:
        write_tensors(file, tensors, {})


def _parts(
    name: str, number: int, side: CarriedSide, dtype: torch.dtype, room: RoomFor
) -> Iterator[tuple[int, Tensor]]:
    for first, x in float_parts(name, number, side, dtype, room, by_head=True):
        yield first, x.transpose(0, 1)[None]
