"""ScatterPaKvCache: write new keys and values to a paged cache, whole or compressed head by head.

========  ==========  =============================  =================================================
scenario  cache_mode  scatter_mode                   slot of a token
========  ==========  =============================  =================================================
1         PA_NZ       None                           ``slot_mapping[token]``
2         Norm        None, Nct                      ``slot_mapping[token]``
3         Norm        None with a 4-D ``key``        as 5 with ``compress_seq_offset``, else as 4
4         Norm        Alibi                          run of its sequence and head: the last tokens
5         Norm        Rope, Omni                     run of its sequence and head: a window left out
6         Norm        None, Nct without ``value``    ``slot_mapping[token]``
7         Norm        NHSD                           ``slot_mapping[token]``
========  ==========  =============================  =================================================
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvloom.core.checks import can_read
from kvloom.core.indexing import check_slots, prefix_sums, ragged_positions
from kvloom.core.views import KVView, raw
from kvloom.dialects.ascend.arguments import (
    choose_rule,
    expect_apart,
    expect_fits,
    expect_tensors,
    present,
    read_mode,
    refuse_unused,
)
from kvloom.dialects.ascend.average import group_means
from kvloom.dialects.ascend.formats import NHSD, NORM, open_caches, store_sides
from kvloom.dialects.ascend.nct import read_uncollected
from kvloom.dialects.ascend.runs import COMPRESSING, Runs, read_runs
from kvloom.errors import ArgumentError, ShapeError


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offset: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "Norm",
    scatter_mode: str | None = "None",
    strides: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> None:
    """Write ``key`` and ``value`` to ``key_cache`` and ``value_cache``, in place.

    Bits are copied for every dtype, except for the averaged token of Rope (one rounding of an exact mean). If
    two tokens have one slot, the last is written on the CPU; elsewhere one of them.

    Args:
        key: ``[T, H, Dk]``, or padded ``[B, S, H, Dk]`` (scenario 3); any strides, a float, an integer of up
            to 32 bits or an 8-bit float.
        value: As ``key`` with its own head size. For keys only it and ``value_cache`` are ``None``, empty
            (``torch.empty(0)``) or 0-dim.
        key_cache: Norm ``[nb, bs, H, Dk]`` (H = 1 in the compressing modes), NHSD ``[nb, H, bs, Dk]``, PA_NZ
            ``[nb, H * Dk / last, bs, last]`` or ``[nb, H, Dk / last, bs, last]`` with ``last`` elements in 32
            bytes. Dtype of ``key``, any strides without overlap.
        value_cache: As ``key_cache``. In PA_NZ its dtype may differ from the keys'.
        slot_mapping: int32 or int64. The slot ``block * bs + offset`` of each token, ``[T]``; in the
            compressing modes the first slot of the run of each sequence and head, ``[B * H]`` or ``[B, H]``.
            Negative: skip.
        compress_lens: ``[B * H]`` or ``[B, H]``. Alibi: last tokens to keep. Rope: tokens to average into
            one. Omni: tokens to drop.
        compress_seq_offset: The same shape, Rope and Omni: first token of that window, -1 for none.
        seq_lens: ``[B]``, real lengths. They sum to T where ``key`` is 3-D.
        cache_mode: ``"Norm"`` or ``"PA_NZ"``.
        scatter_mode: ``"None"``, ``"Nct"``, ``"Alibi"``, ``"Rope"``, ``"Omni"`` or ``"NHSD"``.
        strides: Nct: elements between tokens of key and of value, in their storage.
        offsets: Nct: elements from the first of the tensor to token 0, for key and for value.

    Raises:
        KVError: an argument does not fit; neither cache was written. Values of index tensors are checked on
            the CPU, elsewhere within ``kvloom.debug()``.

    Source: CANN operator ScatterPaKvCache.
    """
    cache_mode = read_mode("cache_mode", cache_mode, ("Norm", "PA_NZ"))
    scatter_mode = read_mode("scatter_mode", scatter_mode, ("None", "Nct", *COMPRESSING, "NHSD"))
    value, value_cache = present(value), present(value_cache)
    nz = cache_mode == "PA_NZ"
    expect_tensors(key, value, key_cache, value_cache, slot_mapping, may_differ=nz)
    rule = choose_rule(key.ndim, cache_mode, scatter_mode, has_offset=compress_seq_offset is not None)
    if rule != "Nct":
        refuse_unused(rule, strides=strides, offsets=offsets)
    caches = open_caches(None if nz else NHSD if rule == "NHSD" else NORM, key_cache, value_cache)
    for name, x, cache, opened in (
        ("key_cache", key, key_cache, caches[0]),
        ("value_cache", value, value_cache, caches[1]),
    ):
        if x is not None and cache is not None and opened is not None:
            expect_fits(name, cache, opened, x, heads=1 if rule in COMPRESSING else x.shape[-2], nz=nz)
    key, value = read_uncollected(key, value, strides, offsets)
    expect_apart({"key": key, "value": value}, {"key_cache": key_cache, "value_cache": value_cache})
    if rule in COMPRESSING:
        runs = read_runs(rule, seq_lens, compress_lens, compress_seq_offset, heads=key.shape[-2])
        rows, slots = _plan_runs(runs, key, value, slot_mapping, caches)
    else:
        refuse_unused(
            rule, compress_lens=compress_lens, compress_seq_offset=compress_seq_offset, seq_lens=seq_lens
        )
        rows = (key, value)
        if nz:  # one head of all features, as in the views of its caches
            rows = (_one_head(key), None if value is None else _one_head(value))
        if slot_mapping.ndim != 1 or slot_mapping.shape[0] != key.shape[0]:
            raise ShapeError(f"slot_mapping must be [{key.shape[0]}], got {list(slot_mapping.shape)}")
        slots = slot_mapping
        if can_read(slots):
            check_slots("slot_mapping", slots, caches[0].num_slots, skip_negative=True)
            slots = _last_wins(slots)
    store_sides(rows, slots, caches)


def _one_head(x: Tensor) -> Tensor:
    return x.flatten(1).unsqueeze(1)


def _plan_runs(
    runs: Runs, key: Tensor, value: Tensor | None, slot_mapping: Tensor, caches: tuple[KVView, KVView | None]
) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
    """Rows of one head and the slot of each, -1 if it is not written; without synchronization."""
    batch, heads = runs.win.shape
    if key.shape[-2] != heads or (key.ndim == 4 and key.shape[0] != batch):
        raise ShapeError(
            f"compress_lens must have an entry for each of {key.shape[-2]} heads of each sequence of key "
            f"{list(key.shape)}, got {batch} sequences of {heads} heads"
        )
    if slot_mapping.numel() != batch * heads or slot_mapping.ndim not in (1, 2):
        raise ShapeError(
            f"slot_mapping must be [B * H] with B={batch}, H={heads}, got {list(slot_mapping.shape)}"
        )
    if slot_mapping.dtype != runs.dtype:
        raise ShapeError(f"seq_lens must be {slot_mapping.dtype} as slot_mapping, got {runs.dtype}")
    first = slot_mapping.long().reshape(batch, heads)
    if can_read(slot_mapping):
        _check_runs(runs, key, first, caches[0].num_slots)
    if key.ndim == 3:
        starts = prefix_sums(runs.lengths.flatten())
        sequence, position = ragged_positions(starts, total=key.shape[0] if batch else 0)
    else:
        position = torch.arange(key.shape[1], device=key.device).repeat(batch)
        sequence = torch.arange(batch, device=key.device).repeat_interleave(key.shape[1])
    place, is_averaged = runs.places(sequence, position)
    start = first[sequence]
    slots = torch.where((start < 0) | (place < 0), -1, start + place).flatten()
    run = (sequence.unsqueeze(1) * heads + torch.arange(heads, device=key.device)).flatten()

    def rows(x: Tensor) -> Tensor:
        x = x.flatten(0, -2)
        return (
            _with_means(x, runs, run, is_averaged.flatten(), slots) if runs.mode == "Rope" else x
        ).unsqueeze(1)

    if can_read(slots):
        slots = _last_wins(slots, run)
    return (rows(key), None if value is None else rows(value)), slots


def _with_means(x: Tensor, runs: Runs, run: Tensor, is_averaged: Tensor, slots: Tensor) -> Tensor:
    """``x`` ``[T * H, D]`` with the first token of each window replaced by the mean of the window."""
    num_runs = runs.win.numel()
    means = group_means(x, torch.where(is_averaged, run, num_runs), num_runs, runs.win.flatten())
    first = (is_averaged & (slots >= 0)).unsqueeze(1)
    return torch.where(first, raw(means)[run], raw(x)).view(x.dtype)


def _check_runs(runs: Runs, key: Tensor, first: Tensor, num_slots: int) -> None:
    lengths = runs.lengths.flatten()
    if key.ndim == 3 and int(lengths.sum()) != key.shape[0]:
        raise ArgumentError(
            f"seq_lens must sum to the {key.shape[0]} tokens of key, got {int(lengths.sum())}"
        )
    longest = key.shape[0 if key.ndim == 3 else 1]
    if lengths.numel() and not (int(lengths.min()) >= 0 and int(lengths.max()) <= longest):
        raise ArgumentError(f"seq_lens must be in [0, {longest}], got {lengths.tolist()}")
    runs.check()
    for b, h in ((first >= 0) & (first > num_slots - runs.num_slots)).nonzero().tolist()[:1]:
        raise ArgumentError(
            f"slot_mapping must leave the {int(runs.num_slots[b, h])} slots of sequence {b}, head {h} within "
            f"[0, {num_slots}), got first slot {int(first[b, h])}"
        )


def _last_wins(slots: Tensor, rank: Tensor | None = None) -> Tensor:
    """``slots`` with all but the last of equal ones set to skip; the order is that of ``rank``, if given."""
    order = slots.argsort(stable=True) if rank is None else rank.argsort(stable=True)
    if rank is not None:
        order = order[slots[order].argsort(stable=True)]
    ordered = slots[order]
    repeated = torch.zeros_like(slots, dtype=torch.bool)
    repeated[order[:-1]] = ordered[1:] == ordered[:-1]
    return torch.where(repeated, -1, slots)
