"""The sequences of a cache: the pages they hold, shared by its layers and, copy-on-write, by its forks.

A position is one token of every sequence, as in ``[B, H, N, D]``. Sequences end together: one that is
shorter, as after a crop of single rows, has positions in front that hold nothing.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import lcm
from typing import Any, Literal

import torch

from kvloom.caches.format import CacheFormat
from kvloom.caches.pages import Pages, Run
from kvloom.caches.recent import Recent, begin_recent, copied_recent
from kvloom.caches.residual import ResidualTokens
from kvloom.caches.saving import Place, load_tables, save_tables
from kvloom.caches.storage import Storage
from kvloom.caches.tokens import PARTIAL, Step, TokenIndex
from kvloom.core.indexing import CacheIndex
from kvloom.errors import ArgumentError, ShapeError, StateError
from kvloom.paging import Copy, PageTable, PrefixTree, release_all

_FEW = 64
"""Slots that are faster looked up one by one than by operators of torch."""

ROLLBACK = 32
"""Tokens kept behind a window, so that as many of the newest can be removed."""


class Sequences:
    """B sequences that share pages.

    With a ``window``, pages that no later token can see are given back at the next step. When the new tokens
    alone fill the window, only the last of them get pages; until the next step ``previous`` has the sequences
    as they were before.

    Args:
        pages: Where they lie; a ``CacheFormat`` makes new ones.
        window: Tokens that a token sees, itself included; ``None`` keeps all.
        rollback: Tokens kept behind the window, so that as many of the newest can be removed.
    """

    def __init__(
        self, pages: Pages | CacheFormat, window: int | None = None, rollback: int = ROLLBACK
    ) -> None:
        self.pages = Pages(pages) if isinstance(pages, CacheFormat) else pages
        self.window = window
        self.rollback = rollback
        self.requests: list[int] = []  # to events, whose new sequences are
        self.is_recording = False  # keep what the window evicts until the next ``remove``
        self.previous: Sequences | None = None
        self._tables: list[PageTable] = []
        self.begins: list[int] = []  # of each sequence, the position of its first token,
        self._first: list[int] = []  # and of the first one that is still held
        self._indices: dict[tuple[int, torch.device], CacheIndex] = {}
        self._tokens: dict[tuple[int, int, int, torch.device], TokenIndex] = {}
        self.step: Step | None = None
        self._run: Run | Literal["unknown"] | None = "unknown"
        self.recent = self.pages.new_recent(window)
        weakref.finalize(self, release_all, self._tables)
        self.pages.users.add(self)

    def __reduce__(self) -> Any:
        """To be saved: pages that are held, each once, also with other sequences that hold them."""
        places = save_tables(self.pages, self._tables)
        attributes = self.is_recording, self.previous, self.recent
        return _load, ((self.pages, self.window, self.rollback), attributes, places, self.begins, self._first)

    @property
    def format(self) -> CacheFormat:
        """How tokens are kept."""
        return self.pages.format

    @property
    def storages(self) -> dict[int, Storage]:
        """The tensors of each layer."""
        return self.pages.storages

    @property
    def size(self) -> int:
        """B; 0 before the first ``reserve``."""
        return len(self._tables)

    @property
    def num_positions(self) -> int:
        """Positions so far, those included that the window has evicted."""
        return self._first[0] + self._tables[0].num_tokens if self._tables else 0

    @property
    def num_pages_held(self) -> int:
        """Pages that hold tokens of these sequences or their forks; a shared page counts once."""
        return self.pages.pool.num_active

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """The pages of each sequence."""
        return tuple(self._tables)

    def adopt(self, tables: Sequence[PageTable], residuals: Sequence[ResidualTokens | None] = ()) -> None:
        """Hold these sequences of one length, whose pages are filled, and what is unquantized of them."""
        self._replace(list(tables), [0] * len(tables), [0] * len(tables))
        if self.recent is not None:
            self.recent.restore(residuals or [None] * len(tables), self.num_positions)

    def reserve(self, batch: int, end: int) -> None:
        """Give each of ``batch`` sequences room for the positions before ``end``; nothing to do where it has.

        Pages that others hold and that will be written are copied, in every layer.

        Raises:
            ShapeError: there is another number of sequences; nothing was changed.
            OutOfPages: ``format.max_tokens`` is reached; no token was lost.
            Exception: whatever an allocation raises; no token was lost.
        """
        if self._tables and len(self._tables) != batch:
            raise ShapeError(f"key must have the {len(self._tables)} sequences of this cache, got {batch}")
        start = self.num_positions
        if self._tables and end <= start:
            return
        self._forget_previous()
        begin, first = self.begins or [0] * batch, self._first or [0] * batch
        if self.window is not None and not self.is_recording:
            self._drop_front(start)
            last = [x + n for x, n in zip(first, self._num_evicted(end, first), strict=True)]
            if min(last, default=0) > start:
                new = self._new_tables(batch)
                self.pages.append(new, [end - x for x in last])
                self.previous = self._twin(self._tables)
                self._hold(new, begin, last)
                return
            run = self.run() if start and any(x.is_gathered for x in self.storages.values()) else None
            if run is not None and self.has_own_pages:
                if self.pages.continue_run(self._tables, run, end - start):
                    self._changed()
        tables = self._tables or self._new_tables(batch)
        if self.pages.append(tables, [end - start] * batch):
            self._indices.clear()
            self._run = "unknown"
        self._tokens.clear()
        self.step = None
        self._tables[:], self.begins[:], self._first[:] = tables, begin, first

    @contextmanager
    def reserving(self, batch: int, end: int) -> Iterator[None]:
        """``reserve`` for what is stored within the block; if that raises, the room is given back."""
        size, start = self.size, self.num_positions
        self.reserve(batch, end)
        try:
            yield
        except BaseException:
            self.take_back(size, start)
            raise

    def place(self, start: int, end: int, storage: Storage) -> TokenIndex:
        """Where positions ``start .. end`` are in a storage; the same object until something changes."""
        stride, device = storage.stride, storage.device
        found = self._tokens.get((start, end, stride, device))
        if found is None:
            before = [self._num_before(b) for b in range(self.size)]
            if (stride, device) not in self._indices:
                table = self.pages.table(self._tables, storage, before)
                self._indices[stride, device] = CacheIndex(table, None, self.format.page_size)
            bases = [first - n * self.format.page_size for first, n in zip(self._first, before, strict=True)]
            found = TokenIndex.of(self._indices[stride, device], bases, start, end)
            self._tokens[start, end, stride, device] = found
        return found

    def begin(self, start: int, end: int, storage: Storage, visible: TokenIndex) -> Step:
        """The step that stores positions ``start .. end``, and whose attention reads ``visible``."""
        step = self.step
        if step is None or step[:3] != (start, end, storage.stride) or step.visible is not visible:
            if (end - start) * len(self._tables) > _FEW:
                slots = self.place(start, end, storage).slots
            else:
                found = [
                    [self.pages.slot(table, position - first, storage) for position in range(start, end)]
                    for table, first in zip(self._tables, self._first, strict=True)
                ]
                slots = torch.tensor(found, dtype=torch.int64, device=storage.device)
            recent = begin_recent(self.recent, self.size, start, end, storage.device)
            self.step = step = Step(start, end, storage.stride, slots, visible, recent)
        return step

    def run(self) -> Run | None:
        """Where all tokens lie one behind the other, with the sequences in extents of one distance."""
        if self._run == "unknown":
            # Sequences that begin together, and of which the window has evicted as many tokens.
            is_even = not any(self.begins) and len(set(self._first)) <= 1 and self.previous is None
            run = self.pages.run(self._tables) if is_even else None
            self._run = None if run is None or not self._first else run._replace(first=self._first[0])
        return self._run

    @property
    def has_own_pages(self) -> bool:
        """Whether no other sequence holds a page of these."""
        return all(self.pages.pool.is_writable(ref) for table in self._tables for ref in table.pages)

    def own_pages(self) -> None:
        """Hold every page alone, so that stored tokens can be written again; others keep what they have.

        Raises:
            OutOfPages: ``format.max_tokens`` is reached; nothing was changed.
        """
        if self.has_own_pages:
            return
        new = self._new_tables(self.size)
        self.pages.append(new, [table.num_tokens for table in self._tables])
        try:
            both = ([ref.id for table in tables for ref in table.pages] for tables in (self._tables, new))
            self.pages.copy([Copy(*pages) for pages in zip(*both, strict=True)])
        except BaseException:
            release_all(new)
            raise
        self._replace(new, self.begins, self._first)

    def _num_before(self, b: int) -> int:
        """Evicted pages of sequence b that an index counts, to begin at a multiple of ``PARTIAL`` tokens."""
        size = self.format.page_size
        return (self._first[b] - self.begins[b]) % lcm(PARTIAL, size) // size

    def first_held(self, position: int) -> list[int]:
        """Of each sequence, the first position at or behind ``position`` that is held."""
        return [max(first, position) for first in self._first]

    def remove(self, counts: Sequence[int]) -> None:
        """Remove the last ``counts[b]`` tokens of each sequence, at most all; then sequences end together.

        Raises:
            StateError: as ``expect_removable``; nothing was changed.
        """
        self.expect_removable(counts)
        if self._reaches_previous(counts):
            end = self.num_positions
            self._restore_previous()
            counts = [count - end + self.num_positions for count in counts]
        self._forget_previous()
        end = self.num_positions
        ends = [max(end - count, begin) for begin, count in zip(self.begins, counts, strict=True)]
        lengths = [kept - begin for begin, kept in zip(self.begins, ends, strict=True)]
        # The longest sequence begins in position 0, the others as many positions later as they are shorter.
        longest = max(lengths, default=0)
        if self.recent is not None:
            self.recent.removed(longest, [longest - kept for kept in ends])
        for b, length in enumerate(lengths):
            evicted = min(self._first[b] - self.begins[b], length)
            self._tables[b].truncate(length - evicted)
            self.begins[b] = longest - length
            self._first[b] = self.begins[b] + evicted
        if self.is_recording:
            self._drop_front(longest)
        self._changed()

    def expect_removable(self, counts: Sequence[int]) -> None:
        """Raise StateError if tokens that follow such a ``remove`` would see some that are gone."""
        if self.window is None or self._reaches_previous(counts):
            return
        for b, (begin, first, count) in enumerate(zip(self.begins, self._first, counts, strict=True)):
            kept = max(self.num_positions - count, begin)
            if max(kept - self.window + 1, begin) < min(kept, first):
                raise StateError(
                    f"sequence {b} must keep at least {first + self.window - 1 - begin} tokens, since what a "
                    f"window of {self.window} behind fewer would show is gone, got {kept - begin}"
                )

    def commit(self, tree: PrefixTree, tokens: Sequence[Sequence[int]], salts: Sequence[str]) -> None:
        """Let ``tree`` find the full pages of sequences whose tokens these are, each under its salt.

        Raises:
            ArgumentError: sequences are not of one length, or a window has evicted tokens.
            StateError: a page is known under other tokens; that sequence and those after it stay unknown.
        """
        if any(self._first):
            raise ArgumentError("cache must hold whole sequences of one length to be found again")
        for b, (table, row, salt) in enumerate(zip(self._tables, tokens, salts, strict=True)):
            table.claim()
            refs = tree.insert(row, table.pages, salt)
            if self.recent is not None and refs != [*table.pages]:
                self.recent.distrust(b)
            table.replace(refs)
        self._changed()

    def select(self, indices: Sequence[int], recent: Recent | None = None) -> None:
        """Make sequence i what sequence ``indices[i]`` was; moves tables and no keys or values.

        Those that are kept unquantized are copied, unless ``recent`` is the copy.

        Raises:
            IndexError: there is no such sequence; nothing was changed.
        """
        tables = [self._tables[i] for i in indices]
        begin, first = ([x[i] for i in indices] for x in (self.begins, self._first))
        recent = recent or copied_recent(self.recent, indices)
        self._replace([table.fork() for table in tables], begin, first)
        self.recent = recent

    def fork(self) -> "Sequences":
        """Other sequences of the same tokens on the same pages."""
        other = self._twin([table.fork() for table in self._tables])
        other.recent = copied_recent(self.recent, range(self.size))
        return other

    def clear(self) -> None:
        """Forget all sequences; the memory is freed if no fork uses it, and the next tokens may be any."""
        self._replace([], [], [])
        self.recent = self.recent and self.recent.cleared()
        self.pages.give_back()

    def take_back(self, size: int, num_positions: int) -> None:
        """Undo the last ``reserve``, before which there were ``size`` sequences of ``num_positions``."""
        if not size:
            self.clear()
            return
        added = self.num_positions - num_positions
        if self.recent is not None:
            self.recent.removed(num_positions, [0] * size)
            self.recent.keep_only(self.storages)
        if added and self.previous is not None:
            self._restore_previous()
        elif added:
            for table in self._tables:
                table.truncate(table.num_tokens - added)
            self._changed()

    def _num_evicted(self, end: int, first: Sequence[int]) -> list[int]:
        """Tokens in whole pages that neither the window nor the rollback behind it has at ``end``."""
        size, hold = self.format.page_size, (self.window or 0) - 1 + self.rollback
        return [max(end - hold - x, 0) // size * size for x in first]

    def _drop_front(self, end: int) -> None:
        """Give back the pages that nothing from position ``end`` on can see."""
        if self.window is None:
            return
        for b, num_tokens in enumerate(self._num_evicted(end, self._first)):
            if num_tokens:
                self._tables[b].drop_front(num_tokens // self.format.page_size)
                self._first[b] += num_tokens
                self._changed()

    def _new_tables(self, batch: int) -> list[PageTable]:
        tables = [PageTable(self.pages.pool, self.format.page_size) for _ in range(batch)]
        for table, request in zip(tables, self.requests, strict=False):
            table.request = request
        return tables

    def _twin(self, tables: Sequence[PageTable]) -> "Sequences":
        """Sequences of the same state that hold ``tables``."""
        other = Sequences(self.pages, self.window, self.rollback)
        other.is_recording = self.is_recording
        other._hold(tables, self.begins, self._first)
        return other

    def _replace(self, tables: Sequence[PageTable], begin: Sequence[int], first: Sequence[int]) -> None:
        self._forget_previous()
        release_all(self._tables)
        self._hold(tables, begin, first)

    def _hold(self, tables: Sequence[PageTable], begin: Sequence[int], first: Sequence[int]) -> None:
        self._tables[:], self.begins, self._first = tables, list(begin), list(first)
        self._changed()

    def _reaches_previous(self, counts: Sequence[int]) -> bool:
        """Whether a removal goes back to before this step, where everything still is."""
        if self.previous is None or not self.previous.size:
            return False
        return max(self.num_positions - count for count in counts) <= self.previous.num_positions

    def _restore_previous(self) -> None:
        previous, self.previous = self.previous, None
        if previous is not None:
            tables = previous.tables
            previous._tables.clear()
            release_all(self._tables)
            self._hold(tables, previous.begins, previous._first)

    def _forget_previous(self) -> None:
        if self.previous is not None:
            self.previous._replace([], [], [])
            self.previous = None
            self._run = "unknown"

    def _changed(self) -> None:
        self._indices.clear()
        self._tokens.clear()
        self.step = None
        self._run = "unknown"


def _load(
    made_of: tuple[Pages, int | None, int],
    attributes: tuple[bool, Sequences | None, Recent | None],
    tables: list[tuple[int, list[Place]]],
    *positions: list[int],
) -> Sequences:
    sequences = Sequences(*made_of)
    sequences.is_recording, sequences.previous, sequences.recent = attributes
    sequences._hold(load_tables(made_of[0], tables), *positions)
    return sequences
