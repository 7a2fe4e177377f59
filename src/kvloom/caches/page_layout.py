"""In which axis order pages are kept: for the kernels that read them, or as asked."""

from typing import Final, Literal

import torch

from kvloom import ops
from kvloom.core.layouts import NATIVE_KEYS, NATIVE_VALUES, CacheLayout
from kvloom.core.specs import KVSpec
from kvloom.errors import ConfigError

PAGE_LAYOUTS: Final = ("auto", "NHD", "HND", "native")
"""Names of ``page_layout``."""

_NHD: Final = CacheLayout("B S H D")
_HND: Final = CacheLayout("B H S D")
_BLOCK: Final = 16
_DIGITS_FROM: Final = 32
"""Elements of a group, or a multiple, from which on codes meet a bfloat16 query as integers."""


def page_layout(
    name: str, side: Literal["key", "value"], spec: KVSpec, page_size: int, device: torch.device
) -> CacheLayout:
    """The axis order of pages of keys or values.

    Args:
        name: ``"NHD"`` has the heads of a token side by side, ``"HND"`` the tokens of a head. ``"native"``
            has codes in the order of integer dot products, and HND where nothing is quantized. ``"auto"`` is
            NHD without compiled CPU kernels; else native where that fits and pays, and HND where not.
        side: Keys and values differ where the order is native.
        spec: What is kept.
        page_size: Token slots in a page.
        device: Where.

    Raises:
        ConfigError: ``name`` is unknown, or native and the codes do not fill its blocks.
    """
    if name not in PAGE_LAYOUTS:
        raise ConfigError(f"layout must be one of {PAGE_LAYOUTS}, got {name!r}")
    if name == "NHD":
        return _NHD
    if name == "auto" and (device.type != "cpu" or ops.cpu_kernels() is None):
        return _NHD
    if name == "HND" or spec.quant is None:
        return _HND
    if name == "auto" and spec.dtype == torch.bfloat16 and spec.quant.group % _DIGITS_FROM:
        return _HND  # dequantized for products of bfloat16
    row, group = (n * spec.quant.bits // 8 for n in (spec.head_dim, spec.quant.group))
    if page_size % _BLOCK == 0 and row % 16 == 0 and group % 4 == 0 and spec.quant.group >= 8:
        return NATIVE_KEYS if side == "key" else NATIVE_VALUES
    if name == "auto":
        return _HND
    raise ConfigError(
        f"layout 'native' must have pages of a multiple of {_BLOCK} tokens, head vectors of a multiple of 16 "
        f"bytes and groups of 8 elements or more in a multiple of 4 bytes, got {page_size} tokens, {row} and "
        f"{group} bytes"
    )
