"""The sequences of a cache: the pages they hold, shared by its layers and, copy-on-write, by its forks."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvloom.caches.format import RESIDUAL_ROLLBACK, CacheFormat, num_exact
from kvloom.caches.rows.page_slots import ends_of
from kvloom.caches.rows.pages import Pages
from kvloom.caches.rows.placement import RowPlacement, advance
from kvloom.caches.rows.row import Row
from kvloom.caches.rows.saving import Place, load_tables, save_tables
from kvloom.errors import ArgumentError, ShapeError
from kvloom.paging import Copy, PageTable, PrefixTree, release_all, whole

ROLLBACK = 32
"""Tokens kept beyond a window, so that the last ones can be removed up to this number."""


class Sequences(RowPlacement):
    """B sequences that share pages.

    With a ``window``, pages that no later token can see are released at the next step. When the new tokens
    alone fill the window, only the last of them get pages; until the next step ``previous`` has the state
    before.

    Args:
        pages: Pages and tensors that hold the tokens; a ``CacheFormat`` makes new ones.
        window: Tokens that a token sees, itself included; ``None`` keeps all.
        rollback: Tokens kept beyond the window: at most this many of the last tokens can be removed.
        is_required: Whether all that a window shows must be there. Otherwise ``step.known`` has the first
            valid column.

    Attributes:
        is_padded: Whether ``begins`` are those of a padded batch, which ``remove`` of equal counts keeps.
    """

    def __init__(
        self,
        pages: Pages | CacheFormat,
        window: int | None = None,
        rollback: int = ROLLBACK,
        *,
        is_required: bool = True,
    ) -> None:
        pages = Pages(pages) if isinstance(pages, CacheFormat) else pages
        super().__init__(pages, window, rollback, is_required=is_required)
        if window is not None:
            self.pages.most = self.most_pages if is_required else 0  # few, so that each counts
        self.requests: list[int] = []  # of new sequences, for events
        self.is_padded = False
        self.previous: Sequences | None = None
        self.loaded_residual: Sequences | None = None  # of files of earlier releases
        weakref.finalize(self, _release, self.rows)
        self.pages.users.add(self)

    def __reduce__(self) -> Any:
        """Pickle the held pages, each once, even if other sequences that hold them are saved, too."""
        places = save_tables(self.pages, self.tables)
        made_of = self.pages, self.window, self.rollback, self.is_required
        of_rows = [row.is_exact for row in self.rows], [row.stale for row in self.rows]
        attributes = self.is_recording, self.previous, None, *of_rows, self.is_padded
        return _load, (made_of, attributes, places, self.begins, self.first_held(0), self.num_positions)

    def of_residual(self) -> "Sequences | None":
        """Make the rows of the residual window beside these, which must be empty; ``None`` without one."""
        pages = self.pages.of_residual()
        if pages is None:
            return None
        # A prefix is found by its last full page, which ends up to a page before the text does.
        kept = RESIDUAL_ROLLBACK + (self.format.page_size if self.pages.is_kept else 0)
        return Sequences(pages, self.format.residual_window(self.window), kept, is_required=False)

    @whole
    def adopt(self, tables: Sequence[PageTable], begins: Sequence[int], end: int) -> None:
        """Hold these sequences, whose pages are filled.

        Args:
            tables: Page table of each sequence; with a window, of the last pages only. An empty one of a
                residual window lets all these tokens be read as codes.
            begins: Position of the first token of each sequence: the padding in front of it.
            end: Position after the last tokens.
        """
        size, rows = self.format.page_size, list[Row]()
        for table, begin in zip(tables, begins, strict=True):
            length = max(end - begin, 0)
            first = min(-(-length // size) - table.num_pages, length // size)
            rows.append(Row(table, first, begin, 0 if table.num_pages else end))
        self._replace(rows, end)
        self.is_padded = any(begins)

    def forget(self) -> None:
        """Read all tokens so far as codes: those in this residual window are stale."""
        self.step = None
        for row in self.rows:
            row.stale = self.num_positions

    def reserve(self, batch: int, end: int) -> None:
        """Give each of ``batch`` sequences room for the positions before ``end``, if it does not have it.

        A page that will be written and that others hold, too, is copied in every layer.

        Raises:
            ShapeError: there is another number of sequences; nothing was changed.
            OutOfPages: ``format.max_tokens`` is reached; no token was lost.
            Exception: any error of an allocation; no token was lost.
        """
        if self.rows and len(self.rows) != batch:
            raise ShapeError(f"key must have the {len(self.rows)} sequences of this cache, got {batch}")
        start = self.num_positions
        if self.rows and end <= start:
            return
        if end == start + 1 and advance([self]):
            return
        self._reserve(batch, start, end)

    @whole
    def _reserve(self, batch: int, start: int, end: int) -> None:
        self._forget_previous()
        rows = self.rows or [Row(table) for table in self._new_tables(batch)]
        if self.window is not None and not self.is_recording and not self._can_keep(batch, end - start):
            self._drop_front(start)
            passed = [row.num_passed(end - self._num_held) for row in rows]
            size = self.format.page_size
            if min(row.start + n * size for row, n in zip(rows, passed, strict=True)) > start:
                new = [
                    Row(table, row.first + n, row.begin, row.stale, row.is_exact)
                    for table, row, n in zip(self._new_tables(batch), rows, passed, strict=True)
                ]
                self.pages.append([row.table for row in new], [max(end - row.start, 0) for row in new])
                self.previous = self._twin(self.rows)
                self._hold(new, end)
                return
            is_gathered = self.is_required and any(x.is_gathered for x in self.storages.values())
            run = self.run() if start and is_gathered else None
            if run is not None and self.has_own_pages:
                if self.pages.continue_run(self.tables, run, end - start):
                    self._changed()
        if not self.rows:
            self._changed()
        tables, ends = [row.table for row in rows], ends_of(self.tables)
        # Gone tokens of a residual window have slots again, in front of what follows them in their page.
        counts = [max(end - row.start, 0) - row.table.num_tokens for row in rows]
        if self.pages.append(tables, counts):
            self._run = self._run_after(ends)
        self._tokens.clear()
        self.step = None
        self.rows[:], self.num_positions = rows, end

    @whole
    def own_pages(self) -> None:
        """Copy every page that others hold, too, so that stored tokens can be overwritten.

        Raises:
            OutOfPages: ``format.max_tokens`` is reached; nothing was changed.
        """
        if self.has_own_pages:
            return
        new = self._new_tables(self.size)
        self.pages.append(new, [table.num_tokens for table in self.tables])
        try:
            both = ([ref.id for table in tables for ref in table.pages] for tables in (self.tables, new))
            self.pages.copy([Copy(*pages) for pages in zip(*both, strict=True)])
        except BaseException:
            release_all(new)
            raise
        self._forget_previous()
        for row, table in zip(self.rows, new, strict=True):
            row.table.release()
            row.table = table
        self._changed()

    @whole
    def remove(self, counts: Sequence[int]) -> None:
        """Remove the last ``counts[b]`` tokens of each sequence, at most all, and align their ends.

        Padded sequences keep their padding if all ``counts`` are equal.

        Raises:
            StateError: as ``expect_removable``; nothing was changed.
        """
        self.expect_removable(counts)
        # By the longest text so far, and not by what happens to be in pages.
        oldest = 0 if self.is_required else self.num_positions - num_exact(self.window or 0)
        if self._reaches_previous(counts):
            end = self.num_positions
            self._restore_previous()
            counts = [count - end + self.num_positions for count in counts]
        self._forget_previous()
        end = self.num_positions
        lengths = [max(end - count - begin, 0) for begin, count in zip(self.begins, counts, strict=True)]
        # The longest sequence begins in position 0, a shorter one later, so that all end together.
        self.num_positions = max(lengths, default=0)
        self.is_padded = self.is_padded and len(set(counts)) == 1
        if self.is_padded:
            self.num_positions = max(end - counts[0], 0)
        for row, length in zip(self.rows, lengths, strict=True):
            row.truncate(length)
            begin = row.begin if self.is_padded else self.num_positions - length
            row.stale = min(max(row.stale, oldest) + begin - row.begin, self.num_positions)
            row.begin = begin
        if self.is_recording:
            self._drop_front(self.num_positions)
        self._changed()

    @whole
    def commit(self, tree: PrefixTree, tokens: Sequence[Sequence[int]], salts: Sequence[str]) -> None:
        """Let ``tree`` find the full pages of sequences, each under its salt.

        Args:
            tree: Prefix tree of these pages.
            tokens: Token ids of each sequence, from its first one on.
            salts: Salt of each sequence.

        Raises:
            ArgumentError: sequences were cropped apart.
            StateError: a page is in the tree under other tokens; that sequence and those after it are not
                added.
        """
        if any(self.begins) and not self.is_padded:
            raise ArgumentError(
                "cache must hold whole sequences of one length, or rows padded as when it began, to be "
                "found again"
            )
        for row, ids, salt in zip(self.rows, tokens, salts, strict=True):
            row.table.claim()
            row.replace(tree.insert(ids, row.table.pages, salt, row.first))
        self._changed()

    @whole
    def give_up_passed(self) -> None:
        """Release the pages that no later token sees."""
        if not self.is_recording:
            self._drop_front(self.num_positions)

    @whole
    def select(self, indices: Sequence[int]) -> None:
        """Make sequence i what sequence ``indices[i]`` was; moves tables and no keys or values.

        Raises:
            IndexError: there is no such sequence; nothing was changed.
        """
        rows = [self.rows[i] for i in indices]
        self._replace([row.fork() for row in rows], self.num_positions)

    @whole
    def fork(self) -> "Sequences":
        """New sequences with the same tokens on the same pages."""
        return self._twin([row.fork() for row in self.rows])

    @whole
    def clear(self) -> None:
        """Remove all sequences; free the memory if no fork uses it. The next tokens may have any shape."""
        self._replace([], 0)
        self.is_padded = False
        self.pages.give_back()

    @whole
    def take_back(self, size: int, num_positions: int) -> None:
        """Undo the last ``reserve``, before which there were ``size`` sequences of ``num_positions``."""
        if not size:
            self.clear()
            return
        added = self.num_positions - num_positions
        if added and self.previous is not None:
            self._restore_previous()
        elif added:
            for table in self.tables:  # a sequence that began among them has fewer
                table.truncate(max(table.num_tokens - added, 0))
            self.num_positions = num_positions
            self._changed()

    def _can_keep(self, batch: int, num_new: int) -> bool:
        """Whether new tokens fit without releasing the pages that this window has passed.

        Only for pages that can be found again; those that other windows have passed are released for it.
        """
        if not self.pages.is_kept:
            return False
        missing = batch * (-(-num_new // self.format.page_size) + 1)
        if missing > self.pages.num_spare:
            for user in self.pages.users:
                if user is not self:
                    user.give_up_passed()
        return missing <= self.pages.num_spare

    def _drop_front(self, end: int) -> None:
        """Release the pages that no token from position ``end`` on can see."""
        if self.window is not None:
            for row in self.rows:
                if row.release_passed(end - self._num_held):
                    self._changed()

    def _new_tables(self, batch: int) -> list[PageTable]:
        tables = [PageTable(self.pages.pool, self.format.page_size) for _ in range(batch)]
        for table, request in zip(tables, self.requests, strict=False):
            table.request = request
        return tables

    def _twin(self, rows: Sequence[Row]) -> "Sequences":
        """New sequences with the same state, which hold ``rows``."""
        other = Sequences(self.pages, self.window, self.rollback, is_required=self.is_required)
        other.is_recording, other.is_padded = self.is_recording, self.is_padded
        other._hold(rows, self.num_positions)
        return other

    def _replace(self, rows: Sequence[Row], num_positions: int) -> None:
        self._forget_previous()
        _release(self.rows)
        self._hold(rows, num_positions)

    def _restore_previous(self) -> None:
        previous, self.previous = self.previous, None
        if previous is not None:
            rows = [*previous.rows]
            previous.rows.clear()
            _release(self.rows)
            self._hold(rows, previous.num_positions)

    def _forget_previous(self) -> None:
        if self.previous is not None:
            self.previous._replace([], 0)
            self.previous = None
            self._run = "unknown"


@contextmanager
def reserving(ends: Mapping[Sequences, int], batch: int) -> Iterator[None]:
    """Context in which each of ``ends`` is reserved, or none; if it raises, the room is released."""
    before = list[tuple[Sequences, int, int]]()
    try:
        for sequences, end in ends.items():
            size, start = sequences.size, sequences.num_positions
            sequences.reserve(batch, end)
            before.append((sequences, size, start))
        yield
    except BaseException:
        for sequences, size, start in reversed(before):
            sequences.take_back(size, start)
        raise


def _release(rows: Sequence[Row]) -> None:
    """Release the pages of all rows."""
    release_all([row.table for row in rows])


def _load(
    made_of: tuple[Pages, int | None, int, bool],
    attributes: tuple[Any, ...],
    saved: list[tuple[int, list[Place]]],
    begins: list[int],
    starts: list[int],
    num_positions: int,
) -> Sequences:
    sequences = Sequences(*made_of[:3], is_required=made_of[3])
    sequences.is_recording, sequences.previous, sequences.loaded_residual = attributes[:3]
    is_exact, stale, sequences.is_padded = attributes[3:]
    if isinstance(stale, int):  # one for all, as in files of earlier releases
        stale = [stale] * len(saved)
    size, tables = sequences.format.page_size, load_tables(made_of[0], saved)
    firsts = [(start - begin) // size for begin, start in zip(begins, starts, strict=True)]
    of_rows = zip(tables, firsts, begins, stale, is_exact, strict=True)
    sequences._hold([Row(*x) for x in of_rows], num_positions)
    return sequences
