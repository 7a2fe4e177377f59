"""Views of other ONNX operators' caches: ``TensorScatter`` with ``Attention``, and ``GroupQueryAttention``.

All keep one row of M slots for each sequence of a batch: token t of row b is in slot ``b * M + t``. ``load``
and ``attend`` read what these operators wrote, and the operators read what ``store`` wrote.
"""

from typing import Final

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.checks import FLOAT_DTYPES, INDEX_DTYPES, can_read, expect, expect_range
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import HUGGING_FACE, CacheLayout
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError, ShapeError
from kvloom.quant.packing import unpack

_READ: Final = (*FLOAT_DTYPES, torch.int8, torch.uint8)
"""Dtypes of caches of ``GroupQueryAttention`` that are read."""
MERGED: Final = CacheLayout("B S (H D)")
"""The three-dimensional form of ``TensorScatter`` and ``Attention``, ``axis=1``."""


def standard_cache(key_cache: Tensor, value_cache: Tensor, *, heads: int | None = None) -> KVView:
    """View the caches of ``TensorScatter`` and ``Attention``.

    Args:
        key_cache: ``[B, H, M, D]``, ``axis=2`` of ``TensorScatter``; or ``[B, M, H * D]``, ``axis=1``.
        value_cache: The same.
        heads: H, needed for three dimensions: ``kv_num_heads`` of ``Attention``.

    Raises:
        ShapeError: the tensors do not fit.
        ArgumentError: ``heads`` is missing.
    """
    layout = MERGED if isinstance(key_cache, Tensor) and key_cache.ndim == 3 else HUGGING_FACE
    return KVView.split(layout, key_cache, value_cache, heads=heads)


def write_slots(kv: KVView, write_indices: Tensor, num_new: int, *, mode: str = "linear") -> Tensor:
    """Slots that ``TensorScatter`` writes, ``[B * num_new]`` int64 row by row, for ``kvloom.ops.store``.

    Args:
        kv: The cache.
        write_indices: ``[B]`` int64, position of the first new token of each row, not negative.
        num_new: New tokens in each row.
        mode: ``"linear"``, or ``"circular"``, in which positions wrap around.

    Raises:
        ArgumentError: there is no such ``mode``, an index is negative, or the new tokens do not fit in a row.
    """
    rows, capacity = kv.num_blocks, kv.block_size
    expect("write_indices", write_indices, "B", dtype=INDEX_DTYPES, B=rows)
    if mode not in ("linear", "circular"):
        raise ArgumentError(f"mode must be 'linear' or 'circular', got {mode!r}")
    expect_range("num_new", num_new, 0, capacity + 1)
    first, size = write_indices.long(), max(capacity, 1)
    if mode == "circular":
        if can_read(first) and bool((first < 0).any()):
            raise ArgumentError(f"write_indices must not be negative, got {write_indices.tolist()}")
        first = first % size  # before a sum that could wrap around
    elif bool(((first < 0) | (first > capacity - num_new)).any()):
        raise ArgumentError(
            f"write_indices must leave room for {num_new} of {capacity} tokens in each row, "
            f"got {write_indices.tolist()}"
        )
    position = (first.unsqueeze(1) + torch.arange(num_new, device=first.device)) % size
    start = torch.arange(rows, device=write_indices.device) * capacity
    return (start.unsqueeze(1) + position).flatten()


def row_batch(kv: KVView, num_new: int, lengths: Tensor) -> ops.Batch:
    """The batch for ``kvloom.ops.attend``: the last ``num_new`` of ``lengths`` stored tokens of each row.

    Args:
        kv: The cache.
        num_new: Queries of each row.
        lengths: ``[B]`` int64, stored tokens of each row, the new ones included: ``nonpad_kv_seqlen``, or
            ``seqlens_k + 1``.

    Raises:
        ArgumentError: a length is negative, or greater than the number of slots in a row.
    """
    rows, capacity = kv.num_blocks, kv.block_size
    expect("lengths", lengths, "B", dtype=INDEX_DTYPES, B=rows)
    expect_range("num_new", num_new, 0)
    if can_read(lengths) and bool(((lengths < 0) | (lengths.long() > capacity)).any()):
        raise ArgumentError(f"lengths must be in [0, {capacity}], got {lengths.tolist()}")
    starts = torch.arange(rows + 1, device=lengths.device)
    index = CacheIndex.offset(starts[:-1] * capacity)
    kvstarts = torch.cat((starts[:1], lengths.long().cumsum(0)))
    return ops.Batch(index, starts * num_new, kvstarts)


def group_query_cache(
    key_cache: Tensor, value_cache: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> KVView:
    """View the caches of ``com.microsoft::GroupQueryAttention``; read-only if they are quantized.

    Its scales are constants of the model, one for each channel or one for all. Here they are expanded to all
    slots without a copy, so the view of a quantized cache cannot be written. Its nibbles are offset by 8
    and may differ in scale, which kvloom's never do, so a 4-bit cache is copied with one code per byte.

    Args:
        key_cache: ``[B, H, M, D]`` float32, float16 or bfloat16, or int8, or uint8 with D / 2 last (4 bits).
        value_cache: The same. That operator's schema has float8 caches, too, which are refused.
        k_scale: ``[1, H, 1, D]`` (``PER_CHANNEL``) or one element (``PER_TENSOR``), float32.
        v_scale: The same.

    Raises:
        ShapeError: the tensors do not fit.
        ArgumentError: scales are missing, or given for a float cache.
    """
    sides: list[tuple[Tensor, Tensor | None]] = []
    for name, cache, scale in (("key_cache", key_cache, k_scale), ("value_cache", value_cache, v_scale)):
        sizes = expect(name, cache, "B H M D", dtype=_READ)
        quantized = cache.dtype in (torch.int8, torch.uint8)
        if quantized != (scale is not None):
            given, got = ("given", "None") if quantized else ("None", "a tensor")
            raise ArgumentError(f"{name[0]}_scale must be {given} for a cache of {cache.dtype}, got {got}")
        if scale is None:
            sides.append((cache, None))
            continue
        dim = sizes["D"] * (2 if cache.dtype == torch.uint8 else 1)
        if scale.numel() != 1 and tuple(scale.shape) != (1, sizes["H"], 1, dim):
            raise ShapeError(
                f"{name[0]}_scale must have one element or be {[1, sizes['H'], 1, dim]}, "
                f"got {list(scale.shape)}"
            )
        whole = scale.reshape(1, 1, 1, 1) if scale.numel() == 1 else scale
        expanded = whole.expand(sizes["B"], sizes["H"], sizes["M"], -1)
        # Flipping the highest bit of a nibble takes 8 away from it, in two's complement.
        sides.append((unpack(cache ^ 0x88, 4) if cache.dtype == torch.uint8 else cache, expanded))
    (key, key_scale), (value, value_scale) = sides
    return KVView.split(HUGGING_FACE, key, value, key_scale, value_scale)
