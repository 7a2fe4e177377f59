"""GatherPaKvCache: copy whole sequences out of a paged cache through a block table."""

from typing import Final

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.checks import INDEX_DTYPES, can_read, expect
from kvloom.core.indexing import prefix_sums, ragged_positions
from kvloom.core.layouts import CacheLayout
from kvloom.core.memory import expect_writable
from kvloom.core.views import KVView, raw
from kvloom.dialects.ascend.arguments import DTYPES, expect_apart, present, read_mode
from kvloom.dialects.ascend.formats import NORM, open_caches, store_sides
from kvloom.errors import ArgumentError, ShapeError

_PACKED: Final = CacheLayout("T H D")


def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    seq_offset: Tensor | None = None,
    cache_mode: str | None = "Norm",
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Copy the tokens of every sequence into ``key`` and ``value``, packed in batch order, in place.

    Rows after the last token are not changed; tokens that do not fit are dropped. A token whose block is not
    in the table or not in the cache reads as zero.

    Args:
        key_cache: ``[nb, bs, H, Dk]``, or in PA_NZ ``[nb, H * Dk / last, bs, last]`` with ``last`` elements
            in 32 bytes.
        value_cache: As ``key_cache``, same blocks and slots. For keys only it and ``value`` are ``None``,
            empty (``torch.empty(0)``) or 0-dim.
        block_tables: Block ids ``[B, M]`` int32 or int64.
        seq_lens: Tokens of each sequence, ``[B]``; or their prefix sums ``[B + 1]``.
        key: Written in place. ``[N, H, Dk]``, in PA_NZ also ``[N, H * Dk]``; dtype of ``key_cache``.
        value: Written in place, as ``key``.
        seq_offset: ``[B]``, tokens to skip at the front of each row of the table, in whole blocks: the
            remainder of a division by bs is ignored.
        cache_mode: ``"Norm"`` or ``"PA_NZ"``.
        is_seq_lens_cumsum: ``seq_lens`` are prefix sums.

    Raises:
        KVError: an argument does not fit; nothing was written.

    Source: CANN operator GatherPaKvCache.
    """
    layout = None if read_mode("cache_mode", cache_mode, ("Norm", "PA_NZ")) == "PA_NZ" else NORM
    value, value_cache = present(value), present(value_cache)
    sides: dict[str, tuple[Tensor | None, Tensor | None]] = {"key": (key, key_cache)}
    if value is not None or value_cache is not None:
        sides["value"] = (value, value_cache)
    for name, (x, cache) in sides.items():
        if not isinstance(x, Tensor) or not isinstance(cache, Tensor):
            raise ShapeError(f"{name} and {name}_cache must be tensors")
        if cache.dtype not in DTYPES or x.dtype != cache.dtype:
            raise ShapeError(f"{name} must be {cache.dtype} as {name}_cache, one of {DTYPES}, got {x.dtype}")
        for written, y in ((name, x), (f"{name}_cache", cache)):
            if y.device != key_cache.device:
                raise ShapeError(f"{written} must be on {key_cache.device} as key_cache, got {y.device}")
        expect_writable(name, x)
    expect_apart({"key_cache": key_cache, "value_cache": value_cache}, {"key": key, "value": value})
    caches = open_caches(layout, key_cache, value_cache)
    sizes = expect("block_tables", block_tables, "B M", dtype=INDEX_DTYPES, device=key_cache.device)
    entries = sizes["B"] + 1 if is_seq_lens_cumsum else sizes["B"]
    expect("seq_lens", seq_lens, "n", dtype=INDEX_DTYPES, device=key_cache.device, n=entries)
    if seq_offset is not None:
        expect("seq_offset", seq_offset, "B", dtype=INDEX_DTYPES, device=key_cache.device, B=sizes["B"])
    outputs = (
        _output("key", key, caches[0], layout is None),
        None if value is None or caches[1] is None else _output("value", value, caches[1], layout is None),
    )
    num_rows = key.shape[0]
    if value is not None and value.shape[0] != num_rows:
        raise ShapeError(f"value must have {num_rows} rows as key, got {value.shape[0]}")
    if can_read(seq_lens):
        _check_values(seq_lens, seq_offset, is_seq_lens_cumsum)
    if sizes["B"] == 0 or num_rows == 0:
        return
    # Tokens after the last row are dropped, so lengths are limited to the rows, and no sum overflows.
    starts = seq_lens.long() if is_seq_lens_cumsum else prefix_sums(seq_lens.clamp(max=num_rows))
    slots = _slots(caches[0], block_tables, starts, seq_offset, num_rows)
    rows = (_load(caches[0], slots), None if caches[1] is None else _load(caches[1], slots))
    row = torch.arange(num_rows, device=starts.device)
    store_sides(rows, torch.where(row < starts[-1], row, -1), outputs)


def _check_values(seq_lens: Tensor, seq_offset: Tensor | None, is_seq_lens_cumsum: bool) -> None:
    if is_seq_lens_cumsum:  # compared without a difference, which could overflow
        wrong = bool(seq_lens[0] != 0) or bool((seq_lens[1:] < seq_lens[:-1]).any())
    else:
        wrong = bool((seq_lens < 0).any())
    if wrong:
        raise ArgumentError(f"seq_lens must give lengths of at least 0, got {seq_lens.tolist()}")
    if seq_offset is not None and bool((seq_offset < 0).any()):
        raise ArgumentError(f"seq_offset must be at least 0, got {seq_offset.tolist()}")


def _output(name: str, x: Tensor, cache: KVView, nz: bool) -> KVView:
    """View of ``x`` as a cache of N slots with the heads and elements of ``cache``."""
    heads, size = cache.num_heads, cache.key.head_dim
    fits = x.ndim in (2, 3) and x.shape[1:].numel() == size if nz else tuple(x.shape[1:]) == (heads, size)
    if not fits or x.ndim < 2:
        raise ShapeError(f"{name} must have rows of {heads} x {size} elements, got {list(x.shape)}")
    if nz and x.ndim == 3:
        if x.shape[1] > 1 and x.shape[2] > 1 and x.stride(1) != x.shape[2] * x.stride(2):
            raise ShapeError(f"{name} must have one stride over heads and elements, got {x.stride()}")
        x = x.flatten(1)
    return KVView.split(_PACKED, x.unsqueeze(1) if nz else x, None)


def _slots(cache: KVView, table: Tensor, starts: Tensor, seq_offset: Tensor | None, num_rows: int) -> Tensor:
    """Slot of each output row, -1 if its block does not exist."""
    sequence, position = ragged_positions(starts, total=num_rows)
    column = position // cache.block_size
    if seq_offset is not None:
        skipped = (seq_offset.long() // cache.block_size).clamp(max=table.shape[1])
        column = column + skipped[sequence]
    inside = column < table.shape[1]
    if table.shape[1] == 0:
        block = torch.full_like(column, -1)
    else:
        block = torch.where(inside, table[sequence, column.clamp(max=table.shape[1] - 1)].long(), -1)
    exists = (block >= 0) & (block < cache.num_blocks)
    return torch.where(exists, block * cache.block_size + position % cache.block_size, -1)


def _load(cache: KVView, slots: Tensor) -> Tensor:
    """Load rows ``[N, H, D]`` of the slots; zeros for negative slots."""
    if cache.num_slots == 0:
        return cache.key.cache.new_zeros(slots.shape[0], cache.num_heads, cache.key.head_dim)
    found = ops.load(slots.clamp_min(0), cache)[0]
    return torch.where((slots >= 0).view(-1, 1, 1), raw(found), 0).view(found.dtype)
