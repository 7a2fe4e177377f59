"""Residual tokens in a store: runs with pages of one token, under a fingerprint of their own.

Shapes: N tokens in front of an end, H heads of a layer, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.residual import ResidualTokens
from kvloom.caches.storage import Storage
from kvloom.core.specs import dtype_name
from kvloom.store.fingerprint import Fingerprint, LayerFormat, SideFormat
from kvloom.store.format import page_bytes
from kvloom.store.tier import Piece
from kvloom.store.transfer import views

_ATTENTION: Final = "residual tokens of "


def residual_fingerprint(fingerprint: Fingerprint, storages: Mapping[int, Storage]) -> Fingerprint:
    """Whose residual tokens: those of a cache with this fingerprint, in the layers that keep codes.

    Args:
        fingerprint: Of the codes, with a residual window.
        storages: Of each layer.
    """
    layers = []
    for index in coded_layers(storages):
        key, value = (SideFormat(spec.head_dim, fingerprint.dtype) for spec in storages[index].specs)
        layers.append(LayerFormat(storages[index].specs[0].heads, key, value))
    attention = _ATTENTION + fingerprint.digest.hex()
    return replace(fingerprint, attention=attention, rotation="none", layers=tuple(layers), recent=0)


def coded_layers(storages: Mapping[int, Storage]) -> list[int]:
    """The layers that keep codes, and residual tokens beside them."""
    return [index for index, storage in sorted(storages.items()) if storage.has_codes]


def pack_residual(tokens: ResidualTokens, fingerprint: Fingerprint) -> bytearray | None:
    """The bytes of a run; ``None`` if the tokens are of another dtype or of other layers."""
    pairs = [tokens.layers[index] for index in sorted(tokens.layers)]
    if len(pairs) != len(fingerprint.layers):
        return None
    if {dtype_name(x.dtype) for pair in pairs for x in pair} != {fingerprint.dtype}:
        return None
    count = pairs[0][0].shape[2]
    packed = bytearray(fingerprint.num_heads * count * page_bytes(fingerprint, 1))
    data = torch.frombuffer(packed, dtype=torch.uint8)
    slots = torch.arange(count)[None]
    for (key, value), view in zip(pairs, views(data, fingerprint, 1, count), strict=True):
        ops.store(key.cpu(), value.cpu(), slots, view)
    return packed


def unpack_residual(
    pieces: Sequence[Piece], first: int, end: int, storages: Mapping[int, Storage]
) -> ResidualTokens | None:
    """The tokens from ``first`` to ``end``; ``None`` if pieces one behind the other do not have them all."""
    if not pieces or pieces[0].segment.start != first or pieces[-1].segment.end != end:
        return None
    parts: list[list[tuple[Tensor, Tensor]]] = []
    for piece in pieces:
        data = torch.frombuffer(piece.data, dtype=torch.uint8, offset=piece.start)
        count = len(piece.segment.pages)
        found = views(data, piece.run.fingerprint, 1, count)
        parts.append([ops.load(torch.arange(count)[None], view) for view in found])
    layers = {}
    for index, *pairs in zip(coded_layers(storages), *parts, strict=True):
        device = storages[index].device
        key, value = (torch.cat([pair[side] for pair in pairs], 2).to(device) for side in (0, 1))
        layers[index] = key, value
    return ResidualTokens(first, layers)
