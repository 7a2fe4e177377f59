"""Plan of one call of attend, made on the device: items of work. The host needs only shapes.

An item is a tile of query rows of one sequence, by a span of its stored tokens, called a run. Rows are query
heads of new tokens: row r of a key/value head is its query head ``r % R`` of new token ``r // R``.

* A sequence with at most ``FEW`` new tokens is *split*: the tokens that it sees are cut into at most
  ``MAX_SPLITS`` runs of equal length, each an item, and the partial results are merged in order.
* One with more is not: each tile of its rows is one item.

Both follow from the sequence's own lengths, so its bits do not depend on the batch. Shapes: B sequences, H
key/value heads, R query heads for each of them.
"""

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.core.indexing import ENDLESS
from kvloom.ops.impl.triton.launching import LAUNCHED_EARLY, overlaps, wait_for_earlier

FEW: Final = 16
"""Number of new tokens up to which a sequence is split."""

MAX_SPLITS: Final = 64
"""Maximum number of runs of a sequence: enough to fill a device, few enough to merge in one tile."""

MIN_RUN: Final = 256
"""Minimum stored tokens of a run, so that a partial result is small beside its tokens."""

RUN_UNIT: Final = 64
"""Divisor of the length of runs, and a multiple of every tile of tokens."""

_ALIGNED: Final = 4
"""Number of int32 in 16 bytes: Triton compiles again for pointers without this alignment."""

# Kernels can read only constexpr globals.
_FEW: tl.constexpr = tl.constexpr(FEW)
_MAX_SPLITS: tl.constexpr = tl.constexpr(MAX_SPLITS)
_MIN_RUN: tl.constexpr = tl.constexpr(MIN_RUN)
_RUN_UNIT: tl.constexpr = tl.constexpr(RUN_UNIT)
_STEP: tl.constexpr = tl.constexpr(128)


class Lengths(NamedTuple):
    """Lengths and windows, which decide the stored tokens that rows see. Tensors are contiguous."""

    seqstarts: Any
    kvstarts: Any
    first_visible: Any
    window: int  # ENDLESS for none
    skip: int | None = None  # last tokens that a row skips, among those from skip_from on
    skip_from: Any = None


def lengths_of(
    seqstarts: Tensor,
    kvstarts: Tensor,
    first_visible: Tensor | None,
    window: int | None,
    skip: int | None = None,
    skip_from: Tensor | None = None,
) -> Lengths:
    """Lengths of a batch, and windows, from the arguments of the operators."""
    return Lengths(
        seqstarts.contiguous(),
        kvstarts.contiguous(),
        None if first_visible is None else first_visible.contiguous(),
        ENDLESS if window is None else min(window, ENDLESS),
        None if skip is None else min(skip, ENDLESS),
        None if skip_from is None else skip_from.contiguous(),
    )


class Items(NamedTuple):
    """``count[0]`` items: the sequence of each, and its part of it, ``tile * splits + split``."""

    sequence: Any
    part: Any
    count: Any


class AttendPlan(NamedTuple):
    """All items of a call, int32.

    Attributes:
        few: Items of split sequences.
        many: Items of the others.
        row_query: New token of each row that has partial results.
        row_splits: Number of partial results of each row.
        first_row: ``[B]``, the first such row of each split sequence.
        num_rows: ``[1]``, number of rows with partial results.
    """

    few: Items
    many: Items
    row_query: Any
    row_splits: Any
    first_row: Any
    num_rows: Any


def make_plan(
    lengths: Lengths,
    sequences: int,
    num_new: int,
    ratio: int,
    max_splits: int,
    tile_rows: tuple[int, int],
    device: torch.device,
) -> AttendPlan:
    """Launch the planning of a call.

    Args:
        lengths: Lengths of the batch.
        sequences: B.
        num_new: Number of new tokens of all sequences.
        ratio: R.
        max_splits: Maximum number of runs of a sequence, as of ``most_splits``.
        tile_rows: Rows of a tile for few and for many new tokens.
        device: Device of the batch.
    """
    rows = most_rows(num_new, sequences)
    few = (rows * ratio // tile_rows[0] + sequences) * max_splits
    many = num_new * ratio // tile_rows[1] + sequences
    sizes = [few, few, 1, many, many, 1, rows, rows, sequences, 1]
    aligned = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    parts = torch.empty(sum(aligned), dtype=torch.int32, device=device).split(aligned)
    plan = AttendPlan(Items(*parts[:3]), Items(*parts[3:6]), *parts[6:])
    _plan_kernel[(sequences,)](
        lengths,
        plan,
        RATIO=ratio,
        FEW_TILE=tile_rows[0],
        MANY_TILE=tile_rows[1],
        OVERLAPS=overlaps(device),
        num_warps=4,
        enable_fp_fusion=True,
        **LAUNCHED_EARLY[overlaps(device)],
    )
    return plan


def most_splits(max_stored: int) -> int:
    """Maximum number of runs of a sequence of at most ``max_stored`` tokens."""
    return max(min(MAX_SPLITS, -(-max_stored // MIN_RUN)), 1)


def most_rows(num_new: int, sequences: int) -> int:
    """Maximum number of new tokens with partial results, of ``num_new`` in all."""
    return min(num_new, FEW * sequences)


@triton.jit
def sequence_lengths(lengths, b, is_there):
    """First new token, new tokens, stored tokens and the first visible one of sequences b, int64."""
    first_new = tl.load(lengths.seqstarts + b, mask=is_there, other=0).to(tl.int64)
    num_new = tl.load(lengths.seqstarts + b + 1, mask=is_there, other=0).to(tl.int64) - first_new
    first_column = tl.load(lengths.kvstarts + b, mask=is_there, other=0).to(tl.int64)
    num_stored = tl.load(lengths.kvstarts + b + 1, mask=is_there, other=0).to(tl.int64) - first_column
    first_visible = tl.zeros_like(num_stored)
    if lengths.first_visible is not None:
        first_visible = tl.load(lengths.first_visible + b, mask=is_there, other=0).to(tl.int64)
        first_visible = tl.maximum(first_visible, 0)
    return first_new, num_new, num_stored, first_visible


@triton.jit
def runs_of(lengths, num_new, num_stored, first_visible):
    """First visible token, tokens of a run, and number of runs, of split sequences."""
    begin = tl.maximum(first_visible, num_stored - num_new - lengths.window + 1)
    begin = begin // _RUN_UNIT * _RUN_UNIT
    seen = tl.maximum(num_stored - begin, 0)
    run = tl.cdiv(tl.cdiv(seen, _MAX_SPLITS), _RUN_UNIT) * _RUN_UNIT
    run = tl.maximum(run, _MIN_RUN)
    return begin, run, tl.maximum(tl.cdiv(seen, run), 1)


@triton.jit
def _sizes(lengths, b, is_there, RATIO: tl.constexpr, FEW_TILE: tl.constexpr, MANY_TILE: tl.constexpr):
    """Items for few and for many new tokens, rows with partial results, and runs of sequences b, int32."""
    _, num_new, num_stored, first_visible = sequence_lengths(lengths, b, is_there)
    _, _, splits = runs_of(lengths, num_new, num_stored, first_visible)
    is_few = num_new <= _FEW
    few = tl.where(is_few, tl.cdiv(num_new * RATIO, FEW_TILE) * splits, 0)
    many = tl.where(is_few, 0, tl.cdiv(num_new * RATIO, MANY_TILE))
    rows = tl.where(is_few, num_new, 0)
    return few.to(tl.int32), many.to(tl.int32), rows.to(tl.int32), splits.to(tl.int32)


@triton.jit
def _plan_kernel(
    lengths,
    plan,
    RATIO: tl.constexpr,
    FEW_TILE: tl.constexpr,
    MANY_TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Plan one sequence: sum the items of the sequences before it, then write its own."""
    wait_for_earlier(OVERLAPS, True)
    b = tl.program_id(0)
    few_before = tl.full((), 0, tl.int32)
    many_before = tl.full((), 0, tl.int32)
    rows_before = tl.full((), 0, tl.int32)
    step = tl.arange(0, _STEP)
    for start in range(0, b, _STEP):
        is_before = start + step < b
        few, many, rows, _ = _sizes(lengths, start + step, is_before, RATIO, FEW_TILE, MANY_TILE)
        few_before += tl.sum(tl.where(is_before, few, 0))
        many_before += tl.sum(tl.where(is_before, many, 0))
        rows_before += tl.sum(tl.where(is_before, rows, 0))
    few, many, rows, splits = _sizes(lengths, b, True, RATIO, FEW_TILE, MANY_TILE)
    for start in range(0, few, _STEP):
        tl.store(plan.few.sequence + few_before + start + step, b, mask=start + step < few)
        tl.store(plan.few.part + few_before + start + step, start + step, mask=start + step < few)
    for start in range(0, many, _STEP):
        tl.store(plan.many.sequence + many_before + start + step, b, mask=start + step < many)
        tl.store(plan.many.part + many_before + start + step, start + step, mask=start + step < many)
    first_new = tl.load(lengths.seqstarts + b).to(tl.int32)
    new = tl.arange(0, _FEW)
    tl.store(plan.row_query + rows_before + new, first_new + new, mask=new < rows)
    tl.store(plan.row_splits + rows_before + new, splits, mask=new < rows)
    tl.store(plan.first_row + b, rows_before)
    if b == tl.num_programs(0) - 1:
        tl.store(plan.few.count, few_before + few)
        tl.store(plan.many.count, many_before + many)
        tl.store(plan.num_rows, rows_before + rows)
