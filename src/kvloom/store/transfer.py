"""Conversion of a pool's pages to the bytes of a run and back, for any layout and page size, codes unchanged.

Shapes: N pages of S tokens, R heads that can be read one by one, H heads of a layer, D head dim.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.rows.pages import Pages
from kvloom.caches.tensors.storage import Storage
from kvloom.core.entries import Entry
from kvloom.core.views import KVView, Side
from kvloom.ops import KeySmoothing
from kvloom.store.fingerprint import Fingerprint, rotation_in
from kvloom.store.format import page_bytes, part_bytes
from kvloom.store.tiers.tier import ReadPages


def entries_of(storages: Mapping[int, Storage]) -> tuple[Entry, ...]:
    """Entry of a token in each layer."""
    return tuple(storage.entry for _, storage in sorted(storages.items()))


layers_of = entries_of
"""The earlier name."""


def rotation_of(storages: Mapping[int, Storage]) -> str:
    """``rotation_in`` of ``entries_of``."""
    return rotation_in(entries_of(storages))


def smoothing_digest(storages: Mapping[int, Storage]) -> str:
    """Digest of the smoothing of each layer's keys; empty if none are smoothed."""
    return digest_of([x.smoothing for _, x in sorted(storages.items())])


def digest_of(found: Sequence[KeySmoothing | None]) -> str:
    """Digest of the smoothing of all layers in order; empty if there is none."""
    if not any(x is not None for x in found):
        return ""
    text = " ".join("none" if x is None else x.digest for x in found)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def pack_pages(
    pages: Pages, ids: Sequence[int], fingerprint: Fingerprint, num_tokens: int | None = None
) -> bytearray:
    """Copy pages to bytes: R * N pages of ``page_bytes``, heads outermost.

    Args:
        pages: Pages of the pool.
        ids: Ids of the pages to copy.
        fingerprint: Model and format of the keys and values.
        num_tokens: Number of first tokens of one page, each copied as a page of one token; ``None`` for whole
            pages.
    """
    size, count = (pages.format.page_size, len(ids)) if num_tokens is None else (1, num_tokens)
    layers = [(view, slots[: size * count]) for view, slots in _slots(pages, ids)]
    return pack_slots(layers, fingerprint, size, count)


def pack_slots(
    layers: Sequence[tuple[KVView, Tensor]], fingerprint: Fingerprint, page_size: int, num_pages: int
) -> bytearray:
    """``pack_pages``, given the view of each layer, and in it the N * S slots of the tokens."""
    packed = bytearray(fingerprint.num_heads * num_pages * page_bytes(fingerprint, page_size))
    data, form = torch.frombuffer(packed, dtype=torch.uint8), (fingerprint, page_size, num_pages)
    devices = list(dict.fromkeys(view.device for view, _ in layers))
    for device in devices:
        there = data if device.type == "cpu" else torch.zeros(len(data), dtype=torch.uint8, device=device)
        tokens = torch.arange(num_pages * page_size, device=device)
        for (view, slots), target in zip(layers, views(there, *form), strict=True):
            if view.device == device:
                ops.copy(view, slots.to(device), target, tokens)
        if there is not data:  # waits for the device; bytes of layers elsewhere are zeros
            data.copy_(there) if len(devices) == 1 else data.bitwise_or_(there.cpu())
    return packed


def unpack_pages(piece: ReadPages, tokens: range, pages: Pages, ids: Sequence[int], start: int) -> None:
    """Write tokens of pages that were read to pages of a pool.

    Args:
        piece: Pages of all heads.
        tokens: Tokens of the piece to write.
        pages: Pages of the pool.
        ids: Ids of the target pages, in order.
        start: Token slot, within ``ids``, of the first token.
    """
    source, size = torch.arange(tokens.start, tokens.stop), pages.format.page_size
    first, end = start // size, -(-(start + len(tokens)) // size)
    own = slice(start - first * size, start - first * size + len(tokens))
    layers = [(source, view, slots[own]) for view, slots in _slots(pages, ids[first:end])]
    unpack_slots(piece, piece.run.fingerprint, layers)


def unpack_slots(
    piece: ReadPages, fingerprint: Fingerprint, layers: Sequence[tuple[Tensor, KVView, Tensor]]
) -> None:
    """``unpack_pages``, given for each layer tokens of the piece, the view to write, and the slots in it.

    ``fingerprint`` is that of the heads that were read.
    """
    data, form = tensor_of(piece.data), (fingerprint, piece.run.page_size, len(piece.segment.pages))
    for device in dict.fromkeys(view.device for _, view, _ in layers):
        sources = views(data.to(device), *form)
        for source, (tokens, view, slots) in zip(sources, layers, strict=True):
            if view.device == device:
                ops.copy(source, tokens.to(device), view, slots.to(device))


def tensor_of(data: memoryview) -> Tensor:
    """``[n]`` uint8 over bytes that are read and not written.

    torch warns of memory that is read-only. It gets the ``bytearray`` that a view is all of, or else a copy.
    """
    if data.readonly:
        whole = data.obj if isinstance(data.obj, bytearray) else b""
        data = memoryview(whole if len(whole) == len(data) else bytearray(data))
    return torch.frombuffer(data, dtype=torch.uint8)


def views(data: Tensor, fingerprint: Fingerprint, page_size: int, num_pages: int) -> Iterator[KVView]:
    """View of each layer in packed pages."""
    row, at = num_pages * page_bytes(fingerprint, page_size), 0
    for layer in fingerprint.layers:
        vectors = layer.heads // fingerprint.num_heads * page_size
        sides = []
        for side in layer.sides:
            tensors = []
            for part in side.parts:
                # If R is 1, a part has all heads of a layer.
                head = row if fingerprint.num_heads > 1 else page_size * part.nbytes
                shape = (num_pages, page_size, 1, layer.heads, 1, part.width)
                strides = (row // num_pages, part.nbytes, part.nbytes, head, part.nbytes, part.itemsize)
                typed = data.view(getattr(torch, part.dtype))
                elements = [stride // part.itemsize for stride in strides]
                tensors.append(typed.as_strided(shape, elements, at // part.itemsize))
                at += part_bytes(part, vectors)
            sides.append(Side(*tensors))
        yield KVView(sides[0], sides[1] if len(sides) > 1 else None, (data,))


def _slots(pages: Pages, ids: Sequence[int]) -> Iterator[tuple[KVView, Tensor]]:
    """View of each layer, and in it the slots of the tokens of some pages."""
    found: dict[tuple[int, int], Tensor] = {}  # most layers have the same
    for _, x in sorted(pages.storages.items()):
        form = x.page_size, x.stride
        if form not in found:
            found[form] = pages.slots(ids, x)
        yield x.view, found[form]
