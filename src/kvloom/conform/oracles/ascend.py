"""ScatterPaKvCache and GatherPaKvCache as plain loops: one token, one head and one slot at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

COMPRESSED = ("Alibi", "Rope", "Omni")
WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # copies move words of any meaning
Piece = int | range  # source of one cache token: a token to copy, or a window to average


def raw(x: Tensor) -> Tensor:
    """View of ``x`` as integers of its width; copies through it keep every bit."""
    return x.view(WORD[x.element_size()])


def ints(x: Tensor) -> list[int]:
    return x.reshape(-1).tolist()


def pieces(rule: str, length: int, win: int, off: int | None) -> list[Piece]:
    """Tokens of one run in order, for a head whose sequence has ``length`` tokens."""
    if rule == "Alibi":
        return [length - win + k for k in range(win)]
    assert off is not None
    if off == -1 or win == 0 or off == length:
        return list(range(length))
    run: list[Piece] = list(range(off))
    if rule == "Rope":
        run.append(range(off, off + win))
    for t in range(off + win, length):
        run.append(t)
    return run


def average(lane: list[float], dtype: torch.dtype) -> float | int:
    """Mean of one feature over a window, before it is rounded to a float dtype."""
    if dtype.is_floating_point:
        return sum(lane, 0.0) / len(lane)
    total = sum(lane)
    if dtype in (torch.int32, torch.uint32):  # these accumulate in their own type
        total %= 2**32
        if dtype == torch.int32 and total >= 2**31:
            total -= 2**32
    quotient = abs(total) // len(lane)
    return quotient if total >= 0 else -quotient


def mean(rows: Tensor) -> Tensor:
    """Mean of ``rows`` [n, D] over n, rounded once."""
    lanes = zip(*rows.tolist(), strict=True)
    averages = [average(list(lane), rows.dtype) for lane in lanes]
    if rows.dtype.is_floating_point:
        return torch.tensor(averages, dtype=torch.float64).to(rows.dtype)
    return torch.tensor(averages, dtype=rows.dtype)


def write_token(cache: Tensor, slot: int, row: Tensor, layout: str) -> None:
    """Store the H*D words of one token; ``layout`` is Norm, NHSD or PA_NZ."""
    if layout == "Norm":
        size = cache.shape[1]
        cache[slot // size, slot % size] = row.reshape(cache.shape[2:])
    elif layout == "NHSD":
        size = cache.shape[2]
        for h in range(cache.shape[1]):
            for d in range(cache.shape[3]):
                cache[slot // size, h, slot % size, d] = row[h * cache.shape[3] + d]
    else:
        size, last = cache.shape[-2:]
        for c, at in enumerate(chunks(cache)):
            place = (slot // size, *at, slot % size)
            cache[place] = row[c * last : (c + 1) * last]


def chunks(cache: Tensor) -> list[tuple[int, ...]]:
    """Indices between block and offset of a PA_NZ cache of rank 4 or 5, in feature order."""
    if cache.dim() == 4:
        return [(c,) for c in range(cache.shape[1])]
    return [(h, c) for h in range(cache.shape[1]) for c in range(cache.shape[2])]


def scatter_tokens(
    x: Tensor, cache: Tensor, slots: list[int], layout: str, stride: int | None, offset: int
) -> None:
    """Scenarios 1, 2, 6 and NHSD; with ``stride`` tokens are read from the storage of ``x``."""
    x, cache = raw(x), raw(cache)
    features = x[0].numel() if len(x) else 0
    available = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    memory = x.as_strided((available,), (1,)) if stride is not None else x
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        if stride is None:
            row = x[i].reshape(features)
        else:
            row = memory[offset + i * stride : offset + i * stride + features]
        write_token(cache, slot, row, layout)


def scatter_runs(
    x: Tensor, cache: Tensor, slots: list[int], rule: str, seq_lens: list[int], wins: list[int],
    offs: list[int] | None,
) -> set[int]:  # fmt: skip
    """Scenarios 3, 4 and 5; returns the slots that hold an average."""
    averaged: set[int] = set()
    num_heads, size = x.shape[-2], cache.shape[1]
    for b, length in enumerate(seq_lens):
        tokens = x[b] if x.dim() == 4 else x[sum(seq_lens[:b]) :]
        for h in range(num_heads):
            p = b * num_heads + h
            if slots[p] < 0:
                continue
            run = pieces(rule, length, wins[p], None if offs is None else offs[p])
            for k, piece in enumerate(run):
                slot = slots[p] + k
                target = raw(cache)[slot // size, slot % size, 0]
                if isinstance(piece, range):
                    target[:] = raw(mean(tokens[piece.start : piece.stop, h]))
                    averaged.add(slot)
                else:
                    target[:] = raw(tokens)[piece, h]
                    averaged.discard(slot)
    return averaged


def scatter_pa_kv_cache(
    key: Tensor, value: Tensor | None, key_cache: Tensor, value_cache: Tensor | None, slot_mapping: Tensor, *,
    compress_lens: Tensor | None = None, compress_seq_offset: Tensor | None = None,
    seq_lens: Tensor | None = None, cache_mode: str | None = "Norm", scatter_mode: str | None = "None",
    strides: tuple[int, int] | None = None, offsets: tuple[int, int] | None = None,
) -> set[int]:  # fmt: skip
    """Write in place; returns the slots whose bits may differ by a rounding, because they hold an average."""
    slots, averaged = ints(slot_mapping), set()
    mode = scatter_mode or "None"
    if key.dim() == 4 and mode == "None":
        mode = "Alibi" if compress_seq_offset is None else "Rope"
    for which, (x, cache) in enumerate(((key, key_cache), (value, value_cache))):
        if x is None or cache is None or x.dim() == 0:
            continue
        if mode in COMPRESSED:
            assert seq_lens is not None and compress_lens is not None
            offs = None if compress_seq_offset is None else ints(compress_seq_offset)
            averaged = scatter_runs(x, cache, slots, mode, ints(seq_lens), ints(compress_lens), offs)
        else:
            layout = "NHSD" if mode == "NHSD" else cache_mode or "Norm"
            stride = strides[which] if mode == "Nct" and strides else None
            scatter_tokens(x, cache, slots, layout, stride, offsets[which] if offsets else 0)
    return averaged


def read_token(cache: Tensor, slot: int, layout: str) -> Tensor:
    """Words of one token, feature after feature."""
    if layout == "Norm":
        return cache[slot // cache.shape[1], slot % cache.shape[1]].reshape(-1)
    size = cache.shape[-2]
    places = [(slot // size, *at, slot % size) for at in chunks(cache)]
    return torch.cat([cache[place] for place in places])


def gathered_slots(
    block_tables: Tensor, seq_lens: Tensor, seq_offset: Tensor | None, cumulative: bool, size: int
) -> Iterator[tuple[int, int]]:
    """(block, offset) of every token to read; block -1 if the table has no column."""
    lens = ints(seq_lens)
    if cumulative:
        lens = [lens[b + 1] - lens[b] for b in range(len(lens) - 1)]
    for b, length in enumerate(lens):
        first = int(seq_offset[b]) // size if seq_offset is not None else 0
        for t in range(length):
            column = first + t // size
            yield int(block_tables[b, column]) if column < block_tables.shape[1] else -1, t % size


def gather_pa_kv_cache(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor,
    value: Tensor, *, seq_offset: Tensor | None = None, cache_mode: str | None = "Norm",
    is_seq_lens_cumsum: bool = False,
) -> None:  # fmt: skip
    """Write ``key`` and ``value`` in place."""
    for cache, out in ((raw(key_cache), raw(key)), (raw(value_cache), raw(value))):
        size = cache.shape[1 if (cache_mode or "Norm") == "Norm" else 2]
        places = gathered_slots(block_tables, seq_lens, seq_offset, is_seq_lens_cumsum, size)
        for r, (block, offset) in enumerate(places):
            if r == len(out):
                break
            if 0 <= block < len(cache):
                out[r] = read_token(cache, block * size + offset, cache_mode or "Norm").reshape(out[r].shape)
            else:
                out[r] = 0
