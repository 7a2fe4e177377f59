"""One layer's keys and values as canonical strided views: what every kernel reads and writes."""

from dataclasses import InitVar, dataclass, field
from itertools import product

import torch
from torch import Tensor

from kvloom.core.checks import FLOAT_DTYPES, expect, expect_tensor
from kvloom.core.layouts import CacheLayout
from kvloom.core.memory import overlaps_itself, shares_memory
from kvloom.core.specs import CODE_DTYPE
from kvloom.errors import ArgumentError, ShapeError

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEXABLE = {*FLOAT_DTYPES, *_INTEGER.values(), torch.uint8, torch.bool}
_BITS_OF_CODES = {dtype: bits for bits, dtype in CODE_DTYPE.items()}


@dataclass(frozen=True, slots=True, eq=False)
class KVView:
    """Keys and values of one layer, and their scales, each ``[B, S/s, s, H, D/d, d]`` with any strides.

    The tensors are views: writing through them writes the cache they were made from. A side with a scale is
    quantized, to 8 bits if its cache is int8 and to 4 if it is uint8; its group is D divided by the scale's
    last axis. Keys and values may differ in head dim, dtype and bits. ``value`` is ``None`` in a cache of
    keys only.

    Make one with ``joint`` or ``split``.
    """

    key: Tensor
    value: Tensor | None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    sides_are_apart: InitVar[bool] = False
    """Whether keys are known to share no memory with values, nor their scales; looked for otherwise."""
    is_writable: bool = field(init=False, repr=False)
    """Whether no two elements share memory, and none requires a gradient."""

    def __post_init__(self, sides_are_apart: bool) -> None:
        _expect_canonical("key", self.key, self.key_scale, self.key)
        if self.value is not None:
            _expect_canonical("value", self.value, self.value_scale, self.key)
        elif self.value_scale is not None:
            raise ArgumentError("value_scale must be None where value is None")
        written = [x for x in (self.key, self.value, self.key_scale, self.value_scale) if x is not None]
        is_writable = not any(x.requires_grad or overlaps_itself(x) for x in written)
        object.__setattr__(self, "is_writable", is_writable and self._is_apart(sides_are_apart))

    def _is_apart(self, sides_are_apart: bool) -> bool:
        """Whether no two of the tensors share memory."""
        caches, scales = (self.key, self.value), (self.key_scale, self.value_scale)
        pairs = [*product(caches, scales), *(() if sides_are_apart else (caches, scales))]
        return not any(x is not None and y is not None and shares_memory(x, y) for x, y in pairs)

    @classmethod
    def joint(
        cls,
        layout: CacheLayout,
        cache: Tensor,
        scale: Tensor | None = None,
        *,
        layer: int = 0,
        heads: int | None = None,
    ) -> "KVView":
        """View one layer of a cache that holds keys and values in one tensor (a layout with axis ``2``).

        Args:
            layout: Axis order of ``cache``; that of ``scale`` follows from it.
            cache: Keys and values.
            scale: Their scales, ``None`` if the cache is not quantized.
            layer: Index on axis L.
            heads: Extent of H, needed only where H shares a dimension with D.

        Raises:
            ShapeError: ``cache`` or ``scale`` does not fit ``layout``, or they do not fit each other.
            ArgumentError: ``layer`` is out of range, or ``layout`` has no axis ``2``.
        """
        if "2" not in layout.names:
            raise ArgumentError(
                f"layout must have the axis 2 (use KVView.split otherwise), got {layout.axes!r}"
            )
        sides = _side(layout, cache, scale, layer, heads, "cache", "scale")
        (key, key_scale), (value, value_scale) = sides
        # Parts of one tensor that does not overlap itself are apart, however they are interleaved.
        apart = not (overlaps_itself(cache) or (scale is not None and overlaps_itself(scale)))
        return cls(key, value, key_scale, value_scale, sides_are_apart=apart)

    @classmethod
    def split(
        cls,
        layout: CacheLayout,
        key: Tensor,
        value: Tensor | None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        *,
        layer: int = 0,
        heads: int | None = None,
        value_layout: CacheLayout | None = None,
    ) -> "KVView":
        """View one layer of a cache that holds keys and values in two tensors (a layout without ``2``).

        Args:
            layout: Axis order of ``key``; that of ``key_scale`` follows from it.
            key: Keys.
            value: Values; ``None`` in a cache of keys only.
            key_scale: Scales of the keys, ``None`` if they are not quantized.
            value_scale: Scales of the values.
            layer: Index on axis L.
            heads: Extent of H, needed only where H shares a dimension with D.
            value_layout: Axis order of ``value``, ``layout`` if ``None``.

        Raises: as ``joint``; also if the two sides differ in blocks, slots or heads.
        """
        value_layout = layout if value_layout is None else value_layout
        for name, given in (("layout", layout), ("value_layout", value_layout)):
            if "2" in given.names:
                raise ArgumentError(f"{name} must not have the axis 2 (use KVView.joint), got {given.axes!r}")
        ((k, ks),) = _side(layout, key, key_scale, layer, heads, "key", "key_scale")
        if value is None:
            if value_scale is not None:
                raise ArgumentError("value_scale must be None where value is None")
            return cls(k, None, ks, None)
        ((v, vs),) = _side(value_layout, value, value_scale, layer, heads, "value", "value_scale")
        slots = (k.shape[0], k.shape[1] * k.shape[2], k.shape[3])
        if slots != (v.shape[0], v.shape[1] * v.shape[2], v.shape[3]) or k.device != v.device:
            raise ShapeError(
                f"value must have key's blocks, slots, heads and device: {list(key.shape)} on {key.device}, "
                f"got {list(value.shape)} on {value.device}"
            )
        return cls(k, v, ks, vs)

    @property
    def num_slots(self) -> int:
        """Token slots in all blocks; slot ``b * block_size + s`` is slot s of block b."""
        return self.key.shape[0] * self.block_size

    @property
    def block_size(self) -> int:
        """Token slots in one block."""
        return self.key.shape[1] * self.key.shape[2]

    @property
    def num_heads(self) -> int:
        """Key/value heads."""
        return self.key.shape[3]

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.key.device


def raw(x: Tensor) -> Tensor:
    """``x`` as signed integers of its own width, a view: torch indexes and selects those for every dtype."""
    return x if x.dtype in _INDEXABLE else x.view(_INTEGER[x.itemsize])


def bits_of(cache: Tensor, scale: Tensor | None) -> int:
    """0 if not quantized, else the bits of a code."""
    return 0 if scale is None else _BITS_OF_CODES[cache.dtype]


def head_dim_of(cache: Tensor, scale: Tensor | None) -> int:
    """Elements in a head vector of a canonical view (a byte of an int4 cache holds two)."""
    stored = cache.shape[-2] * cache.shape[-1]
    return 2 * stored if bits_of(cache, scale) == 4 else stored


def _expect_canonical(name: str, cache: Tensor, scale: Tensor | None, key: Tensor) -> None:
    """Check one side of a view, whose slots, heads and device are those of ``key``."""
    expect_tensor("key", key)
    expect(name, cache, "B S/s s H D/d d", device=key.device)
    if scale is not None:
        expect(f"{name}_scale", scale, "B S/s s H D/d d", device=key.device)
    slots = (cache.shape[:3].numel(), cache.shape[3])
    if slots != (key.shape[:3].numel(), key.shape[3]):
        raise ShapeError(f"{name} must have key's slots and heads {list(key.shape)}, got {list(cache.shape)}")
    if scale is None:
        return
    if cache.dtype not in _BITS_OF_CODES or scale.dtype not in FLOAT_DTYPES:
        raise ShapeError(
            f"{name} must be int8 or (4 bits) uint8 with scales of floats, got {cache.dtype} with "
            f"{scale.dtype}"
        )
    groups = scale.shape[4:].numel()
    if scale.shape[:4] != cache.shape[:4] or groups == 0 or head_dim_of(cache, scale) % groups:
        raise ShapeError(
            f"{name}_scale must have the axes of {name} {list(cache.shape)} with groups last, "
            f"got {list(scale.shape)}"
        )


def _side(
    layout: CacheLayout,
    cache: Tensor,
    scale: Tensor | None,
    layer: int,
    heads: int | None,
    name: str,
    scale_name: str,
) -> list[tuple[Tensor, Tensor | None]]:
    """Canonical views of layer ``layer``, one (cache, scale) pair for each index of axis ``2``."""
    caches = layout.canonical(cache, name=name, heads=heads)
    layers, sides = caches.shape[:2]
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
        raise ArgumentError(f"layer_idx must be in [0, {layers}), got {layer!r}")
    if scale is None:
        return [(caches[layer, side], None) for side in range(sides)]
    if cache.dtype not in _BITS_OF_CODES:
        raise ShapeError(f"{name} must be int8 or (4 bits) uint8 where it has a scale, got {cache.dtype}")
    if scale.dtype not in FLOAT_DTYPES:
        raise ShapeError(f"{scale_name} must be one of {FLOAT_DTYPES}, got {scale.dtype}")
    if scale.device != cache.device:
        raise ShapeError(f"{scale_name} must be on {cache.device} as {name}, got {scale.device}")
    scales = layout.for_scale().canonical(scale, name=scale_name, heads=heads)
    head_dim = head_dim_of(caches, scale)
    groups = scales.shape[-1] * scales.shape[-2]
    if scales.shape[:6] != caches.shape[:6] or groups == 0 or head_dim % groups:
        raise ShapeError(
            f"{scale_name} must have the axes of {name} {list(cache.shape)} with D / group last, "
            f"got {list(scale.shape)}"
        )
    if _BITS_OF_CODES[cache.dtype] == 4 and head_dim // groups % 2:
        raise ShapeError(f"{scale_name} must have an even group for 4 bits, got {head_dim // groups}")
    return [(caches[layer, side], scales[layer, side]) for side in range(sides)]
