"""Prefixes of texts in several groups of layers: found in all of them, or not at all.

A group has a pool of pages and a prefix tree. The tree says which pages of a prefix the group needs: all, or
those that the token after the prefix sees. Where all groups have the needed pages, a prefix is complete.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvloom.caches.prefix_group import GroupTable, PrefixGroup
from kvloom.caches.saving import hold, save_pages
from kvloom.paging import PageRef, PageTable, check, whole


class Needed(NamedTuple):
    """Pages that a group needs for a prefix of a text.

    Attributes:
        tokens: Token ids of the prefix, in whole pages.
        first: Number of the first needed page.
        found: Contiguous pages from ``first`` on that are in the tree; the caller does not hold them.
        page_size: Tokens of a page.
    """

    tokens: Sequence[int]
    first: int
    found: list[PageRef]
    page_size: int

    @property
    def num_missing(self) -> int:
        """Number of needed pages after ``found``."""
        return len(self.tokens) // self.page_size - self.first - len(self.found)

    @property
    def start(self) -> int:
        """Number of tokens before the missing pages."""
        return (self.first + len(self.found)) * self.page_size


class Prefixes:
    """Prefix search in all groups of layers of a model.

    Args:
        groups: Groups with pages of one size. The first records events; it is the one without a window, if
            there is such a group.
    """

    def __init__(self, groups: Sequence[PrefixGroup]) -> None:
        self.groups = list(groups)
        self.page_size = groups[0].pages.format.page_size

    @property
    def main(self) -> PrefixGroup:
        """The first group."""
        return self.groups[0]

    def num_known(self, tokens: Sequence[int], scope: str, max_tokens: int | None = None) -> int:
        """Number of pages of the longest complete prefix, of at most ``max_tokens`` tokens."""
        if len(self.groups) == 1:
            return self.main.tree.num_known(tokens, scope, max_tokens=max_tokens)
        return self._longest(self._are_there(tokens[:max_tokens], scope))

    @whole
    def begin(
        self,
        texts: Sequence[tuple[Sequence[int], str, str]],
        begins: Sequence[int],
        is_within: Callable[[int, int], bool],
    ) -> tuple[int, list[list[PageTable]]]:
        """Find the most columns that a batch can begin with, where each row has a complete prefix.

        Args:
            texts: For each row the tokens to look up, the scope in trees and the salt in stores.
            begins: Column of the first token of each row; all rows end in one column.
            is_within: Function of a row's number and a number of tokens: whether its prefix must not end
                there.

        Returns:
            Number of columns, and the result of ``hold`` for each row: tables of that number minus its
            ``begins``; the last page may be partly filled.
        """
        held, requests, events = list[list[list[PageRef]]](), list[int](), self.main.pages.pool.events
        wanted = 0 if self.main.below is None else self._num_columns(texts, begins, is_within)
        try:
            for text, begin in zip(texts, begins, strict=True):
                held.append(self.look_up(*text, max(wanted - begin, 0)))
                requests.append(0 if events is None else events.num_requests)
        except BaseException:
            for refs in held:
                self.release(refs)
            raise
        end = self._num_columns([(*text[:2], None) for text in texts], begins, is_within)
        rows = zip(texts, begins, held, requests, strict=True)
        return end, [
            self.hold(*x[:2], max(end - begin, 0), refs, request) for x, begin, refs, request in rows
        ]

    def _num_columns(
        self,
        texts: Sequence[tuple[Sequence[int], str, str | None]],
        begins: Sequence[int],
        is_within: Callable[[int, int], bool],
    ) -> int:
        """Number of columns as of ``begin``; for rows with a salt, pages that stores may have count, too."""
        fewest = []
        for text in texts:
            there = zip(self.groups, self._are_there(*text), strict=True)
            of_groups = [group.tree.fewest(pages) for group, pages in there]
            fewest.append([max(page) for page in zip(*of_groups, strict=True)])
        num_columns, before = begins[0] + len(texts[0][0]), -1
        while num_columns != before:
            before = num_columns
            for row, begin in enumerate(begins):
                num_tokens = num_columns - begin
                while num_tokens > 0:
                    page = (num_tokens - 1) // self.page_size
                    is_whole = page < len(fewest[row]) and num_tokens >= fewest[row][page]
                    if is_whole and not is_within(row, num_tokens):
                        break
                    num_tokens = page * self.page_size
                num_columns = begin + num_tokens
        return num_columns

    def num_shared(self, tokens: Sequence[int], scope: str) -> int:
        """Number of pages that a text shares with a known one, for ``prefer``; 0 if no group has a window."""
        has_windows = any(group.window is not None for group in self.groups)
        return self.main.tree.num_same(tokens, scope) if has_windows else 0

    @whole
    def look_up(
        self, tokens: Sequence[int], scope: str, salt: str | None = None, num_tokens: int | None = None
    ) -> list[list[PageRef]]:
        """Retain the pages of the longest complete prefix; read missing pages of a longer one from stores.

        Args:
            tokens: Token ids from the start of the text, all of which may be found.
            scope: Key of the text in the trees.
            salt: Key of the text in the stores; ``scope`` if ``None``.
            num_tokens: Length of the wanted prefix; the longest if ``None``.

        Returns:
            Pages of each group, held by the caller until ``hold`` or ``release`` takes them.
        """
        num_known, salt = self.num_known(tokens, scope), scope if salt is None else salt
        held = [group.tree.match(tokens, scope, num_pages=num_known) for group in self.groups]
        if self.main.below is None:
            return held
        try:
            needed = self.needed(tokens, scope, salt, num_tokens)
            for group, refs, own in zip(self.groups, held, needed, strict=True):
                for ref in own.found:
                    group.pages.pool.retain(ref)
                count = len(refs)
                refs += own.found
                if group.below is not None and own.num_missing:
                    group.make_room(own.num_missing)
                    refs[count:] = group.below.fetch(own.tokens, own.found, salt, scope, own.first)
        except BaseException:
            self.release(held)
            raise
        return held

    def release(self, held: Sequence[Sequence[PageRef]]) -> None:
        """Release the pages that ``look_up`` retained in each group."""
        for group, refs in zip(self.groups, held, strict=True):
            for ref in reversed(refs):
                group.pages.pool.release(ref)

    def needed(
        self, tokens: Sequence[int], scope: str, salt: str, num_tokens: int | None = None
    ) -> list["Needed"]:
        """Pages that each group needs for the longest prefix that may be complete; as of ``look_up``."""
        if num_tokens is None:
            num_tokens = self._longest(self._are_there(tokens, scope, salt)) * self.page_size
        text = tokens[: -(-num_tokens // self.page_size) * self.page_size]
        every = []
        for group in self.groups:
            first = group.tree.first_seen(num_tokens)
            every.append(Needed(text, first, group.tree.pages_from(text, scope, first), self.page_size))
        return every

    @whole
    def hold(
        self, tokens: Sequence[int], scope: str, num_tokens: int, held: list[list[PageRef]], request: int
    ) -> list[PageTable]:
        """Make tables that hold a complete prefix, as found by ``num_known``.

        Args:
            tokens: Token ids of the text.
            scope: Key of the text in the trees.
            num_tokens: Length of the prefix, which may end within a page.
            held: Result of ``look_up``; pages that are not needed are released.
            request: Number of the request that owns the tables, for events.

        Returns:
            A table of each group, with the last pages of the prefix that it needs.
        """
        tables, num_pages = [], -(-num_tokens // self.page_size)
        for group, refs in zip(self.groups, held, strict=True):
            pool, table = group.pages.pool, group.new_table().table
            table.request = request
            table.claim()
            first = group.tree.first_seen(num_tokens)
            found = group.tree.pages_from(tokens[: num_pages * self.page_size], scope, first)
            rest = Counter(refs)
            for ref in found:
                if rest[ref]:
                    rest[ref] -= 1
                else:
                    pool.retain(ref)
            for ref in reversed([*rest.elements()]):
                pool.release(ref)
            table.adopt(found)
            table.truncate(num_tokens - first * self.page_size if found else 0)
            tables.append(table)
        return tables

    def seal(self, held: Sequence[GroupTable], tokens: Sequence[int], scope: str, num_shared: int) -> None:
        """Let others find the full pages of a text, and ``prefer`` those that it shares.

        Args:
            held: Its tables in all groups, or in the first ones.
            tokens: Tokens of the text; those after the tables' are not read.
            scope: Key of the text in the trees.
            num_shared: Result of ``num_shared`` when the text began.

        Raises:
            StateError: as ``PrefixTree.seal``; the pages of earlier groups are sealed.
        """
        for group, own in zip(self.groups, held, strict=False):
            own.table.claim()
            if group.tree.seal(own.table, tokens, scope, own.first):
                own.place = None
        if 0 < num_shared * self.page_size <= min(len(tokens), held[0].num_tokens):
            self.prefer(held, num_shared)

    def keep(self, held: Sequence[GroupTable], tokens: Sequence[int], salt: str) -> None:
        """Pass the full pages of a text to the store below each group.

        Args:
            held: Its tables in all groups, or in the first ones, with sealed pages.
            tokens: Tokens of the text; those after the tables' are not read.
            salt: Key of the text in the stores.
        """
        for group, own in zip(self.groups, held, strict=False):
            if group.below is not None:
                group.below.keep(tokens, own, salt)

    def prefer(self, held: Sequence[GroupTable], num_pages: int) -> None:
        """Evict the pages that complete a prefix of ``num_pages`` pages later: another text had it, too."""
        for group, own in zip(self.groups, held, strict=False):
            needed, first, pool = group.tree.first_needed(num_pages), own.first, group.pages.pool
            if group.window is not None and needed >= first and own.table.num_pages >= num_pages - first:
                refs = own.table.pages[needed - first : num_pages - first]
                pool.prefer([ref for ref in refs if pool.is_sealed(ref)])

    def saved(self, rename: Callable[[str], str | None] | None = None) -> list[list[Any]]:
        """Prefixes of each group, to be pickled: scopes, tokens, and the places of their saved pages.

        Args:
            rename: Maps a scope to that of the process that loads it; a result of ``None`` omits the prefix.
        """
        every = []
        for group in self.groups:
            known = [*group.tree.sequences()]
            if rename is not None:
                scopes = [(rename(scope), tokens, refs) for scope, tokens, refs in known]
                known = [(scope, tokens, refs) for scope, tokens, refs in scopes if scope is not None]
            places = save_pages(group.pages, (ref for *_, refs in known for ref in refs))
            every.append([(scope, tokens, [places[ref] for ref in refs]) for scope, tokens, refs in known])
        return every

    def load(self, saved: Sequence[Sequence[Any]]) -> None:
        """Add the prefixes of ``saved`` to empty groups."""
        for group, known in zip(self.groups, saved, strict=True):
            for scope, tokens, places in known:
                refs = hold(group.pages, places)
                first = len(tokens) // self.page_size - len(refs)
                for ref in group.tree.insert(tokens, refs, scope, first):
                    group.pages.pool.release(ref)

    def check(self) -> None:
        """Recompute the invariants of pages and trees.

        Raises:
            StateError: on the first that does not hold.
        """
        for group in self.groups:
            check(group.pages.pool, group.tree, group.pages.all_tables())

    def _are_there(self, tokens: Sequence[int], scope: str, salt: str | None = None) -> list[list[bool]]:
        """Whether each group has each page of a text, as far as all groups know the text.

        With a ``salt``, for all pages of the text; pages that stores may have under it count, too.
        """
        if salt is None or self.main.below is None:
            pages, there = list(self.main.tree.packed(tokens)), list[list[bool]]()
            for group in self.groups:
                there.append(group.tree.are_there(pages, scope))
                del pages[len(there[-1]) :]
            return [x[: len(pages)] for x in there]
        if len(self.groups) == 1 and self.main.tree.window is None:
            return [[True] * (len(tokens) // self.page_size)]  # the store reads as many as it has
        there = []
        for group in self.groups:
            known = group.tree.known(tokens, scope)
            stored = known if group.below is None else group.below.known(tokens, salt)
            there.append([a or b for a, b in zip(known, stored, strict=True)])
        return there

    def _longest(self, there: Sequence[Sequence[bool]]) -> int:
        """Number of pages of the longest complete prefix, given which pages each group has."""
        whole = zip(*(g.tree.whole(x) for g, x in zip(self.groups, there, strict=True)), strict=True)
        return max((i + 1 for i, x in enumerate(whole) if all(x)), default=0)
