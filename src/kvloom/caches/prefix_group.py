"""The pages of one group of layers: what texts hold of them, what finds them, and what lies below.

Layers that attend to the same tokens are a group: those that attend to all, and those of each window. Tokens
that are kept unquantized beside codes, for a residual window, are another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Protocol

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvloom.caches.pages import Pages
from kvloom.caches.storage import Storage
from kvloom.caches.tokens import PARTIAL
from kvloom.core.indexing import CacheIndex
from kvloom.errors import StateError
from kvloom.paging import Growth, PageRef, PageTable, PrefixTree


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

    def make_room(self, num_pages: int) -> None:
        """Have so many pages to read into, if there can be more than there are."""

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
