"""Argument rules that the PMX operators share. Nothing here writes."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvloom.core.checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    can_read,
    expect,
    expect_range,
)
from kvloom.core.indexing import CacheIndex, check_index
from kvloom.core.layouts import CacheLayout
from kvloom.core.memory import expect_disjoint, expect_writable
from kvloom.core.specs import CODE_DTYPE
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError, ShapeError

KEY_DTYPES: Final = (*FLOAT_DTYPES, torch.int8)


class CacheAttributes(NamedTuple):
    """Attributes of the cache that all operators have."""

    num_layer: int
    layer_idx: int
    quant_bit: int
    quant_group: int


def open_cache(
    layout: CacheLayout,
    cache: Tensor,
    scale: Tensor | None,
    new: tuple[Tensor, Tensor],
    attributes: CacheAttributes,
) -> KVView:
    """View one layer of ``cache``; checks it against the ``new`` key and value and the attributes."""
    current_key, current_value = new
    num_layer, layer_idx, quant_bit, quant_group = attributes
    num_heads, head_dim = current_key.shape[-2:]
    expect_range("num_layer", num_layer, 1)
    expect_range("layer_idx", layer_idx, 0, num_layer)
    if isinstance(quant_bit, bool) or quant_bit not in (0, 4, 8):
        raise ArgumentError(f"quant_bit must be 0, 4 or 8, got {quant_bit!r}")
    if not isinstance(cache, Tensor):
        raise ShapeError(f"cache must be a tensor, got {type(cache).__name__}")
    if cache.device != current_key.device:
        raise ShapeError(f"cache must be on {current_key.device} as current_key, got {cache.device}")
    if num_heads == 0 or head_dim == 0:
        raise ShapeError(f"current_key must have heads and elements, got {list(current_key.shape)}")
    expect_writable("cache", cache)
    expect_disjoint("current_key", current_key, "cache", cache)
    expect_disjoint("current_value", current_value, "cache", cache)
    canonical = layout.canonical(cache)
    if canonical.shape[0] != num_layer:
        raise ShapeError(
            f"cache must have num_layer = {num_layer} on axis L of [{layout}], got {list(cache.shape)}"
        )
    stored = head_dim // 2 if quant_bit == 4 else head_dim
    if canonical.shape[5] != num_heads or canonical.shape[-1] != stored:
        raise ShapeError(
            f"cache must have H={num_heads} and D={stored} in [{layout}] for current_key "
            f"{list(current_key.shape)} with quant_bit {quant_bit}, got {list(cache.shape)}"
        )
    if quant_bit == 0:
        same = current_key.dtype == cache.dtype
        if not same and not (current_key.dtype in FLOAT_DTYPES and cache.dtype in FLOAT_DTYPES):
            raise ShapeError(
                f"cache must have a dtype that holds current_key's {current_key.dtype}, got {cache.dtype}"
            )
        return KVView.joint(layout, cache, layer=layer_idx)
    _expect_quantized(cache, scale, new, quant_bit, quant_group)
    return KVView.joint(layout, cache, scale, layer=layer_idx)


def _expect_quantized(
    cache: Tensor, scale: Tensor | None, new: tuple[Tensor, Tensor], quant_bit: int, quant_group: int
) -> None:
    current_key, _ = new
    if current_key.dtype not in FLOAT_DTYPES:
        raise ShapeError(
            f"current_key must be a float where quant_bit is {quant_bit}, got {current_key.dtype}"
        )
    if cache.dtype != CODE_DTYPE[quant_bit]:
        raise ShapeError(
            f"cache must be {CODE_DTYPE[quant_bit]} where quant_bit is {quant_bit}, got {cache.dtype}"
        )
    if scale is None:
        raise ArgumentError(f"scale must be given where quant_bit is {quant_bit}, got None")
    if not isinstance(scale, Tensor):
        raise ShapeError(f"scale must be a tensor, got {type(scale).__name__}")
    expect_range("quant_group", quant_group, 1)
    head_dim = current_key.shape[-1]
    if head_dim % quant_group:
        raise ArgumentError(f"quant_group must divide the head dim {head_dim}, got {quant_group}")
    if quant_bit == 4 and quant_group % 2:
        raise ArgumentError(f"quant_group must be even where quant_bit is 4, got {quant_group}")
    expect_writable("scale", scale)
    for name, x in (("current_key", new[0]), ("current_value", new[1]), ("cache", cache)):
        expect_disjoint(name, x, "scale", scale)
    groups = head_dim // quant_group
    if scale.ndim == 0 or scale.shape[-1] != groups:
        raise ShapeError(f"scale must have D / quant_group = {groups} last, got {list(scale.shape)}")


def expect_new(current_key: Tensor, current_value: Tensor, axes: str) -> dict[str, int]:
    """Check new keys and values, which have one shape, dtype and device."""
    sizes = expect("current_key", current_key, axes, dtype=KEY_DTYPES)
    return expect(
        "current_value", current_value, axes, dtype=current_key.dtype, device=current_key.device, **sizes
    )


def flag(name: str, value: bool | int) -> bool:
    """Convert a bool or an ONNX attribute, 0 or 1, to a bool.

    Raises:
        ArgumentError: anything else.
    """
    if not isinstance(value, int) or value not in (0, 1):
        raise ArgumentError(f"{name} must be a bool, got {value!r}")
    return bool(value)


def scalar(name: str, value: int | Tensor) -> int:
    """Convert an int, a 0-d or a one-element tensor to an int."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dtype not in INDEX_DTYPES:
            raise ShapeError(f"{name} must be a scalar int64, got {value.dtype} {list(value.shape)}")
        return int(value.item())
    return expect_range(name, value, 0)


def expect_lengths(seqstarts: Tensor, kvstarts: Tensor, num_tokens: int, device: torch.device) -> int:
    """Check the prefix sums of new and stored tokens; returns B."""
    batch = expect("seqstarts", seqstarts, "B+1", dtype=INDEX_DTYPES, device=device)["B+1"] - 1
    if batch < 0:
        raise ShapeError("seqstarts must have B + 1 entries, got none")
    expect("kvstarts", kvstarts, "B+1", dtype=INDEX_DTYPES, device=device, **{"B+1": batch + 1})
    if can_read(seqstarts):
        for name, starts in (("seqstarts", seqstarts), ("kvstarts", kvstarts)):
            # Compared without a difference, which could overflow.
            if int(starts[0]) != 0 or bool((starts[1:] < starts[:-1]).any()):
                raise ArgumentError(f"{name} must begin with 0 and never decrease, got {starts.tolist()}")
        if int(seqstarts[-1]) != num_tokens:
            raise ArgumentError(
                f"seqstarts must end with the number of new tokens {num_tokens}, got {int(seqstarts[-1])}"
            )
    return batch


def open_index(
    kv: KVView, cachestarts: Tensor, kvstarts: Tensor, *, batch: int, cache_mode: int, page_size: int
) -> CacheIndex:
    """Index in the format of ``cache_mode``; checks that every token is inside the cache.

    In mode 1 ``cachestarts`` is a page table if 2-D, a token table if 1-D.
    """
    if not isinstance(cachestarts, Tensor):
        raise ShapeError(f"cachestarts must be a tensor, got {type(cachestarts).__name__}")
    if cachestarts.device != kv.device:
        raise ShapeError(f"cachestarts must be on {kv.device}, got {cachestarts.device}")
    if isinstance(cache_mode, bool) or cache_mode not in (0, 1):
        raise ArgumentError(f"cache_mode must be 0 or 1, got {cache_mode!r}")
    if cache_mode == 0:
        index = CacheIndex.offset(cachestarts, name="cachestarts")
    elif cachestarts.ndim == 1:
        if can_read(kvstarts) and cachestarts.shape[0] != int(kvstarts[-1]):
            raise ShapeError(f"cachestarts must be [{int(kvstarts[-1])}], got {list(cachestarts.shape)}")
        index = CacheIndex.tokens(cachestarts, kvstarts, name="cachestarts")
    else:
        index = CacheIndex.pages(cachestarts, page_size, name="cachestarts")
    if index.row_starts is None and cachestarts.shape[0] != batch:
        raise ShapeError(f"cachestarts must have {batch} rows, one a sequence, got {list(cachestarts.shape)}")
    if can_read(cachestarts):
        check_index("cachestarts", index, kvstarts.diff(), kv.num_slots)
    return index
