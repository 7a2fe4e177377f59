"""GatherPaKvCache: copy whole sequences out of a paged cache through a block table."""

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.checks import INDEX_DTYPES, can_read, expect
from kvloom.core.indexing import prefix_sums, ragged_positions
from kvloom.core.memory import expect_no_overlap
from kvloom.core.views import KVView, raw
from kvloom.dialects.ascend.arguments import DTYPES, read_mode
from kvloom.dialects.ascend.formats import NORM, open_caches
from kvloom.errors import ArgumentError, ShapeError


def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    cache_mode: str | None = "Norm",
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Copy the tokens of every sequence into ``key`` and ``value``, packed in batch order, in place.

    Rows behind the last token are left alone; tokens that do not fit are left out. A token whose block is not
    in the table or not in the cache reads as zero.

    Args:
        key_cache: ``[nb, bs, H, Dk]``, or in PA_NZ ``[nb, H * Dk / last, bs, last]`` with ``last`` elements
            in 32 bytes.
        value_cache: As ``key_cache``, same blocks and slots.
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
    for name, x, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if not isinstance(x, Tensor) or not isinstance(cache, Tensor):
            raise ShapeError(f"{name} and {name}_cache must be tensors")
        if cache.dtype not in DTYPES or x.dtype != cache.dtype:
            raise ShapeError(f"{name} must be {cache.dtype} as {name}_cache, one of {DTYPES}, got {x.dtype}")
        expect_no_overlap(name, x)
    caches = open_caches(layout, key_cache, value_cache)
    sizes = expect("block_tables", block_tables, "B M", dtype=INDEX_DTYPES, device=key_cache.device)
    entries = sizes["B"] + 1 if is_seq_lens_cumsum else sizes["B"]
    expect("seq_lens", seq_lens, "n", dtype=INDEX_DTYPES, device=key_cache.device, n=entries)
    if seq_offset is not None:
        expect("seq_offset", seq_offset, "B", dtype=INDEX_DTYPES, device=key_cache.device, B=sizes["B"])
    outputs = (
        _output("key", key, caches[0], layout is None),
        _output("value", value, caches[1], layout is None),
    )
    if outputs[0].shape[0] != outputs[1].shape[0]:
        raise ShapeError(f"value must have {key.shape[0]} rows as key, got {value.shape[0]}")
    starts = seq_lens.long() if is_seq_lens_cumsum else prefix_sums(seq_lens)
    if can_read(starts) and (int(starts[0]) != 0 or bool((starts.diff() < 0).any())):
        raise ArgumentError(f"seq_lens must give lengths of at least 0, got {seq_lens.tolist()}")
    if can_read(starts) and seq_offset is not None and bool((seq_offset < 0).any()):
        raise ArgumentError(f"seq_offset must be at least 0, got {seq_offset.tolist()}")
    if sizes["B"] == 0 or key.shape[0] == 0:
        return
    slots, wanted = _slots(caches[0], block_tables, starts, seq_offset, key.shape[0])
    for output, opened in zip(outputs, caches, strict=True):
        _copy_rows(output, opened, slots, wanted)


def _output(name: str, x: Tensor, cache: KVView | None, nz: bool) -> Tensor:
    """``x`` as ``[N, H, D]`` of its cache, a view."""
    if cache is None:
        raise ShapeError(f"{name}_cache must be given, got None")
    heads, size = cache.num_heads, cache.key.shape[4:].numel()
    if x.device != cache.device:
        raise ShapeError(f"{name} must be on {cache.device}, got {x.device}")
    fits = x.ndim in (2, 3) and x.shape[1:].numel() == size if nz else tuple(x.shape[1:]) == (heads, size)
    if not fits or x.ndim < 2:
        raise ShapeError(f"{name} must have rows of {heads} x {size} elements, got {list(x.shape)}")
    return x.view(x.shape[0], 1, size) if nz else x


def _slots(
    cache: KVView, table: Tensor, starts: Tensor, seq_offset: Tensor | None, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Slot of each output row (-1 where its block does not exist), and whether the row is to be written."""
    sequence, position = ragged_positions(starts, total=num_rows)
    column = position // cache.block_size
    if seq_offset is not None:
        column = column + (seq_offset.long() // cache.block_size)[sequence]
    inside = column < table.shape[1]
    if table.shape[1] == 0:
        block = torch.full_like(column, -1)
    else:
        block = torch.where(inside, table[sequence, column.clamp(max=table.shape[1] - 1)].long(), -1)
    exists = (block >= 0) & (block < cache.key.shape[0])
    slots = torch.where(exists, block * cache.block_size + position % cache.block_size, -1)
    return slots, torch.arange(num_rows, device=starts.device) < starts[-1]


def _copy_rows(output: Tensor, cache: KVView | None, slots: Tensor, wanted: Tensor) -> None:
    if cache is None or cache.num_slots == 0:
        found = torch.zeros_like(raw(output))
    else:
        found = raw(ops.load(slots.clamp_min(0), cache)[0])
        found = torch.where((slots >= 0).view(-1, 1, 1), found, 0)
    raw(output).copy_(torch.where(wanted.view(-1, 1, 1), found, raw(output)))
