"""Prefixes of texts in several groups of layers: found in all of them, or not at all.

A group has a pool of pages and a prefix tree. The tree says which pages of a prefix the group needs: all, or
those that the token after the prefix sees. Where all groups have the needed pages, a prefix is complete.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvloom.caches.prefixes.found import Found
from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.rows.row import Row
from kvloom.caches.rows.saving import hold, save_pages
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

    def find(self, tokens: Sequence[int], scope: str) -> Found:
        """What the groups have of a text; raises as ``Found``."""
        return Found(self.groups, tokens, scope)

    def num_known(self, tokens: Sequence[int], scope: str, max_tokens: int | None = None) -> int:
        """Number of pages of the longest complete prefix, of at most ``max_tokens`` tokens."""
        return self.num_whole(self.find(tokens[:max_tokens], scope))

    def num_whole(self, found: Found, max_tokens: int | None = None) -> int:
        """``num_known`` of a text."""
        limit = None if max_tokens is None else max_tokens // self.page_size
        return found.longest(found.fewest_there, limit)

    @whole
    def begin(
        self,
        texts: Sequence[tuple[Sequence[int], str, str]],
        begins: Sequence[int],
        is_within: Callable[[int, int], bool],
    ) -> tuple[int, list[Found], list[list[PageTable]]]:
        """Find the most columns that a batch can begin with, where each row has a complete prefix.

        Args:
            texts: For each row the tokens to look up, the scope in trees and the salt in stores.
            begins: Column of the first token of each row; all rows end in one column.
            is_within: Function of a row's number and a number of tokens: whether its prefix must not end
                there.

        Returns:
            Number of columns; for each row what was found, and the result of ``hold``: tables of that number
            minus its ``begins``, the last page of which may be partly filled.
        """
        every = [self.find(tokens, scope) for tokens, scope, _ in texts]
        held, requests, events = list[list[list[PageRef]]](), list[int](), self.main.pages.pool.events
        is_stored, salts = self.main.below is not None, [salt for *_, salt in texts]
        wanted = self._num_columns(every, begins, is_within, salts) if is_stored else 0
        try:
            for row, begin in enumerate(begins):
                num_tokens = max(wanted - begin, 0)
                found = every[row].again() if row and is_stored else every[row]  # a read may evict pages
                every[row], own = self.look_up(found, salts[row], num_tokens)
                held.append(own)
                requests.append(0 if events is None else events.num_requests)
        except BaseException:
            for refs in held:
                self.release(refs)
            raise
        every = [found.again() for found in every] if is_stored and len(every) > 1 else every
        end = self._num_columns(every, begins, is_within)
        rows = zip(every, begins, held, requests, strict=True)
        return end, every, [self.hold(x, max(end - begin, 0), refs, own) for x, begin, refs, own in rows]

    def _num_columns(
        self,
        every: Sequence[Found],
        begins: Sequence[int],
        is_within: Callable[[int, int], bool],
        salts: Sequence[str] | None = None,
    ) -> int:
        """Number of columns as of ``begin``; with salts, pages that stores may have count, too."""
        fewest = [found.fewest_there for found in every]
        if salts is not None:
            fewest = [x.fewest(self._are_stored(x, salt)) for x, salt in zip(every, salts, strict=True)]
        num_columns, before = begins[0] + len(every[0].tokens), -1
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

    def num_shared(self, found: Found) -> int:
        """Number of pages that a text shares with a known one, for ``prefer``; 0 if no group has a window."""
        has_windows = any(group.window is not None for group in self.groups)
        return len(found.paths[0].pages) if has_windows else 0

    def retain(self, found: Found, num_pages: int, max_tokens: int | None = None) -> list[list[PageRef]]:
        """Retain the pages of each group that a complete prefix of a text needs, and record the look-up."""
        asked = found.pages if max_tokens is None else found.pages[: max_tokens // self.page_size]
        return [
            group.tree.retain(path, num_pages, asked, found.scope, len(found.tokens))
            for group, path in zip(self.groups, found.paths, strict=True)
        ]

    @whole
    def look_up(
        self, found: Found, salt: str, num_tokens: int | None = None
    ) -> tuple[Found, list[list[PageRef]]]:
        """Retain the pages of the longest complete prefix; read missing pages of a longer one from stores.

        Args:
            found: Result of ``find`` for a text, all of which may be found.
            salt: Key of the text in the stores.
            num_tokens: Length of the wanted prefix; the longest if ``None``.

        Returns:
            What is found then, and the pages of each group, held by the caller until ``hold`` or ``release``
            takes them.
        """
        held = self.retain(found, self.num_whole(found))
        if self.main.below is None:
            return found, held
        is_read = False
        try:
            needed = self.needed(found, salt, num_tokens)
            for group, refs, own in zip(self.groups, held, needed, strict=True):
                for ref in own.found:
                    group.pages.pool.retain(ref)
                count = len(refs)
                refs += own.found
                if group.below is not None and own.num_missing:
                    is_read = True
                    group.pages.make_room(own.num_missing)
                    refs[count:] = group.below.fetch(own.tokens, own.found, salt, found.scope, own.first)
        except BaseException:
            self.release(held)
            raise
        return found.again() if is_read else found, held

    def release(self, held: Sequence[Sequence[PageRef]]) -> None:
        """Release the pages that ``look_up`` retained in each group."""
        for group, refs in zip(self.groups, held, strict=True):
            for ref in reversed(refs):
                group.pages.pool.release(ref)

    def needed(self, found: Found, salt: str, num_tokens: int | None = None) -> list["Needed"]:
        """Pages that each group needs for the longest prefix that may be complete; as of ``look_up``."""
        if num_tokens is None:
            num_tokens = found.longest(found.fewest(self._are_stored(found, salt))) * self.page_size
        num_pages, every = -(-num_tokens // self.page_size), []
        text = found.tokens[: num_pages * self.page_size]
        for group, path in zip(self.groups, found.paths, strict=True):
            first = group.tree.first_seen(num_tokens)
            refs = group.pages.pool.refs(group.tree.run(path, first, num_pages))
            every.append(Needed(text, first, refs, self.page_size))
        return every

    @whole
    def hold(self, found: Found, num_tokens: int, held: list[list[PageRef]], request: int) -> list[PageTable]:
        """Make tables that hold a complete prefix of a text.

        Args:
            found: What is found of the text.
            num_tokens: Length of the prefix, which may end within a page.
            held: Result of ``look_up``; pages that are not needed are released.
            request: Number of the request that owns the tables, for events.

        Returns:
            A table of each group, with the last pages of the prefix that it needs.
        """
        tables, num_pages = [], -(-num_tokens // self.page_size)
        for group, path, refs in zip(self.groups, found.paths, held, strict=True):
            pool, table = group.pages.pool, group.new_table().table
            table.request = request
            table.claim()
            first = group.tree.first_seen(num_tokens)
            pages, wanted = group.tree.run(path, first, num_pages), refs
            if pages != [ref.id for ref in refs]:
                wanted, rest = pool.refs(pages), Counter(refs)
                for ref in wanted:
                    if rest[ref]:
                        rest[ref] -= 1
                    else:
                        pool.retain(ref)
                for ref in reversed([*rest.elements()]):
                    pool.release(ref)
            table.adopt(wanted)
            table.truncate(num_tokens - first * self.page_size if wanted else 0)
            tables.append(table)
        return tables

    def seal(self, held: Sequence[Row], tokens: Sequence[int], scope: str, num_shared: int) -> None:
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

    def keep(self, held: Sequence[Row], tokens: Sequence[int], salt: str) -> None:
        """Pass the full pages of a text to the store below each group.

        Args:
            held: Its tables in all groups, or in the first ones, with sealed pages.
            tokens: Tokens of the text; those after the tables' are not read.
            salt: Key of the text in the stores.
        """
        for group, own in zip(self.groups, held, strict=False):
            if group.below is not None:
                group.below.keep(tokens, own, salt)

    def prefer(self, held: Sequence[Row], num_pages: int) -> None:
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

    def _are_stored(self, found: Found, salt: str) -> list[list[bool]]:
        """Whether each group has each page of a text, or its store may have it."""
        if len(self.groups) == 1 and self.main.tree.window is None:
            return [[True] * len(found.pages)]  # the store reads as many as it has
        every = []
        for group, path in zip(self.groups, found.paths, strict=True):
            there = [page >= 0 for page in path.pages] + [False] * (len(found.pages) - len(path.pages))
            stored = there if group.below is None else group.below.known(found.tokens, salt)
            every.append([a or b for a, b in zip(there, stored, strict=True)])
        return every
