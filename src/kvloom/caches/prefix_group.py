"""Pages of one group of layers, with page tables of texts, a prefix tree and a store below.

Layers that attend to the same tokens form a group: one for layers without a window, one for each window.
Residual windows form further groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Protocol

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvloom.caches.page_slots import PageSlots
from kvloom.caches.pages import Pages
from kvloom.caches.storage import Storage
from kvloom.caches.token_index import PARTIAL
from kvloom.core.indexing import CacheIndex
from kvloom.errors import StateError
from kvloom.paging import Growth, PageRef, PageTable, PrefixTree


class Below(Protocol):
    """Lower level of a group's pages, such as a store; ``salt`` is as in ``PrefixCache.begin``."""

    def known(self, tokens: Sequence[int], salt: str) -> list[bool]:
        """Whether each full page of a text might be read."""

    def fetch(
        self,
        tokens: Sequence[int],
        found: list[PageRef],
        salt: str,
        scope: str | None = None,
        first: int = 0,
    ) -> list[PageRef]:
        """Pages ``found`` of a text from ``first`` on, and those read after them; all are held."""

    def keep(self, tokens: Sequence[int], held: "GroupTable", salt: str) -> None:
        """Store the full pages of a text that its table holds, which are sealed."""


@dataclass(slots=True, eq=False)
class GroupTable:
    """Page table of one text in a group.

    Attributes:
        table: Its pages.
        first: Number, in the text, of the first page that is held.
        place: First slots of these pages after placeholders for earlier ones; made when needed.
        kept: What the store below knows of the text; ``None`` for nothing.
    """

    table: PageTable
    first: int = 0
    place: PageSlots | None = None
    kept: Any = None

    def __getstate__(self) -> Any:
        return None, {"table": self.table, "first": self.first}

    def __setstate__(self, state: Any) -> None:
        self.place = self.kept = None
        self.table, self.first = state[1]["table"], state[1]["first"]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text, those of released pages included."""
        return self.first * self.table.page_size + self.table.num_tokens

    def fill(self, num_tokens: int) -> bool:
        """Add tokens to the last page if it has room for them; return whether it has."""
        if has_room := self.table.has_room(num_tokens):
            self.table.fill(num_tokens)
        return has_room

    def fork(self, request: int | None = None) -> "GroupTable":
        """New table with the same tokens, for another text; ``request`` as of ``PageTable.fork``."""
        return GroupTable(self.table.fork(request), self.first)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of the text, of which a window may have passed some."""
        if num_tokens >= self.num_tokens:
            return
        size = self.table.page_size
        self.first = min(self.first, -(-num_tokens // size))
        self.table.truncate(max(num_tokens - self.first * size, 0))
        self.place = self.kept = None

    def replace(self, refs: Sequence[PageRef]) -> None:
        """Hold the pages that ``PrefixTree.insert`` returned."""
        if refs != [*self.table.pages]:
            self.table.replace(refs)
            self.place = None


class PrefixGroup:
    """One group of layers: its pages and what finds them.

    Args:
        pages: Pages and tensors of the layers.
        window: Tokens that a token sees, itself included; ``None`` for all.
        tree: Prefix tree of their pool; ``None`` for a new one.

    Attributes:
        pages: As above.
        tree: Finds these pages.
        below: Store below the pages; ``None`` for none.
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
        """The tensors of each layer."""
        return self.pages.storages

    def new_table(self) -> GroupTable:
        """Empty table of a new text."""
        return GroupTable(PageTable(self.pages.pool, self.pages.format.page_size))

    def num_missing(self, held: GroupTable, end: int) -> int:
        """Number of pages that a text needs for its tokens before ``end``, copies included."""
        return Growth([held.table], [max(end - held.num_tokens, 0)]).num_pages

    def make_room(self, num_pages: int) -> None:
        """Try to have ``num_pages`` free pages to read into; does nothing where the pool has a fixed size."""

    def append(self, held: GroupTable, num_tokens: int) -> None:
        """Make room for more tokens of a text; raises as ``Pages.append``."""
        self.pages.append([held.table], [num_tokens])

    def release_passed(self, held: GroupTable, start: int) -> None:
        """Release the pages that no token from position ``start`` on sees."""
        if self.window is not None:
            count = (start - self.window + 1) // held.table.page_size - held.first
            if count > 0:
                held.table.drop_front(count)
                held.first += count
                held.place = None

    def _place_of(self, held: GroupTable, storage: Storage) -> tuple[Tensor, int]:
        """First slots ``[1, P]`` of the pages of a text, and the position of the first, a multiple of
        ``PARTIAL`` by placeholders in front.
        """
        before = held.first % (lcm(PARTIAL, storage.page_size) // storage.page_size)
        if held.place is None:
            held.place = PageSlots(self.pages, [held.table], storage, [before])
        return held.place.follow(), (held.first - before) * storage.page_size

    def index_of(self, held: Sequence[GroupTable], storage: Storage) -> tuple[CacheIndex, list[int]]:
        """Slots of the tokens of some texts in a storage, and the positions at which they begin."""
        places = [self._place_of(own, storage) for own in held]
        tables = [slots for slots, _ in places]
        table = tables[0] if len(tables) == 1 else pad_sequence([slots[0] for slots in tables], True, -1.0)
        return CacheIndex.pages(table, storage.page_size), [base for _, base in places]

    def expect_seen(self, held: GroupTable, start: int) -> None:
        """Raise StateError unless a text still holds the window of its token at position ``start``."""
        first = held.first * held.table.page_size
        if self.window is not None and start > 0 and max(start - self.window + 1, 0) < first:
            raise StateError(
                f"a token at position {start} must have the {self.window} tokens of its window, got those "
                f"from {first} on"
            )
