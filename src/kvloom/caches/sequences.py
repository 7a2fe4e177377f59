"""The sequences of a cache: the pages they hold, shared by its layers and, copy-on-write, by its forks."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvloom.caches.format import RESIDUAL_ROLLBACK, CacheFormat, num_exact
from kvloom.caches.page_slots import ends_of
from kvloom.caches.pages import Pages
from kvloom.caches.placement import Placement
from kvloom.caches.saving import Place, load_tables, save_tables
from kvloom.errors import ArgumentError, ShapeError
from kvloom.paging import Copy, PageTable, PrefixTree, release_all, whole

ROLLBACK = 32
"""Tokens kept beyond a window, so that the last ones can be removed up to this number."""


class Sequences(Placement):
    """B sequences that share pages.

    With a ``window``, pages that no later token can see are released at the next step. When the new tokens
    alone fill the window, only the last of them get pages; until the next step ``previous`` has the state
    before.

    Args:
        pages: Pages and tensors that hold the tokens; a ``CacheFormat`` makes new ones.
        window: Tokens that a token sees, itself included; ``None`` keeps all.
        rollback: Tokens kept beyond the window: at most this many of the last tokens can be removed.
        is_required: Whether all that a window shows must be there. Otherwise ``Step.known`` has the first
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
            self.pages.most = self.most_pages
        self.requests: list[int] = []  # of new sequences, for events
        self.is_padded = False
        self.previous: Sequences | None = None
        self.loaded_residual: Sequences | None = None  # of files of earlier releases
        weakref.finalize(self, release_all, self._tables)
        self.pages.users.add(self)

    def __reduce__(self) -> Any:
        """Pickle the held pages, each once, even if other sequences that hold them are saved, too."""
        places = save_tables(self.pages, self._tables)
        made_of = self.pages, self.window, self.rollback, self.is_required
        attributes = self.is_recording, self.previous, None, self.is_exact, self._stale, self.is_padded
        return _load, (made_of, attributes, places, self.begins, self._first, self.num_positions)

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
        size, firsts = self.format.page_size, []
        for table, begin in zip(tables, begins, strict=True):
            length = max(end - begin, 0)
            firsts.append(begin + min(-(-length // size) - table.num_pages, length // size) * size)
        self._stale = [0 if table.num_pages else end for table in tables]
        self._replace(list(tables), begins, firsts, end)
        self.is_exact, self.is_padded = [True] * len(tables), any(begins)

    def forget(self) -> None:
        """Read all tokens so far as codes: those in this residual window are stale."""
        self._stale, self.step = [self.num_positions] * self.size, None

    def reserve(self, batch: int, end: int) -> None:
        """Give each of ``batch`` sequences room for the positions before ``end``, if it does not have it.

        A page that will be written and that others hold, too, is copied in every layer.

        Raises:
            ShapeError: there is another number of sequences; nothing was changed.
            OutOfPages: ``format.max_tokens`` is reached; no token was lost.
            Exception: any error of an allocation; no token was lost.
        """
        if self._tables and len(self._tables) != batch:
            raise ShapeError(f"key must have the {len(self._tables)} sequences of this cache, got {batch}")
        start = self.num_positions
        if self._tables and end <= start:
            return
        if end == start + 1 and self.advance():
            return
        self._reserve(batch, start, end)

    @whole
    def _reserve(self, batch: int, start: int, end: int) -> None:
        self._forget_previous()
        self.is_exact, self._stale = self.is_exact or [True] * batch, self._stale or [0] * batch
        begin, first = self.begins or [0] * batch, self._first or [0] * batch
        if self.window is not None and not self.is_recording and not self._can_keep(batch, end - start):
            self._drop_front(start)
            last = [x + n for x, n in zip(first, self._num_evicted(end, first), strict=True)]
            if min(last, default=0) > start:
                new = self._new_tables(batch)
                self.pages.append(new, [max(end - x, 0) for x in last])
                self.previous = self._twin(self._tables)
                self._hold(new, begin, last, end)
                return
            is_gathered = self.is_required and any(x.is_gathered for x in self.storages.values())
            run = self.run() if start and is_gathered else None
            if run is not None and self.has_own_pages:
                if self.pages.continue_run(self._tables, run, end - start):
                    self._changed()
        if not self._tables:
            self._changed()
        tables = self._tables or self._new_tables(batch)
        # Gone tokens of a residual window have slots again, in front of what follows them in their page.
        counts = [max(end - x, 0) - table.num_tokens for x, table in zip(first, tables, strict=True)]
        ends = ends_of(self._tables)
        if self.pages.append(tables, counts):
            self._run = self._run_after(ends)
        self._tokens.clear()
        self.step = None
        self._tables[:], self.begins[:], self._first[:] = tables, begin, first
        self.num_positions = end

    @whole
    def own_pages(self) -> None:
        """Copy every page that others hold, too, so that stored tokens can be overwritten.

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
        self._replace(new, self.begins, self._first, self.num_positions)

    @whole
    def remove(self, counts: Sequence[int]) -> None:
        """Remove the last ``counts[b]`` tokens of each sequence, at most all, and align their ends.

        Padded sequences keep their padding if all ``counts`` are equal.

        Raises:
            StateError: as ``expect_removable``; nothing was changed.
        """
        self.expect_removable(counts)
        if not self.is_required:  # by the longest text so far, and not by what happens to be in pages
            oldest = self.num_positions - num_exact(self.window or 0)
            self._stale = [max(x, oldest) for x in self._stale]
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
        for b, length in enumerate(lengths):
            table, evicted = self._tables[b], self._first[b] - self.begins[b]
            table.truncate(min(max(length - evicted, 0), table.num_tokens))
            begin = self.begins[b] if self.is_padded else self.num_positions - length
            self._stale[b] = min(self._stale[b] + begin - self.begins[b], self.num_positions)
            self.begins[b], self._first[b] = begin, begin + min(evicted, self._in_pages(length))
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
        for b, (table, row, salt) in enumerate(zip(self._tables, tokens, salts, strict=True)):
            table.claim()
            table.replace(tree.insert(row, table.pages, salt, self.first_pages[b]))
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
        tables = [self._tables[i] for i in indices]
        begin, first = ([x[i] for i in indices] for x in (self.begins, self._first))
        self._replace([table.fork() for table in tables], begin, first, self.num_positions)
        self.is_exact = [self.is_exact[i] for i in indices]
        self._stale = [self._stale[i] for i in indices]

    @whole
    def fork(self) -> "Sequences":
        """New sequences with the same tokens on the same pages."""
        return self._twin([table.fork() for table in self._tables])

    @whole
    def clear(self) -> None:
        """Remove all sequences; free the memory if no fork uses it. The next tokens may have any shape."""
        self._replace([], [], [], 0)
        self.is_exact, self.is_padded, self._stale = [], False, []
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
            for table in self._tables:  # a sequence that began among them has fewer
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
        """New sequences with the same state, which hold ``tables``."""
        other = Sequences(self.pages, self.window, self.rollback, is_required=self.is_required)
        other.is_recording, other.is_exact = self.is_recording, self.is_exact[: len(tables)]
        other.is_padded, other._stale = self.is_padded, self._stale[: len(tables)]
        other._hold(tables, self.begins, self._first, self.num_positions)
        return other

    def _replace(
        self, tables: Sequence[PageTable], begin: Sequence[int], first: Sequence[int], num_positions: int
    ) -> None:
        self._forget_previous()
        release_all(self._tables)
        self._hold(tables, begin, first, num_positions)

    def _restore_previous(self) -> None:
        previous, self.previous = self.previous, None
        if previous is not None:
            tables = previous.tables
            previous._tables.clear()
            release_all(self._tables)
            self._hold(tables, previous.begins, previous._first, previous.num_positions)

    def _forget_previous(self) -> None:
        if self.previous is not None:
            self.previous._replace([], [], [], 0)
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


def _load(
    made_of: tuple[Pages, int | None, int, bool],
    attributes: tuple[Any, ...],
    tables: list[tuple[int, list[Place]]],
    *positions: Any,
) -> Sequences:
    sequences = Sequences(*made_of[:3], is_required=made_of[3])
    sequences.is_recording, sequences.previous, sequences.loaded_residual = attributes[:3]
    sequences.is_exact, sequences._stale, sequences.is_padded = attributes[3:]
    if isinstance(sequences._stale, int):  # one for all, as in files of earlier releases
        sequences._stale = [sequences._stale] * len(tables)
    sequences._hold(load_tables(made_of[0], tables), *positions)
    return sequences
