"""Prefixes of texts in pages of several groups of layers: found in all of them, or not at all.

Layers that attend to the same tokens are a group: those that attend to all, and those of each window. Tokens
that are kept unquantized beside codes, for a residual window, are another. A group has a pool of pages and a
tree, which tells what a prefix needs there: all pages, or those that the token behind the prefix sees.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Protocol

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvloom.caches.pages import Pages
from kvloom.caches.saving import hold, save_pages
from kvloom.caches.storage import Storage
from kvloom.caches.tokens import PARTIAL
from kvloom.core.indexing import CacheIndex
from kvloom.errors import StateError
from kvloom.paging import Growth, PageRef, PageTable, PrefixTree, check


class Below(Protocol):
    """What lies below the pages of a group, such as a store; ``salt`` is as in ``PrefixCache.begin``."""

    def known(self, tokens: Sequence[int], salt: str) -> list[bool]:
        """Of each full page of a text, whether it might be read."""

    def fetch(
        self,
        tokens: Sequence[int],
        found: list[PageRef],
        salt: str,
        scope: str | None = None,
        first: int = 0,
    ) -> list[PageRef]:
        """The pages ``found`` of a text from ``first`` on, and those that could be read behind them, held."""

    def keep(self, tokens: Sequence[int], refs: Sequence[PageRef], salt: str, first: int = 0) -> None:
        """Take the full pages of a text from ``first`` on, which were sealed."""


@dataclass(slots=True, eq=False)
class GroupTable:
    """The pages that one text holds in a group.

    Attributes:
        table: Its pages.
        first: Number of the first of them in the text.
        place: First slots ``[P]`` of these pages, behind others that stand for earlier ones; and the position
            at which they begin. Made when that is needed.
    """

    table: PageTable
    first: int = 0
    place: tuple[Tensor, int] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the text that have their place, or had it."""
        return self.first * self.table.page_size + self.table.num_tokens

    def fill(self, num_tokens: int) -> bool:
        """Add tokens to the last page if it has room for them, and say whether it has."""
        if has_room := self.table.has_room(num_tokens):
            self.table.fill(num_tokens)
        return has_room

    def fork(self, request: int | None = None) -> "GroupTable":
        """The same tokens, for another text; ``request`` as of ``PageTable.fork``."""
        return GroupTable(self.table.fork(request), self.first)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens of the text, of which a window may have passed some."""
        size = self.table.page_size
        self.first = min(self.first, -(-num_tokens // size))
        self.table.truncate(max(min(num_tokens, self.num_tokens) - self.first * size, 0))
        self.place = None

    def replace(self, refs: Sequence[PageRef]) -> None:
        """Hold what ``PrefixTree.insert`` returned."""
        if refs != [*self.table.pages]:
            self.table.replace(refs)
            self.place = None


class PrefixGroup:
    """The pages of one group of layers.

    Args:
        pages: Where they keep their tokens.
        window: Tokens that a token sees, itself included; ``None`` for all.
        tree: Of their pool, one that was loaded; a new one if ``None``.

    Attributes:
        pages: As above.
        tree: Finds these pages.
        below: What lies below the pages; ``None`` for nothing.
    """

    def __init__(self, pages: Pages, window: int | None = None, tree: PrefixTree | None = None) -> None:
        self.pages = pages
        self.tree = PrefixTree(pages.pool, pages.format.page_size, window) if tree is None else tree
        self.below: Below | None = None

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; ``None`` for all."""
        return self.tree.window

    @property
    def storages(self) -> dict[int, Storage]:
        """Of each layer."""
        return self.pages.storages

    def new_table(self) -> GroupTable:
        """Of a text that begins."""
        return GroupTable(PageTable(self.pages.pool, self.pages.format.page_size))

    def num_missing(self, held: GroupTable, end: int) -> int:
        """Pages that a text lacks for its tokens before ``end``, copies among them."""
        return Growth([held.table], [max(end - held.num_tokens, 0)]).num_pages

    def append(self, held: GroupTable, num_tokens: int) -> None:
        """Room for more tokens of a text; raises as ``Pages.append``."""
        if self.pages.append([held.table], [num_tokens]):
            held.place = None

    def release_passed(self, held: GroupTable, start: int) -> None:
        """Release the pages that no token from position ``start`` on sees."""
        if self.window is not None:
            count = (start - self.window + 1) // held.table.page_size - held.first
            if count > 0:
                held.table.drop_front(count)
                held.first += count
                held.place = None

    def place_of(self, held: GroupTable, storage: Storage) -> tuple[Tensor, int]:
        """``GroupTable.place`` in a storage; it begins at a multiple of ``PARTIAL`` tokens."""
        if held.place is None:
            before = held.first % (lcm(PARTIAL, storage.page_size) // storage.page_size)
            [slots] = self.pages.table([held.table], storage, [before])
            held.place = slots, (held.first - before) * storage.page_size
        return held.place

    def index_of(self, held: Sequence[GroupTable], storage: Storage) -> tuple[CacheIndex, list[int]]:
        """Slots of the tokens of some texts in a storage, and the positions at which they begin."""
        places = [self.place_of(own, storage) for own in held]
        table = pad_sequence([slots for slots, _ in places], True, -1.0)
        return CacheIndex.pages(table, storage.page_size), [base for _, base in places]

    def expect_seen(self, held: GroupTable, start: int) -> None:
        """Raise StateError unless a token at position ``start`` of a text has all that its window shows."""
        first = held.first * held.table.page_size
        if self.window is not None and start > 0 and max(start - self.window + 1, 0) < first:
            raise StateError(
                f"a token at position {start} must have the {self.window} tokens of its window, got those "
                f"from {first} on"
            )


class Prefixes:
    """Finds prefixes in all groups of the layers of a model.

    Args:
        groups: In pages of one size. The first one's events are recorded; it is that of the layers that
            attend to all tokens, if there are such.
    """

    def __init__(self, groups: Sequence[PrefixGroup]) -> None:
        self.groups = list(groups)
        self.page_size = groups[0].pages.format.page_size

    @property
    def main(self) -> PrefixGroup:
        """The first group."""
        return self.groups[0]

    def num_known(self, tokens: Sequence[int], scope: str, max_tokens: int | None = None) -> int:
        """Pages of the longest prefix that is whole in every group, of at most ``max_tokens`` tokens."""
        if len(self.groups) == 1:
            return self.main.tree.num_known(tokens, scope, max_tokens=max_tokens)
        return self._longest(self._are_there(tokens[:max_tokens], scope))

    def begin(
        self,
        texts: Sequence[tuple[Sequence[int], str, str]],
        begins: Sequence[int],
        is_within: Callable[[int, int], bool],
    ) -> tuple[int, list[list[PageTable]]]:
        """The most columns that a batch can begin with: in each row a prefix that is whole in every group.

        Args:
            texts: Of each row, its tokens that may be found, its scope in trees and its salt in stores.
            begins: Of each row, the column of its first token; all rows end in one column.
            is_within: Whether so many tokens of a row, by its number, must not be a prefix.

        Returns:
            Columns, and what ``hold`` returns for each row: pages of as many tokens less than its ``begins``,
            the last one perhaps in part.
        """
        held, requests, events = [], [], self.main.pages.pool.events
        wanted = 0 if self.main.below is None else self._num_columns(texts, begins, is_within)
        for text, begin in zip(texts, begins, strict=True):
            held.append(self.look_up(*text, max(wanted - begin, 0)))
            requests.append(0 if events is None else events.num_requests)
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
        """As ``begin``; of rows with a salt, what stores may have counts, too."""
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
        """Pages that a text has in common with a known one, for ``prefer``; 0 if no group has a window."""
        has_windows = any(group.window is not None for group in self.groups)
        return self.main.tree.num_same(tokens, scope) if has_windows else 0

    def look_up(
        self, tokens: Sequence[int], scope: str, salt: str | None = None, num_tokens: int | None = None
    ) -> list[list[PageRef]]:
        """Retain what is known of a text; read from stores what a longer prefix lacks to be whole.

        Args:
            tokens: Ids from the start of the text, all of which may be found.
            scope: Under which the trees have it.
            salt: Under which the stores have it; ``scope`` if ``None``.
            num_tokens: Of the prefix that is wanted; the longest if ``None``.

        Returns:
            Pages of each group, held by the caller until ``hold`` or ``release`` takes them.
        """
        num_known, salt = self.num_known(tokens, scope), scope if salt is None else salt
        held = [group.tree.match(tokens, scope, num_pages=num_known) for group in self.groups]
        if self.main.below is None:
            return held
        if num_tokens is None:
            num_tokens = self._longest(self._are_there(tokens, scope, salt)) * self.page_size
        end = -(-num_tokens // self.page_size)
        text = tokens[: end * self.page_size]
        for group, refs in zip(self.groups, held, strict=True):
            first = group.tree.first_seen(num_tokens)
            found = group.tree.pages_from(text, scope, first)
            for ref in found:
                group.pages.pool.retain(ref)
            if group.below is not None and len(found) < end - first:
                found = group.below.fetch(text, found, salt, scope, first)
            refs += found
        return held

    def hold(
        self, tokens: Sequence[int], scope: str, num_tokens: int, held: list[list[PageRef]], request: int
    ) -> list[PageTable]:
        """Tables that begin with a prefix that is whole, as ``num_known`` says.

        Args:
            tokens: Of the text.
            scope: Under which it is known.
            num_tokens: Of the prefix, which may end within a page.
            held: What ``look_up`` returned; what is not needed is released.
            request: Whose the tables are, to events.

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
            held: Its pages in each group, or in the first ones.
            tokens: All that are computed.
            scope: Under which they are found.
            num_shared: What ``num_shared`` said when it began.

        Raises:
            StateError: as ``PrefixTree.insert``; groups before have their pages sealed.
        """
        for group, own in zip(self.groups, held, strict=False):
            own.table.claim()
            own.replace(group.tree.insert(tokens, own.table.pages, scope, own.first))
        if 0 < num_shared * self.page_size <= len(tokens):
            self.prefer(held, num_shared)

    def prefer(self, held: Sequence[GroupTable], num_pages: int) -> None:
        """Evict later what makes a prefix of ``num_pages`` sealed pages whole: another text had it, too."""
        for group, own in zip(self.groups, held, strict=False):
            needed, first, pool = group.tree.first_needed(num_pages), own.first, group.pages.pool
            if group.window is not None and needed >= first and own.table.num_pages >= num_pages - first:
                refs = own.table.pages[needed - first : num_pages - first]
                pool.prefer([ref for ref in refs if pool.is_sealed(ref)])

    def saved(self, rename: Callable[[str], str | None] | None = None) -> list[list[Any]]:
        """What can be found in each group, to be pickled: scopes, tokens, and where their pages are saved.

        Args:
            rename: Of a scope, what it is in the process that loads it; ``None`` leaves it out.
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
        """Find what ``saved`` has, in groups that are empty."""
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
        """Of each group, which pages of a text are there, as far as all groups know the text.

        With a ``salt``, of all its pages: those that stores may have under it are there, too.
        """
        if salt is None or self.main.below is None:
            pages, there = list(self.main.tree.packed(tokens)), list[list[bool]]()
            for group in self.groups:
                there.append(group.tree.are_there(pages, scope))
                del pages[len(there[-1]) :]
            return [x[: len(pages)] for x in there]
        if len(self.groups) == 1 and self.main.tree.window is None:
            return [[True] * (len(tokens) // self.page_size)]  # it reads as far as it goes
        there = []
        for group in self.groups:
            known = group.tree.known(tokens, scope)
            stored = known if group.below is None else group.below.known(tokens, salt)
            there.append([a or b for a, b in zip(known, stored, strict=True)])
        return there

    def _longest(self, there: Sequence[Sequence[bool]]) -> int:
        """Pages of the longest prefix that is whole in every group, by what each has of every page."""
        whole = zip(*(g.tree.whole(x) for g, x in zip(self.groups, there, strict=True)), strict=True)
        return max((i + 1 for i, x in enumerate(whole) if all(x)), default=0)
