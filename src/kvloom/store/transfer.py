"""Pages of a pool to the bytes of a run and back, from any layout and page size to any, codes as they are.

Shapes: N pages of S tokens, R heads that can be read one by one, H heads of a layer, D head dim.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.pages import Pages
from kvloom.caches.storage import Storage
from kvloom.core.specs import KVSpec, dtype_name
from kvloom.core.views import KVView, Side
from kvloom.errors import UnsupportedError
from kvloom.store.fingerprint import Fingerprint, LayerFormat, SideFormat
from kvloom.store.format import page_bytes, parts
from kvloom.store.tier import Piece


def layers_of(storages: Mapping[int, Storage]) -> tuple[LayerFormat, ...]:
    """How each layer keeps its tokens."""
    formats = []
    for _, storage in sorted(storages.items()):
        key, value = storage.specs
        formats.append(LayerFormat(key.heads, side_of(key), side_of(value)))
    return tuple(formats)


def rotation_of(storages: Mapping[int, Storage]) -> str:
    """Which of keys and values are rotated in every layer that has codes of them, one of ``ROTATIONS``.

    Raises:
        UnsupportedError: layers differ.
    """
    found = []
    for side, name in enumerate(("keys", "values")):
        quants = (storage.specs[side].quant for storage in storages.values())
        rotated = {quant.rotated for quant in quants if quant is not None}
        if len(rotated) > 1:
            raise UnsupportedError(f"{name} must be rotated in every layer or in none to be stored, got both")
        found += [name] if rotated == {True} else []
    return "both" if len(found) == 2 else found[0] if found else "none"


def pack(pages: Pages, ids: Sequence[int], fingerprint: Fingerprint) -> bytearray:
    """A copy of some pages: R * N pages of ``page_bytes``, heads outermost."""
    size = pages.format.page_size
    packed = bytearray(fingerprint.num_heads * len(ids) * page_bytes(fingerprint, size))
    data = torch.frombuffer(packed, dtype=torch.uint8)
    device = next(iter(pages.storages.values())).device
    moved = data if device.type == "cpu" else data.to(device)
    for (_, storage), view in zip(
        sorted(pages.storages.items()), views(moved, fingerprint, size, len(ids)), strict=True
    ):
        slots = pages.slots(ids, storage).to(device)
        ops.copy(storage.view, slots, view, torch.arange(len(slots), device=device))
    if moved is not data:
        data.copy_(moved)
    return packed


def unpack(piece: Piece, tokens: range, pages: Pages, ids: Sequence[int], start: int) -> None:
    """Write tokens of pages that were read to pages of a pool.

    Args:
        piece: Pages of all heads.
        tokens: Which of their tokens.
        pages: Where to.
        ids: Its pages, in order.
        start: Token slot of ``ids`` that the first token takes.
    """
    run, num_pages = piece.run, len(piece.segment.pages)
    data = torch.frombuffer(piece.data, dtype=torch.uint8, offset=piece.start)
    device = next(iter(pages.storages.values())).device
    source = torch.arange(tokens.start, tokens.stop, device=device)
    packed = views(data.to(device), run.fingerprint, run.page_size, num_pages)
    for (_, storage), view in zip(sorted(pages.storages.items()), packed, strict=True):
        slots = pages.slots(ids, storage)[start : start + len(tokens)].to(device)
        ops.copy(view, source, storage.view, slots)


def views(data: Tensor, fingerprint: Fingerprint, page_size: int, num_pages: int) -> Iterator[KVView]:
    """Each layer of packed pages."""
    row, at = num_pages * page_bytes(fingerprint, page_size), 0
    tensors = []
    # A layer has as many heads in a part as R does not tell apart.
    heads = [
        layer.heads for layer in fingerprint.layers for side in (layer.key, layer.value) for _ in side.parts
    ]
    for (dtype, item, width, nbytes), count in zip(parts(fingerprint, page_size), heads, strict=True):
        head = row if fingerprint.num_heads > 1 else page_size * width * item
        shape = (num_pages, page_size, 1, count, 1, width)
        strides = (row // num_pages // item, width, width, head // item, width, 1)
        tensors.append(data.view(getattr(torch, dtype)).as_strided(shape, strides, at // item))
        at += nbytes
    found = iter(tensors)
    for layer in fingerprint.layers:
        key, value = (
            Side(next(found), next(found) if side.bits else None) for side in (layer.key, layer.value)
        )
        yield KVView(key, value)


def side_of(spec: KVSpec) -> SideFormat:
    """How keys or values of one layer are kept."""
    name = dtype_name(spec.dtype)
    if spec.quant is None:
        return SideFormat(spec.head_dim, name)
    scale = dtype_name(spec.quant.scale_dtype)
    return SideFormat(spec.head_dim, name, spec.quant.bits, spec.group, scale)
