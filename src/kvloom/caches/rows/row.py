"""One text in one group of layers: its pages, and which of its tokens they hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from kvloom.caches.rows.page_slots import PageSlots
from kvloom.caches.tensors.token_index import PARTIAL
from kvloom.paging import PageRef, PageTable


@dataclass(slots=True, eq=False)
class Row:
    """Page table of one text in a group.

    Attributes:
        table: Its pages.
        first: Number, in the text, of the first page that is held.
        begin: Column of the first token in a batch, after its padding: columns and positions of the text
            differ by it.
        stale: In a residual window, tokens in columns before this one are read as codes.
        is_exact: In a residual window, whether it had every token that was to be read from it.
        place: First slots of these pages after placeholders for earlier ones; made when needed.
        kept: What the store below knows of the text; ``None`` for nothing.
    """

    table: PageTable
    first: int = 0
    begin: int = 0
    stale: int = 0
    is_exact: bool = True
    place: PageSlots | None = None
    kept: Any = None

    def __getstate__(self) -> Any:
        return None, {"table": self.table, "first": self.first}

    def __setstate__(self, state: Any) -> None:
        self.begin = self.stale = 0
        self.is_exact, self.place, self.kept = True, None, None
        self.table, self.first = state[1]["table"], state[1]["first"]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text, those of released pages included."""
        return self.first * self.table.page_size + self.table.num_tokens

    @property
    def start(self) -> int:
        """Column of the first token that is held."""
        return self.begin + self.first * self.table.page_size

    def fill(self, num_tokens: int) -> bool:
        """Add tokens to the last page if it has room for them; return whether it has."""
        if has_room := self.table.has_room(num_tokens):
            self.table.fill(num_tokens)
        return has_room

    def num_passed(self, column: int) -> int:
        """Number of held pages that have no token in ``column`` or after it."""
        return max((column - self.begin) // self.table.page_size - self.first, 0)

    def release_passed(self, column: int) -> bool:
        """Release the pages that have no token in ``column`` or after it; return whether there were any."""
        count = self.num_passed(column)
        if count:
            self.table.drop_front(count)
            self.first += count
            self.place = None
        return count > 0

    def num_before(self, column: int | None = None) -> int:
        """Number of placeholder pages before those of the text in an index.

        They make the index begin at or before ``column``, if it is given, and at a multiple of ``PARTIAL``
        tokens of the text, so that results have the same bits wherever a window has evicted.
        """
        size = self.table.page_size
        aligned = lcm(PARTIAL, size) // size
        missing = 0 if column is None else max(-(-(self.start - column) // size) - self.first % aligned, 0)
        return self.first % aligned + -(-missing // aligned) * aligned

    def fork(self, request: int | None = None) -> "Row":
        """New row with the same tokens, for another text; ``request`` as of ``PageTable.fork``."""
        return Row(self.table.fork(request), self.first, self.begin, self.stale, self.is_exact)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of the text, of which a window may have passed some."""
        if num_tokens >= self.num_tokens:
            return
        table, size = self.table, self.table.page_size
        before = self.first, table.num_pages, table.num_sealed
        table.truncate(max(num_tokens - self.first * size, 0))
        self.first = min(self.first, num_tokens // size)
        if (self.first, table.num_pages, table.num_sealed) != before:
            self.place = self.kept = None

    def replace(self, refs: Sequence[PageRef]) -> None:
        """Hold the pages that ``PrefixTree.insert`` returned."""
        if refs != [*self.table.pages]:
            self.table.replace(refs)
            self.place = None
