"""Format of a cache's tokens: dtype or codes, page size, axis order, residual window."""

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.entries import OF_BITS, ROTATIONS, Entry, SideFormat
from kvloom.core.layouts import NATIVE_KEYS, NATIVE_VALUES, CacheLayout
from kvloom.core.specs import KVSpec, QuantSpec, dtype_name, entry_of
from kvloom.core.spelling import Kind, parse_kind, recent_of
from kvloom.errors import ConfigError
from kvloom.ops import KeySmoothing

PAGE_LAYOUTS: Final = ("auto", "rows", "NHD", "HND", "native")
"""Names of ``CacheFormat.layout``."""

_NHD: Final = CacheLayout("B S H D")
_HND: Final = CacheLayout("B H S D")
_BLOCK: Final = 16
_OF_LAYERS: Final = ("dtype", "quant", "values", "smoothing")
_DIGITS_FROM: Final = 32
"""Divisor of group sizes whose codes are multiplied with a bfloat16 query as integers."""
RESIDUAL_ROLLBACK: Final = 16
"""Tokens kept beyond a residual window: after removing up to this many it is still complete."""


def expect_config(name: str, value: int, low: int) -> int:
    """``value`` if it is an int of at least ``low``, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an int of at least {low}, got {value!r}")
    return value


def num_exact(recent: int) -> int:
    """Number of the last tokens of a text that are unquantized in a residual window of ``recent``.

    It counts from the longest that the text has been, wherever the tokens are kept: what a removal leaves of
    these tokens is read unquantized, and all before them as codes.
    """
    return recent - 1 + RESIDUAL_ROLLBACK


def first_seen(position: int, window: int | None) -> int:
    """Position of the first token that one at ``position`` sees."""
    return 0 if window is None else max(position - window + 1, 0)


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """Format of a layer's tokens.

    Attributes:
        dtype: Dtype of unquantized storage; ``None`` for that of the keys.
        quant: Codes of the keys; ``None`` for unquantized storage.
        page_size: Token slots in a page.
        max_tokens: Token slots in all, of all sequences, rounded up to whole pages; ``None`` grows on demand.
        values: Format of the values, of which only ``dtype`` and ``quant`` count; ``None`` for that of the
            keys.
        layout: Axis order. ``"NHD"`` pages are ``[slots, H, D]``, ``"HND"`` pages ``[H, slots, D]``.
            ``"rows"`` is HND of a whole extent: the pages of a sequence are one tensor of each head, which
            attention can read without a copy. ``"native"`` has codes in the order of integer dot products,
            and is HND for unquantized tokens. ``"auto"`` depends on the attention that reads the first
            tokens: rows if it reads gathered tensors; else, with compiled CPU kernels, native where possible
            and faster, or HND; HND on other devices, where scales of adjacent tokens are read at once; NHD
            without kernels.
        recent: Length of the residual window: the last tokens, itself included, that each token attends to
            unquantized, in layers whose keys or values are codes. It attends to all others as codes. Such a
            layer keeps about ``recent`` tokens in the model's dtype, beside the codes of all.
        layers: Format of each layer, if they differ; only ``dtype``, ``quant``, ``values`` and ``smoothing``
            count.
        smoothing: Smoothing of keys that are codes; ``None`` for none.
    """

    dtype: torch.dtype | None = None
    quant: QuantSpec | None = None
    page_size: int = 16
    max_tokens: int | None = None
    values: "CacheFormat | None" = None
    layout: str = "auto"
    recent: int = 0
    layers: "tuple[CacheFormat, ...] | None" = None
    smoothing: KeySmoothing | None = None

    def __post_init__(self) -> None:
        expect_config("page_size", self.page_size, 1)
        if self.max_tokens is not None:
            expect_config("max_tokens", self.max_tokens, 1)
        if self.layout not in PAGE_LAYOUTS:
            raise ConfigError(f"layout must be one of {PAGE_LAYOUTS}, got {self.layout!r}")
        expect_config("recent", self.recent, 0)
        others = self.values.quant if self.values is not None else None
        if self.quant and others and self.quant.range and others.range not in ("", self.quant.range):
            raise ConfigError(f"values must have the range of keys, {self.quant.range}, got {others.range}")
        if self.recent and not any(x.has_codes for x in self.layers or (self,)):
            raise ConfigError(f"recent must be 0 where keys and values are no codes, got {self.recent}")

    @property
    def has_codes(self) -> bool:
        """Whether keys or values are codes, so that a residual window is possible."""
        return self.quant is not None or (self.values is not None and self.values.quant is not None)

    @property
    def needs_positions(self) -> bool:
        """Whether stored keys of this format depend on their positions in the text."""
        return self.quant is not None and self.smoothing is not None and self.smoothing.offset is not None

    def of_layer(self, index: int) -> "CacheFormat":
        """The format of one layer.

        Raises:
            ConfigError: ``layers`` has none for it.
        """
        if self.layers is None:
            return self
        if index >= len(self.layers):
            raise ConfigError(f"layers must have a format of layer {index}, got {len(self.layers)}")
        own = self.layers[index]
        recent = self.recent if own.has_codes else 0
        kept = {name: getattr(own, name) for name in _OF_LAYERS}
        return replace(self, **kept, recent=recent, layers=None)

    def kind(self, key_dim: int | None = None, value_dim: int | None = None) -> str:
        """Format string for keys and values of these head dims, such as ``"int8:g32"``.

        ``"int8:g32/int4:g32"`` if values have another format, ``"plan"`` if layers differ. ``kept_as`` reads
        one side.
        """
        if self.layers is not None:
            kinds_of_layers = {replace(x, smoothing=None) for x in self.layers}
            if len(kinds_of_layers) > 1:
                return "plan"
            smoothing = next((x.smoothing for x in self.layers if x.smoothing is not None), None)
            own = replace(self.of_layer(0), smoothing=smoothing)
            return own.kind(key_dim, value_dim)
        kinds = [self._side("keys", key_dim), (self.values or self)._side("values", value_dim)]
        names = {(kind.name, kind.group, kind.range) for kind in kinds}
        if len(names) == 1:
            rotated = kinds[0].rotates("keys") + 2 * kinds[1].rotates("values")
            kinds = [replace(kinds[0], rotate=ROTATIONS[rotated])]
        recent = "" if self.recent == recent_of(kinds[0], kinds[-1]) else f",recent={self.recent}"
        smooth = "" if self.quant is None or self.smoothing is not None else ",smooth=none"
        return "/".join(map(str, kinds)) + recent + smooth

    def _side(self, side: Literal["keys", "values"], head_dim: int | None) -> Kind:
        if self.quant is None:
            return Kind("auto" if self.dtype is None else dtype_name(self.dtype))
        quant = self.quant if head_dim is None else self.quant.for_head_dim(head_dim)
        codes = OF_BITS[quant.bits]
        usual = Kind(codes.name, quant.group, codes.rotate, range=quant.range)
        if usual.rotates(side) == quant.rotated:
            return usual
        return replace(usual, rotate=side if quant.rotated else "none")

    def spec(self, heads: int, head_dim: int, dtype: torch.dtype) -> KVSpec:
        """Spec of one layer's keys in a model of this ``dtype``; ``values.spec`` is that of its values."""
        return KVSpec(1, heads, head_dim, self.dtype or dtype, quant=self.quant)

    def specs_of(self, key: Tensor, value: Tensor) -> tuple[KVSpec, KVSpec | None]:
        """Specs of one layer's keys and values ``[B, H, Q, D]``; ``None`` for values with D = 0."""
        spec = self.spec(key.shape[1], key.shape[3], key.dtype)
        if not value.shape[3]:
            return spec, None
        return spec, (self.values or self).spec(value.shape[1], value.shape[3], key.dtype)

    @property
    def max_pages(self) -> int | None:
        """Pages of ``max_tokens``; ``None`` for no bound."""
        return None if self.max_tokens is None else -(-self.max_tokens // self.page_size)

    def residual_window(self, window: int | None) -> int:
        """Length of the residual window of layers with this attention window; ``None`` for no window."""
        return self.recent if window is None else min(self.recent, window)

    def residual(self, page_size: int) -> "CacheFormat":
        """Format of the residual window, in pages of ``page_size`` slots."""
        return CacheFormat(page_size=page_size, layout="HND")

    def nbytes(self, key: Tensor, value: Tensor, num_slots: int) -> int:
        """Bytes of ``num_slots`` token slots of keys and values such as these, scales included."""
        return num_slots * self.entry(entry_of(key, value)).nbytes

    def entry(self, computed: Entry) -> Entry:
        """Stored entry of one layer, from the unquantized entry that its model computes."""
        value = None if computed.value is None else (self.values or self)._kept(computed.value)
        return Entry(computed.heads, self._kept(computed.key), value)

    def _kept(self, computed: SideFormat) -> SideFormat:
        if self.quant is not None:
            return self.quant.side(computed.head_dim, computed.dtype)
        return computed if self.dtype is None else replace(computed, dtype=dtype_name(self.dtype))


def kept_as(
    name: str, text: str, side: Literal["keys", "values"] = "keys"
) -> tuple[torch.dtype | None, QuantSpec | None]:
    """Parse ``"auto"``, ``"float16"`` or ``"int8:g32"`` into ``dtype`` and ``quant`` of a ``CacheFormat``.

    Args:
        name: The caller's argument, for the error.
        text: The format string.
        side: Side that has this format.

    Raises:
        ArgumentError: ``text`` is no such format string.
    """
    kind = parse_kind(name, text)
    if kind.bits:
        return None, QuantSpec.of(kind, side)
    return None if kind.name == "auto" else getattr(torch, kind.name), None


def is_in_rows(name: str, is_gathered: bool) -> bool:
    """Whether the pages of a sequence form one tensor of each head."""
    return name == "rows" or (name == "auto" and is_gathered)


def page_layout(
    name: str,
    side: Literal["key", "value"],
    spec: KVSpec,
    page_size: int,
    device: torch.device,
    is_gathered: bool = False,
) -> CacheLayout:
    """The axis order of keys or values.

    Args:
        name: As ``CacheFormat.layout``.
        side: Keys or values, which differ where the order is native.
        spec: Spec of the keys or values.
        page_size: Token slots in a page.
        device: Device of the tensors.
        is_gathered: Whether attention reads gathered tensors.

    Raises:
        ConfigError: ``name`` is unknown, or native and the codes do not fill its blocks.
    """
    if name not in PAGE_LAYOUTS:
        raise ConfigError(f"layout must be one of {PAGE_LAYOUTS}, got {name!r}")
    if is_in_rows(name, is_gathered) or (name == "auto" and device.type != "cpu"):
        return _HND
    if name == "NHD" or (name == "auto" and ops.cpu_kernels() is None):
        return _NHD
    if name == "HND" or spec.quant is None:
        return _HND
    if name == "auto" and spec.dtype == torch.bfloat16 and spec.group % _DIGITS_FROM:
        return _HND  # dequantized for products of bfloat16
    row, group = (n * spec.quant.bits // 8 for n in (spec.head_dim, spec.group))
    if page_size % _BLOCK == 0 and row % 16 == 0 and group % 4 == 0 and spec.group >= 8:
        return NATIVE_KEYS if side == "key" else NATIVE_VALUES
    if name == "auto":
        return _HND
    raise ConfigError(
        f"layout 'native' must have pages of a multiple of {_BLOCK} tokens, head vectors of a multiple of 16 "
        f"bytes and groups of 8 elements or more in a multiple of 4 bytes, got {page_size} tokens, {row} and "
        f"{group} bytes"
    )
