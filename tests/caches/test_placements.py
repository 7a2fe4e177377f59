"""One matrix of layers: where tokens lie, what a token sees, how they are kept, and all that is done to them.

Each cell is a program of steps, crops, copies of rows, forks and files, in which every step attends: against
attention over the tensors of ``mixed``.
"""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import dataclass, replace

import pytest
import torch
from caches.mixed import DIM, HEADS, INT4, RECENT, mixed, smoothing, tokens
from campaign import times
from oracles.pairs import pairwise
from torch import Tensor

from kvloom.caches import CacheFormat, FixedLayer, PagedLayer, Sequences
from kvloom.caches.format import RESIDUAL_ROLLBACK, num_exact
from kvloom.core.specs import QuantSpec
from kvloom.errors import StateError
from kvloom.paging import PageTable

PROGRAMS = times(1)
WINDOWS = [None, 9, 50]
KINDS = {
    "float32": CacheFormat(),
    "int8": CacheFormat(quant=QuantSpec(8, 32)),
    "int4 rotated": CacheFormat(quant=QuantSpec(4, 32, rotated=True)),
    "int4, newest": CacheFormat(quant=INT4, recent=1),
    "int4, 20 newest": CacheFormat(quant=INT4, recent=RECENT),
    "int4 rotated, 40 newest": CacheFormat(quant=QuantSpec(4, 32, rotated=True), recent=40),
    "int8 smoothed": CacheFormat(quant=QuantSpec(8, 32), smoothing=smoothing()),
    "int4 rotated, smoothed, 20 newest": CacheFormat(
        quant=QuantSpec(4, 32, rotated=True), recent=RECENT, smoothing=smoothing()
    ),
}


@dataclass
class Row:
    """One sequence: every token, and the first that is still known as it was computed."""

    key: Tensor
    known: int = 0

    def remove(self, count: int, recent: int) -> None:
        """Remove the last ``count`` tokens: of the newest before, those that stay are known."""
        length = self.key.shape[1]
        end = max(length - count, 0)
        self.key, self.known = self.key[:, :end], min(max(self.known, length - num_exact(recent)), end)


class Paged:
    """Two layers over the same sequences in pages."""

    def __init__(self, format: CacheFormat, window: int | None) -> None:
        sequences = Sequences(format, window)
        self.hold(sequences, sequences.of_residual())

    def hold(
        self, sequences: Sequences, residual: Sequences | None, old: list[PagedLayer] | None = None
    ) -> None:
        """Be layers over other sequences, of the same tokens as the old ones."""
        self.sequences = sequences
        self.layers = [PagedLayer(sequences.format, sequences, i, residual) for i in range(2)]
        for new, before in zip(self.layers, old or self.layers, strict=True):
            new.num_tokens, new.dtype = before.num_tokens, before.dtype

    def remove(self, counts: list[int]) -> list[int]:
        for sequences in self.layers[0].all_sequences:
            sequences.remove(counts)
        for layer in self.layers:
            layer.num_tokens = self.sequences.num_positions
        return counts

    def select(self, rows: list[int]) -> None:
        for sequences in self.layers[0].all_sequences:
            sequences.select(rows)

    def fork(self) -> Paged:
        other, residual = copy.copy(self), self.layers[0].residual
        other.hold(self.sequences.fork(), None if residual is None else residual.fork(), self.layers)
        return other

    def save(self) -> None:
        self.layers = pickle.loads(pickle.dumps(self.layers))  # noqa: S301 (our own)
        self.sequences = self.layers[0].sequences


class Fixed:
    """Two layers of fixed storage."""

    max_tokens: int | None = 1200

    def __init__(self, format: CacheFormat, window: int | None) -> None:
        self.layers = [FixedLayer(replace(format, max_tokens=self.max_tokens), window) for _ in range(2)]

    def remove(self, counts: list[int]) -> list[int]:
        for layer in self.layers:
            layer.truncate(max(layer.num_tokens - counts[0], 0))
        return [counts[0]] * len(counts)  # they end together

    def select(self, rows: list[int]) -> None:
        for layer in self.layers:
            layer.select(torch.tensor(rows))

    def fork(self) -> Fixed:
        other = copy.copy(self)
        other.layers = [layer.fork() for layer in self.layers]
        return other

    def save(self) -> None:
        self.layers = pickle.loads(pickle.dumps(self.layers))  # noqa: S301 (our own)


class Endless(Fixed):
    """Those of a window, for texts of any length."""

    max_tokens = None


PLACEMENTS: dict[str, type[Paged | Fixed]] = {"paged": Paged, "fixed": Fixed, "endless": Endless}


class Program:
    """Layers somewhere, and what they should hold."""

    def __init__(self, placement: str, kind: str, window: int | None, rows: int) -> None:
        self.format, self.window = KINDS[kind], window
        self.place = PLACEMENTS[placement](self.format, window)
        self.rows = [Row(torch.zeros(HEADS, 0, DIM)) for _ in range(rows)]
        self.seed = self.num_removed = 0

    def append(self, count: int) -> None:
        """A step: both layers get their tokens, each attends when it has them."""
        self.num_removed = max(self.num_removed - count, 0)  # what a window can go back by grows
        self.seed += 10
        for number, layer in enumerate(self.place.layers):
            new, query = (
                tokens(len(self.rows), count, self.seed),
                tokens(len(self.rows), count, self.seed + 1, 4),
            )
            key = new * (number + 1)
            out = layer.append(key, -key).attend(query)
            for b, row in enumerate(self.rows):
                if number == 0:
                    row.key = torch.cat((row.key, new[b]), 1)
                own = row.key * (number + 1)
                kept = self.format
                want = mixed(
                    query[b],
                    own,
                    -own,
                    kept.recent,
                    row.known,
                    self.window,
                    kept.quant,
                    smooth=kept.smoothing,
                )
                torch.testing.assert_close(out[b], want, rtol=1e-4, atol=1e-5)

    def remove(self, counts: list[int]) -> None:
        """Of a window only what it can go back by; then nothing changes."""
        try:
            counts = self.place.remove(counts)
        except StateError:
            assert self.window is not None and self.num_removed + max(counts) > 15
            return
        self.num_removed += max(counts)
        recent = min(self.format.recent, self.window or self.format.recent)
        for row, count in zip(self.rows, counts, strict=True):
            row.remove(count, recent)

    def select(self, rows: list[int]) -> None:
        self.rows = [copy.copy(self.rows[i]) for i in rows]
        self.place.select(rows)

    def fork(self) -> Program:
        other = copy.copy(self)
        other.place = self.place.fork()  # type: ignore[assignment]
        other.rows = [copy.copy(row) for row in self.rows]
        return other

    def step(self, draw: random.Random) -> list[Program]:
        """Something happens; the forks that it makes."""
        size = len(self.rows)
        match draw.choice(["append", "append", "long", "crop", "remove", "select", "fork", "save"]):
            case "append":
                self.append(draw.randint(1, 4))
            case "long":
                self.append(draw.choice([5, 30, 70, 180]))
            case "crop":
                self.remove([draw.choice([1, 3, 16, 40])] * size)
            case "remove":
                self.remove([draw.randint(0, 40) for _ in range(size)])
            case "select":
                self.select([draw.randrange(size) for _ in range(draw.randint(1, 3))])
            case "fork":
                return [self.fork()]
            case "save":
                self.place.save()
        return []


CELLS = [
    (placement, window or 9 if placement == "endless" else window, kind)  # which needs a window
    for placement, window, kind in pairwise(list(PLACEMENTS), WINDOWS, list(KINDS))
]


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(PROGRAMS))
@pytest.mark.parametrize(("placement", "window", "kind"), CELLS)
def test_a_program_attends_to_what_it_stored(
    placement: str, window: int | None, kind: str, seed: int
) -> None:
    draw = random.Random(f"{placement} {window} {kind} {seed}")
    programs = [Program(placement, kind, window, draw.randint(1, 3))]
    programs[0].append(draw.choice([1, 60, 130]))
    for _ in range(10):
        programs += draw.choice(programs).step(draw)
    for program in programs:
        program.append(1)


@pytest.mark.parametrize("removed", [16, 17, 40, 95])
@pytest.mark.parametrize("placement", ["paged", "fixed"])
def test_overwritten_tokens_are_read_as_codes_and_new_ones_are_exact(placement: str, removed: int) -> None:
    program = Program(placement, "int4, 20 newest", None, 2)
    program.append(100)
    program.remove([removed, removed - (10 if placement == "paged" else 0)])
    for count in (1, 3, 30):
        program.append(count)


def test_few_removed_tokens_leave_the_newest_exact() -> None:
    program = Program("paged", "int4, 20 newest", None, 1)
    program.append(100)
    program.remove([RESIDUAL_ROLLBACK])
    assert program.rows[0].known == 100 - RESIDUAL_ROLLBACK - RECENT + 1
    program.append(1)


def test_what_a_later_removal_leaves_is_still_exact() -> None:
    """Positions of before a removal say nothing about what is written behind it."""
    program = Program("paged", "int4, 20 newest", None, 1)
    program.append(100)
    program.remove([60])
    program.append(30)
    program.remove([1])
    assert program.rows[0].known == 40
    program.append(1)


def test_a_step_that_fails_takes_no_token_that_is_read_again() -> None:
    program = Program("fixed", "int4, 20 newest", None, 2)
    program.append(100)
    layer, new = program.place.layers[0], tokens(2, RESIDUAL_ROLLBACK, 5)
    for ring in (layer._ring, layer._recent):
        ring.add(new, new, layer.length, 120)
    program.append(1)


def test_a_prefix_that_was_adopted_is_read_as_codes() -> None:
    program = Program("paged", "int4, 20 newest", None, 1)
    program.append(64)
    other = Program("paged", "int4, 20 newest", None, 1)
    place, sequences = other.place, Sequences(program.place.sequences.pages)
    sequences.adopt([table.fork() for table in program.place.sequences.tables], [0], 64)
    residual = sequences.of_residual()
    assert residual is not None
    residual.adopt([PageTable(residual.pages.pool, residual.format.page_size)], [0], 64)
    place.hold(sequences, residual, program.place.layers)
    other.rows, other.seed = [Row(program.rows[0].key, 64)], 500
    for count in (1, 3, 30):
        other.append(count)
