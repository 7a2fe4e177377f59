"""Which sequences of a batch are gathered for torch's attention: worked out on the host, once for all layers.

Shapes: R sequences of one run with Q new tokens each, which see N tokens each; T new tokens of S others.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvloom.core.checks import can_read
from kvloom.core.indexing import check_new, prefix_sums
from kvloom.errors import ArgumentError
from kvloom.ops.scores import Batch, Counts


class GatheredRun(NamedTuple):
    """Adjacent sequences with equal numbers of tokens.

    Attributes:
        first_row: Row of the queries where they begin.
        sequences: The sequences.
        num_rows: Number of new tokens of each.
        num_new: Q, new tokens that see a token; the others are before them.
        positions: ``[R, N]`` int64, the tokens that are seen, in the index.
        slots: ``[R, N]`` int64, their slots.
    """

    first_row: int
    sequences: slice
    num_rows: int
    num_new: int
    positions: Tensor
    slots: Tensor

    def of(self, x: Tensor) -> Tensor:
        """View ``[R, Q, ...]`` of the rows of ``x`` ``[Tq, ...]`` that see a token."""
        rows = len(self.slots), self.num_rows
        own = x[self.first_row : self.first_row + rows[0] * rows[1]]
        return own.view(*rows, *x.shape[1:])[:, -self.num_new :]

    def parts(self, most: int) -> Iterator["GatheredRun"]:
        """The same sequences, at most ``most`` at a time."""
        first, last = self.sequences.start, self.sequences.stop
        for begin in range(first, last, most):
            own = slice(begin, min(begin + most, last))
            of_run = slice(begin - first, own.stop - first)
            row = self.first_row + of_run.start * self.num_rows
            yield GatheredRun(
                row, own, self.num_rows, self.num_new, self.positions[of_run], self.slots[of_run]
            )


class Others(NamedTuple):
    """Sequences that are not gathered.

    Attributes:
        rows: ``[T]`` int64, rows of their queries.
        sequences: ``[S]`` int64, their numbers.
        batch: The batch of them alone.
    """

    rows: Tensor
    sequences: Tensor
    batch: Batch


class GatherPlan(NamedTuple):
    """What is gathered of a batch, the same in all layers of a step."""

    runs: list[GatheredRun]
    others: Others | None


def expect_counts(query: Tensor, batch: Batch) -> None:
    """Check counts against shapes, and against the tensors where reading them is free."""
    counts, sequences = _counts_of(batch), batch.kvstarts.shape[0] - 1
    first = counts.first if counts.first is not None else (0,) * sequences
    if not len(counts.new) == len(counts.stored) == len(first) == sequences:
        raise ArgumentError(f"counts must be of {sequences} sequences, got {len(counts.new)}")
    if sum(counts.new) != query.shape[0]:
        raise ArgumentError(f"counts must sum to the {query.shape[0]} rows of query, got {sum(counts.new)}")
    check_new("counts.stored", list(counts.new), list(counts.stored), [True] * sequences)
    if can_read(batch.kvstarts):
        seen = batch.first_visible
        tensors = (
            ("new", batch.seqstarts.diff(), counts.new),
            ("stored", batch.kvstarts.diff(), counts.stored),
            (
                "first",
                torch.zeros(sequences, dtype=torch.int64) if seen is None else seen.clamp(min=0),
                first,
            ),
        )
        for name, given, told in tensors:
            if tuple(given.tolist()) != tuple(told):
                raise ArgumentError(
                    f"counts.{name} must be {given.tolist()} as in the batch, got {list(told)}"
                )


def _counts_of(batch: Batch) -> Counts:
    """Counts of a batch that has some, as ``why_not`` asks."""
    if batch.counts is None:
        raise ArgumentError("batch must have counts, got None")
    return batch.counts


def plan_of(batch: Batch, least: int, window: int | None, skip: int = 0) -> GatherPlan:
    """GatherPlan of a batch, made by the first layer that has this window and ratio of heads.

    Args:
        batch: Batch with counts.
        least: Number of new tokens of a sequence from which on it is gathered.
        window: Number of last tokens that a query sees; ``None`` for all.
        skip: Number of last tokens that a query skips, its own included.
    """
    plans, key = _counts_of(batch).plans, (least, window, skip)
    table, plan = plans.get(key, (None, None))
    if table is not batch.index.table:
        plan = _made(batch, *key)
        plans[key] = batch.index.table, plan
    found: GatherPlan = plan
    return found


def _made(batch: Batch, least: int, window: int | None, skip: int) -> GatherPlan:
    counts, device = _counts_of(batch), batch.kvstarts.device
    firsts = (0,) * len(counts.new) if counts.first is None else counts.first
    runs, few, rows, row, b = list[GatheredRun](), list[int](), list[int](), 0, 0
    spans = [
        (new, first if window is None else max(first, stored - new - window + 1), stored - skip)
        for new, stored, first in zip(counts.new, counts.stored, firsts, strict=True)
    ]
    for (new, start, last), equal in groupby(spans):
        end, seen = b + len(list(equal)), 0 if window is not None and window <= skip else last - start
        if new >= least and seen > 0:
            own = torch.arange(b, end, device=device).unsqueeze(1).expand(-1, seen)
            positions = torch.arange(start, last, device=device).expand(end - b, -1)
            slots = batch.index.slots(own.flatten(), positions.flatten()).view(positions.shape)
            runs.append(GatheredRun(row, slice(b, end), new, min(new, seen), positions, slots))
        elif new:
            few += range(b, end)
            rows += range(row, row + new * (end - b))
        row, b = row + new * (end - b), end
    return GatherPlan(runs, _others(batch, few, rows, device) if few else None)


def _others(batch: Batch, few: list[int], rows: list[int], device: torch.device) -> Others:
    """Sequences ``few``, whose queries are ``rows``, as a batch of their own."""
    sequences = torch.tensor(few, device=device)
    index = batch.index
    if index.row_starts is None:
        index = replace(index, table=index.table[sequences])
    else:
        index = replace(index, row_starts=index.row_starts[sequences])
    new, stored = (prefix_sums(x.diff()[sequences]) for x in (batch.seqstarts, batch.kvstarts))
    first = None if batch.first_visible is None else batch.first_visible[sequences]
    own = Batch(index, new, stored, first_visible=first)
    return Others(torch.tensor(rows, device=device), sequences, own)
