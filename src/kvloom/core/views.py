"""Canonical strided views of one layer's keys and values, which every kernel reads and writes."""

from dataclasses import InitVar, dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from kvloom.core.checks import FLOAT_DTYPES, expect, expect_range
from kvloom.core.entries import OF_BITS, choice
from kvloom.core.layouts import CacheLayout, as_layout
from kvloom.core.memo import Memo
from kvloom.core.memory import overlaps_itself, reach_of, shares_memory, span_of
from kvloom.core.specs import CODE_DTYPE
from kvloom.errors import ArgumentError, ShapeError

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEXABLE = {*FLOAT_DTYPES, *_INTEGER.values(), torch.uint8, torch.bool}
_CODES = {dtype: OF_BITS[bits] for bits, dtype in CODE_DTYPE.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Keys or values of one layer, both tensors ``[B, S/s, s, H, D/d, d]`` with any strides.

    A side with a scale is quantized; the dtype of the cache tells which of ``CODES``: int8 for 8 bits, uint8
    for 4 (two to a byte). The group is D divided by the scale's last two axes.

    Raises:
        ShapeError: the tensors are no canonical views, or do not fit each other.
    """

    cache: Tensor
    scale: Tensor | None = None
    bits: int = field(init=False)
    """Bits of a code; 0 if not quantized."""
    group: int = field(init=False)
    """Number of elements that share a scale; 0 if not quantized."""
    device: torch.device = field(init=False)
    """Device of both tensors."""
    num_heads: int = field(init=False)
    """Key/value heads."""
    head_dim: int = field(init=False)
    """Elements of a head vector."""
    dtypes: tuple[torch.dtype, ...] = field(init=False, repr=False)
    """Dtypes of vectors that can be stored and loaded: the cache's own, or any float for floats and codes."""

    def __post_init__(self) -> None:
        cache, scale = self.cache, self.scale
        _expect_canonical("cache", cache)
        bits = group = 0
        head_dim = head_dim_of(cache, None)
        if scale is not None:
            _expect_canonical("scale", scale)
            _expect_scale("cache", cache, "scale", scale, (cache, scale))
            bits, head_dim = _CODES[cache.dtype].bits, head_dim_of(cache, scale)
            group = head_dim // (scale.shape[4] * scale.shape[5])
        holds_floats = scale is not None or cache.dtype in FLOAT_DTYPES
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "device", cache.device)
        object.__setattr__(self, "num_heads", cache.shape[3])
        object.__setattr__(self, "head_dim", head_dim)
        object.__setattr__(self, "dtypes", FLOAT_DTYPES if holds_floats else (cache.dtype,))

    def __repr__(self) -> str:
        """What it holds, without the elements."""
        kind = f"codes of {self.bits} bits in groups of {self.group}" if self.bits else f"{self.cache.dtype}"
        blocks, slots = self.cache.shape[0], self.cache.shape[1] * self.cache.shape[2]
        sizes = f"B={blocks}, S={slots}, H={self.num_heads}, D={self.head_dim}"
        return f"Side({sizes}, {kind}, on {self.device})"


@dataclass(frozen=True, slots=True, eq=False)
class KVView(Memo):
    """Keys and values of one layer.

    The tensors are views: writing through them writes the cache they were made from. Keys and values may
    differ in head dim, dtype and bits. ``value`` is ``None`` in a cache of keys only.

    Make one with ``joint`` or ``split``.

    Raises:
        ShapeError: the sides differ in slots, heads or device.
    """

    key: Side
    value: Side | None
    whole: InitVar[tuple[Tensor, ...]] = ()
    """Cache and scale of which both sides are disjoint parts, or one tensor that has all; empty for none."""
    is_writable: bool = field(init=False, repr=False)
    """Whether no two elements share memory, and none requires a gradient."""
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] = field(init=False, repr=False)
    """Caches of keys and values, then their scales: the order of the operators' arguments."""
    _reaches: tuple[tuple[Tensor, int], ...] | None = field(init=False, repr=False)
    """Tensors that contain all others, and their extents in bytes; ``None`` if made while tracing."""
    _versioned: tuple[Tensor, ...] | None = field(init=False, repr=False)
    """Tensors whose version counters autograd reads; ``None`` if made while tracing."""

    def __post_init__(self, whole: tuple[Tensor, ...]) -> None:
        key, value = self.key, self.value
        for name, side in (("key", key), ("value", value)):
            if not isinstance(side, Side) and (side is not None or name == "key"):
                raise ShapeError(f"{name} must be a Side, got {type(side).__name__}")
        if value is not None:
            wanted, has = _blocks_of(key.cache), _blocks_of(value.cache)
            if has != wanted or value.device != key.device:
                raise ShapeError(
                    f"value must have key's blocks, slots, heads and device: {wanted} on {key.device}, "
                    f"got {has} on {value.device}"
                )
        tensors = (
            key.cache,
            value.cache if value is not None else None,
            key.scale,
            value.scale if value is not None else None,
        )
        object.__setattr__(self, "tensors", tensors)
        found = [x for x in tensors if x is not None]
        reaches = versioned = None
        if not torch.compiler.is_compiling():
            reaches = tuple((x, reach_of(x)) for x in whole or found)
            versioned = tuple(x for x in found if not x.is_inference())
        object.__setattr__(self, "_reaches", reaches)
        object.__setattr__(self, "_versioned", versioned)
        is_writable = not any(x.requires_grad or overlaps_itself(x) for x in found)
        object.__setattr__(self, "is_writable", is_writable and self._is_apart(whole))

    def _is_apart(self, whole: tuple[Tensor, ...]) -> bool:
        """Whether no two of the tensors share memory."""
        caches, scales = self.tensors[:2], self.tensors[2:]
        # Disjoint parts of one tensor that does not overlap itself share nothing, even if interleaved.
        is_known = len(whole) > 0 and not any(map(overlaps_itself, whole))
        if is_known and len(whole) == 1:
            return True
        pairs = [*product(caches, scales), *(() if is_known else (caches, scales))]
        return not any(x is not None and y is not None and shares_memory(x, y) for x, y in pairs)

    def mark_changed(self) -> None:
        """Tell autograd that the tensors have changed: kernels write through pointers."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        versioned = self._versioned
        if versioned is None:
            versioned = tuple(x for x in self.tensors if x is not None and not x.is_inference())
        increment_version(versioned)

    def lies_apart_from(self, *others: Tensor) -> bool:
        """Whether all of ``others`` are before or after each tensor; False for interleaved ones."""
        if self._reaches is None:
            return False
        for other in others:
            start, end = span_of(other)
            for x, reach in self._reaches:
                first = x.data_ptr()
                if start < first + reach and first < end:
                    return False
        return True

    @classmethod
    def joint(
        cls,
        layout: CacheLayout | str,
        cache: Tensor,
        scale: Tensor | None = None,
        *,
        layer: int = 0,
        heads: int | None = None,
    ) -> "KVView":
        """View one layer of a cache that holds keys and values in one tensor (a layout with axis ``2``).

        Args:
            layout: Axis order of ``cache``, a ``CacheLayout`` or its axes; that of ``scale`` follows from it.
            cache: Keys and values.
            scale: Their scales, ``None`` if the cache is not quantized.
            layer: Index on axis L.
            heads: Extent of H, needed only where H shares a dimension with D.

        Raises:
            ShapeError: ``cache`` or ``scale`` does not fit ``layout``, or they do not fit each other.
            ArgumentError: ``layer`` is out of range, or ``layout`` has no axis ``2``.
        """
        layout = as_layout("layout", layout)
        if "2" not in layout.names:
            raise ArgumentError(
                f"layout must have the axis 2 (use KVView.split otherwise), got {layout.axes!r}"
            )
        key, value = _sides(layout, cache, scale, layer, heads, "cache", "scale")
        return cls(key, value, whole=(cache,) if scale is None else (cache, scale))

    @classmethod
    def split(
        cls,
        layout: CacheLayout | str,
        key: Tensor,
        value: Tensor | None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        *,
        layer: int = 0,
        heads: int | None = None,
        value_layout: CacheLayout | str | None = None,
    ) -> "KVView":
        """View one layer of a cache that holds keys and values in two tensors (a layout without ``2``).

        Args:
            layout: Axis order of ``key``, a ``CacheLayout`` or its axes; that of ``key_scale`` follows from
                it.
            key: Keys.
            value: Values; ``None`` in a cache of keys only.
            key_scale: Scales of the keys, ``None`` if they are not quantized.
            value_scale: Scales of the values.
            layer: Index on axis L.
            heads: Extent of H, needed only where H shares a dimension with D.
            value_layout: Axis order of ``value``, ``layout`` if ``None``.

        Raises: as ``joint``; also if the two sides differ in blocks, slots or heads.
        """
        layout = as_layout("layout", layout)
        value_layout = layout if value_layout is None else as_layout("value_layout", value_layout)
        for name, given in (("layout", layout), ("value_layout", value_layout)):
            if "2" in given.names:
                raise ArgumentError(f"{name} must not have the axis 2 (use KVView.joint), got {given.axes!r}")
        (keys,) = _sides(layout, key, key_scale, layer, heads, "key", "key_scale")
        if value is None:
            if value_scale is not None:
                raise ArgumentError("value_scale must be None where value is None")
            return cls(keys, None)
        (values,) = _sides(value_layout, value, value_scale, layer, heads, "value", "value_scale")
        return cls(keys, values)

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.key.device

    @property
    def sides(self) -> tuple[Side, ...]:
        """Keys, and values if there are any."""
        return (self.key,) if self.value is None else (self.key, self.value)

    @property
    def num_slots(self) -> int:
        """Token slots in all blocks; slot ``b * block_size + s`` is slot s of block b."""
        return self.num_blocks * self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks: pages, or rows of a batch; 1 in a layout with T."""
        return self.key.cache.shape[0]

    @property
    def block_size(self) -> int:
        """Token slots in one block."""
        return self.key.cache.shape[1] * self.key.cache.shape[2]

    @property
    def num_heads(self) -> int:
        """Key/value heads."""
        return self.key.num_heads


def sides_of(
    key_cache: Tensor, value_cache: Tensor | None, key_scale: Tensor | None, value_scale: Tensor | None
) -> tuple[Side, Side | None]:
    """Sides of keys and values, from the tensors that operators take."""
    return Side(key_cache, key_scale), None if value_cache is None else Side(value_cache, value_scale)


def raw(x: Tensor) -> Tensor:
    """View of ``x`` as signed integers of its width, which torch can index for every dtype."""
    return x if x.dtype in _INDEXABLE else x.view(_INTEGER[x.itemsize])


def detached(x: Tensor) -> Tensor:
    """``x`` without its gradient; ``x`` itself if it has none."""
    return x.detach() if x.requires_grad else x


def head_dim_of(cache: Tensor, scale: Tensor | None) -> int:
    """Number of elements of a head vector of a canonical view (a byte may hold several codes)."""
    stored = cache.shape[-2] * cache.shape[-1]
    return stored if scale is None else stored * _CODES[cache.dtype].per_byte


def slot_stride(x: Tensor) -> int | None:
    """Stride in elements between slots of a canonical view; ``None`` if it is not the same for all."""
    blocks, outer, inner = x.shape[:3]
    stride = x.stride(2) if inner > 1 else x.stride(1) if outer > 1 else x.stride(0)
    within = inner == 1 or outer == 1 or x.stride(1) == inner * stride
    across = blocks == 1 or outer * inner == 1 or x.stride(0) == outer * inner * stride
    return stride if within and across else None


def _expect_canonical(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.ndim != 6:
        expect(name, x, "B S/s s H D/d d")


def _blocks_of(x: Tensor) -> tuple[int, int, int]:
    """Numbers of blocks, of slots in a block, and of heads."""
    return x.shape[0], x.shape[1] * x.shape[2], x.shape[3]


def _expect_scale(
    name: str, cache: Tensor, scale_name: str, scale: Tensor, given: tuple[Tensor, Tensor]
) -> None:
    """Check that canonical views of a cache and its scale fit; errors show the shapes of those ``given``."""
    if cache.dtype not in _CODES:
        kinds = choice([f"{x.dtype} ({x.bits} bits)" for x in OF_BITS.values()])
        raise ShapeError(f"{name} must be {kinds} where it has a scale, got {cache.dtype}")
    if scale.dtype not in FLOAT_DTYPES:
        raise ShapeError(f"{scale_name} must be one of {FLOAT_DTYPES}, got {scale.dtype}")
    if scale.device != cache.device:
        raise ShapeError(f"{scale_name} must be on {cache.device} as {name}, got {scale.device}")
    head_dim, groups = head_dim_of(cache, scale), scale.shape[-2] * scale.shape[-1]
    if scale.shape[:-2] != cache.shape[:-2] or groups == 0 or head_dim % groups:
        raise ShapeError(
            f"{scale_name} must have the axes of {name} {list(given[0].shape)} with D / group last, "
            f"got {list(given[1].shape)}"
        )
    codes = _CODES[cache.dtype]
    if head_dim // groups % codes.per_byte:
        raise ShapeError(
            f"{scale_name} must have a group of a multiple of {codes.per_byte} for {codes.bits} bits, "
            f"got {head_dim // groups}"
        )


def _sides(
    layout: CacheLayout,
    cache: Tensor,
    scale: Tensor | None,
    layer: int,
    heads: int | None,
    name: str,
    scale_name: str,
) -> list[Side]:
    """Sides of layer ``layer``: one for each index of axis ``2``."""
    caches = layout.canonical(cache, name=name, heads=heads)
    layers, sides = caches.shape[:2]
    layer = expect_range("layer", layer, 0, layers)
    if scale is None:
        return [Side(caches[layer, side]) for side in range(sides)]
    scales = layout.for_scale().canonical(scale, name=scale_name, heads=heads)
    _expect_scale(name, caches, scale_name, scales, (cache, scale))
    return [Side(caches[layer, side], scales[layer, side]) for side in range(sides)]
