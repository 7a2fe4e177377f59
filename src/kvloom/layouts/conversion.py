"""Conversion of any layout to any other, in one pass, of codes and scales."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, product
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.advice import give_back
from kvloom.core.checks import expect_range
from kvloom.core.layouts import CacheLayout
from kvloom.core.memory import expect_disjoint
from kvloom.core.specs import dtype_name
from kvloom.core.views import KVView, Side
from kvloom.errors import ArgumentError, ShapeError
from kvloom.layouts.catalog import NamedLayout, find_layout
from kvloom.layouts.tensors import MAX_SHARDS, KVTensors, prefix

_PIECE: Final = 64 << 20
"""Bytes that are copied before their memory is given back."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Target of a conversion: layout, page size and shards of the keys and values of all layers.

    Attributes:
        layout: A name of ``kvloom.layouts.LAYOUTS``, or axes.
        page_size: Slots in a page (or in a row of a batch); those of the source if ``None``.
        shards: Number of parts to which the heads are distributed evenly, 1 to 8.
    """

    layout: NamedLayout | CacheLayout | str
    page_size: int | None = None
    shards: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", find_layout("layout", self.layout))
        if self.page_size is not None:
            expect_range("page_size", self.page_size, 1)
        expect_range("shards", self.shards, 1, MAX_SHARDS + 1)


class Move(NamedTuple):
    """Copy of all slots of some heads of one layer."""

    source: KVView
    target: KVView
    layer: int


def convert(source: KVTensors, target: KVTensors | Placement | NamedLayout | CacheLayout | str) -> KVTensors:
    """Copy keys, values and scales of ``source`` to another layout, bit for bit.

    Slot n of the source, ``block * page_size + offset``, becomes slot n of the target. Layers and heads keep
    their numbers in any distribution to tensors. Nothing is rounded or quantized again, and each element is
    read and written once.

    Args:
        source: Tensors to convert.
        target: Tensors to write; or a placement or layout, for which tensors are made.

    Returns:
        ``target``, or the new tensors, contiguous and on the device of ``source``.

    Raises:
        ArgumentError: the target cannot hold the source without loss; nothing was written.
        ShapeError: the tensors of ``target`` do not fit, or overlap the source; nothing was written.
    """
    if not isinstance(source, KVTensors):
        raise ArgumentError(f"source must be KVTensors, got {type(source).__name__}")
    if not isinstance(target, KVTensors):
        placement = target if isinstance(target, Placement) else Placement(find_layout("target", target))
        target = allocate(source, placement)
    copy_all(source, target)
    return target


def copy_all(
    source: KVTensors,
    target: KVTensors,
    *,
    gives_back: bool = False,
    observe: Callable[[int], None] = lambda num_layers: None,
) -> None:
    """Copy ``source`` to ``target``.

    Args:
        source: Tensors to convert.
        target: Tensors to write.
        gives_back: Whether memory of ``source`` is given back to the system once it was read: nobody reads it
            again.
        observe: Called after each layer, with the number of layers so far.

    Raises:
        ArgumentError, ShapeError: as ``convert``.
    """
    slots = torch.arange(source.num_slots, device=source.views[0][0].device)
    for layer, found in groupby(plan(source, target), lambda move: move.layer):
        moves, views = [*found], source.views[layer]
        size, num_blocks = views[0].block_size, views[0].num_blocks
        nbytes = sum(x.nbytes for view in views for x in view.tensors if x is not None)
        count = max(num_blocks * _PIECE // max(nbytes, 1), 1) if gives_back else max(num_blocks, 1)
        for first in range(0, num_blocks, count):
            for move in moves:
                piece = slots[first * size : (first + count) * size]
                ops.copy(move.source, piece, move.target, piece)
            for view in views if gives_back else ():
                give_back(*(x[first : first + count] for x in view.tensors if x is not None))
        observe(layer + 1)


def plan(source: KVTensors, target: KVTensors) -> list[Move]:
    """Copies that convert ``source`` to ``target``: one for each layer and pair of overlapping shards.

    Raises:
        ArgumentError, ShapeError: as ``convert``.
    """
    for what, wanted, has in (
        ("layers", len(source.views), len(target.views)),
        ("heads", source.heads, target.heads),
        ("slots", source.num_slots, target.num_slots),
        ("device", source.views[0][0].device, target.views[0][0].device),
    ):
        if has != wanted:
            raise ShapeError(f"target must have the {what} of source, {wanted}, got {has}")
    for (name, x), (other, y) in product(target.tensors.items(), source.tensors.items()):
        expect_disjoint(f"target's {name}", x, f"source's {other}", y)
    moves: list[Move] = []
    for layer, (sources, targets) in enumerate(zip(source.views, target.views, strict=True)):
        for from_shard, to_shard in product(sources, targets):
            _expect_same_elements(layer, from_shard, to_shard)
        moves += _between_shards(layer, sources, targets)
    return moves


def _between_shards(layer: int, sources: tuple[KVView, ...], targets: tuple[KVView, ...]) -> Iterator[Move]:
    of_source, of_target = sources[0].num_heads, targets[0].num_heads
    for s, x in enumerate(sources):
        for t, y in enumerate(targets):
            first = max(s * of_source, t * of_target)
            count = min((s + 1) * of_source, (t + 1) * of_target) - first
            if count > 0:
                parts = _heads(x, first - s * of_source, count), _heads(y, first - t * of_target, count)
                yield Move(*parts, layer)


def _heads(view: KVView, first: int, count: int) -> KVView:
    """View of ``count`` heads of ``view``."""
    if count == view.num_heads:
        return view

    def narrow(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.narrow(3, first, count)

    sides = [Side(side.cache.narrow(3, first, count), narrow(side.scale)) for side in view.sides]
    return KVView(sides[0], sides[1] if len(sides) > 1 else None)


def _expect_same_elements(layer: int, source: KVView, target: KVView) -> None:
    for name, x, y in zip(
        ("key", "value"), (source.key, source.value), (target.key, target.value), strict=True
    ):
        if (has := _elements(y)) != (wanted := _elements(x)):
            raise ShapeError(
                f"each {name} in layer {layer} of target must have {wanted}, as in source, got {has}"
            )


def _elements(side: Side | None) -> str:
    if side is None:
        return "nothing"
    text = f"{side.cache.shape[-2:].numel()} {dtype_name(side.cache.dtype)}"
    if side.scale is not None:
        scales = side.scale.shape[-2:].numel()
        text += f" with {scales} {dtype_name(side.scale.dtype)} scales"
    return text


def allocate(source: KVTensors, placement: Placement) -> KVTensors:
    """Allocate tensors for ``source``."""
    layout = find_layout("layout", placement.layout)
    first = source.views[0][0]
    names = layout.of("key", 1).names
    page_size = placement.page_size or source.page_size
    if "T" in names and placement.page_size is not None:
        raise ArgumentError(f"page_size must be None for layout {layout.name!r}, which has no pages")
    if "T" not in names and page_size is None:
        raise ArgumentError(f"page_size must be given for layout {layout.name!r}: the source has no pages")
    if "T" not in names and page_size is not None and source.num_slots % page_size:
        raise ArgumentError(
            f"page_size must divide the {source.num_slots} slots of source, so that the last page is full, "
            f"got {page_size}"
        )
    num_heads = source.heads or first.num_heads
    if num_heads % placement.shards:
        raise ArgumentError(f"shards must divide the {num_heads} heads of source, got {placement.shards}")
    heads = num_heads // placement.shards
    num_layers = len(source.views)
    together = num_layers if "L" in names else 1  # number of layers in one tensor
    if together > 1:
        for layer, views in enumerate(source.views):
            if [*map(_elements, views[0].sides)] != [*map(_elements, first.sides)]:
                raise ArgumentError(
                    f"target {layout.name!r} holds all layers in one tensor, so they must be alike: layer "
                    f"{layer} has {_elements(views[0].key)}, layer 0 {_elements(first.key)}"
                )
    tensors: dict[str, Tensor] = {}
    for layer in range(num_layers // together):
        for shard in range(placement.shards):
            front = prefix(layer, shard, num_layers // together, placement.shards)
            sizes = {"L": together, "H": heads, "T": source.num_slots}
            if page_size is not None:
                sizes |= {"B": source.num_slots // page_size, "S": page_size}
            for name, side in _roles(layout, source.views[layer][0]).items():
                axes = layout.of(name, side.cache.itemsize)
                tensors[front + name] = _empty(axes, sizes, side.cache)
                if side.scale is not None:
                    scale = "scale" if name == "cache" else f"{name}_scale"
                    tensors[front + scale] = _empty(axes.for_scale(), sizes, side.scale)
    return KVTensors(tensors, layout, source.heads)


def _roles(layout: NamedLayout, view: KVView) -> dict[str, Side]:
    """Names of the tensors to make for a layer, each with a side as model of its elements."""
    if not layout.is_joint:
        return {"key": view.key} if view.value is None else {"key": view.key, "value": view.value}
    key, value = _elements(view.key), _elements(view.value)
    if key != value:
        raise ArgumentError(
            f"target {layout.name!r} holds keys and values in one tensor, so they must be alike: a key has "
            f"{key}, a value {value}"
        )
    return {"cache": view.key}


def _empty(layout: CacheLayout, sizes: dict[str, int], like: Tensor) -> Tensor:
    """Allocate a tensor for elements ``like`` these, ``[B, S/s, s, H, D/d, d]``."""
    shape = layout.shape(**sizes, D=like.shape[-2:].numel())
    return torch.empty(shape, dtype=like.dtype, device=like.device)
