"""Tensors of a whole cache, by name: layers, shards, pages, codes and scales."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from kvloom.core.checks import expect_tensor
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError, ShapeError
from kvloom.layouts.catalog import NamedLayout, find_layout

MAX_SHARDS: Final = 8
JOINT: Final = ("cache", "scale")
SPLIT: Final = ("key", "value", "key_scale", "value_scale")
_NAME: Final = re.compile(rf"(?:layers\.(0|[1-9]\d*)\.)?(?:shards\.(\d)\.)?({'|'.join((*JOINT, *SPLIT))})")


@dataclass(frozen=True, slots=True, eq=False)
class KVTensors:
    """Keys and values of all layers in one layout.

    A tensor is named ``key`` or ``value``, or ``cache`` if it has both; its scales are ``key_scale``,
    ``value_scale`` or ``scale``. A prefix has the layer, if there are several and the layout has no axis L,
    and the shard, if there are several: ``layers.3.shards.0.key``.

    Attributes:
        tensors: Tensors by name. Quantized ones have the dtype of their codes (``kvloom.core.entries``), such
            as uint8 with two 4-bit codes in a byte; safetensors may have no name for it.
        layout: A name of ``kvloom.layouts.LAYOUTS``, or axes.
        heads: Number of key/value heads of all shards; needed only if the layout merges H with D.

    Raises:
        ArgumentError: a name is invalid, or a tensor of a layer or shard is missing.
        ShapeError: the tensors do not fit the layout, or each other.
    """

    tensors: Mapping[str, Tensor]
    layout: NamedLayout | CacheLayout | str
    heads: int | None = None
    views: tuple[tuple[KVView, ...], ...] = field(init=False, repr=False)
    """Views of each shard of each layer."""

    def __post_init__(self) -> None:
        layout = find_layout("layout", self.layout)
        parts = _by_part(self.tensors, layout)
        num_layers, num_shards = (1 + max(part[i] for part in parts) for i in (0, 1))
        missing = [prefix(layer, shard, num_layers, num_shards) for layer in range(num_layers)
                   for shard in range(num_shards) if (layer, shard) not in parts]  # fmt: skip
        if missing or num_shards > MAX_SHARDS:
            raise ArgumentError(
                f"tensors must have all layers, each in the same shards, at most {MAX_SHARDS}, "
                f"got {num_layers} layers, {num_shards} shards"
                + (f" without {missing[0]}*" if missing else "")
            )
        heads = None if self.heads is None else shard_heads("heads", self.heads, num_shards)
        held = {
            part: _views(roles, layout, heads, prefix(*part, num_layers, num_shards))
            for part, roles in parts.items()
        }
        shards = [[view for layer in range(num_layers) for view in held[layer, s]] for s in range(num_shards)]
        if len({len(views) for views in shards}) > 1:
            raise ShapeError(
                f"tensors must have the same number of layers in each shard, got {[*map(len, shards)]}"
            )
        views = tuple(zip(*shards, strict=True))
        if not views:
            raise ShapeError("tensors must have at least one layer, got an axis L of 0")
        _expect_alike([view for layer in views for view in layer])
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "views", views)
        object.__setattr__(self, "heads", views[0][0].num_heads * num_shards)

    @property
    def num_shards(self) -> int:
        """Number of shards of the heads."""
        return len(self.views[0])

    @property
    def num_slots(self) -> int:
        """Number of token slots of every layer."""
        return self.views[0][0].num_slots

    @property
    def page_size(self) -> int | None:
        """Slots in a page, or in a row of a batch; ``None`` in a layout without pages."""
        layout = find_layout("layout", self.layout)
        return self.views[0][0].block_size if "B" in layout.of("key", 1).names else None


def prefix(layer: int, shard: int, num_layers: int, num_shards: int) -> str:
    """Prefix of the names of tensors of this layer and shard."""
    return (f"layers.{layer}." if num_layers > 1 else "") + (f"shards.{shard}." if num_shards > 1 else "")


def shard_heads(name: str, heads: int, num_shards: int) -> int:
    """Number of heads of each shard.

    Raises:
        ArgumentError: ``heads``, called ``name`` in the error, cannot be distributed evenly.
    """
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1 or heads % num_shards:
        raise ArgumentError(f"{name} must be a multiple of {num_shards} shards, got {heads!r}")
    return heads // num_shards


def _by_part(tensors: Mapping[str, Tensor], layout: NamedLayout) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Tensors of each layer and shard, by the last word of their name."""
    wanted = JOINT if layout.is_joint else SPLIT
    has_layers = "L" in layout.of("key", 1).names
    parts: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, x in tensors.items():
        expect_tensor(name, x)
        match = _NAME.fullmatch(name)
        if match is None or match[3] not in wanted or (match[1] and has_layers):
            front = "[shards.N.]" if has_layers else "[layers.N.][shards.N.]"
            raise ArgumentError(
                f"tensors must be named {front} and {', '.join(wanted)} in layout {layout.name!r}, "
                f"got {name!r}"
            )
        roles = parts.setdefault((int(match[1] or 0), int(match[2] or 0)), {})
        if match[3] in roles:
            raise ArgumentError(f"tensors must have one name each, got {name!r} in two spellings")
        roles[match[3]] = x
    if not parts:
        raise ArgumentError("tensors must hold at least one, got none")
    return parts


def _views(roles: dict[str, Tensor], layout: NamedLayout, heads: int | None, front: str) -> list[KVView]:
    """Views of all layers of the tensors."""
    first = "cache" if layout.is_joint else "key"
    if first not in roles:
        raise ArgumentError(f"tensors must have {front}{first} in layout {layout.name!r}, got {[*roles]}")
    of_first = layout.of(first, roles[first].itemsize)
    num_layers = of_first.canonical(roles[first], name=front + first, heads=heads).shape[0]
    if layout.is_joint:
        return [
            KVView.joint(of_first, roles["cache"], roles.get("scale"), layer=layer, heads=heads)
            for layer in range(num_layers)
        ]
    value = roles.get("value")
    of_value = None if value is None else layout.of("value", value.itemsize)
    scales = roles.get("key_scale"), roles.get("value_scale")
    return [
        KVView.split(of_first, roles["key"], value, *scales, layer=layer, heads=heads, value_layout=of_value)
        for layer in range(num_layers)
    ]


def _expect_alike(views: Iterable[KVView]) -> None:
    sizes = {(view.num_blocks, view.block_size, view.num_heads, view.device) for view in views}
    if len(sizes) > 1:
        raise ShapeError(
            "tensors must have the same pages, slots, heads and device in every layer and shard, got "
            + " and ".join(f"{b} x {s}, {h} on {device}" for b, s, h, device in sorted(sizes, key=str))
        )
