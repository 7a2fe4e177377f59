"""Pages of one group of layers, with page tables of texts, a prefix tree and a store below.

Layers that attend to the same tokens form a group: one for layers without a window, one for each window.
Residual windows form further groups.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvloom.caches.format import first_seen
from kvloom.caches.rows.page_slots import PageSlots
from kvloom.caches.rows.pages import Pages
from kvloom.caches.rows.row import Row
from kvloom.caches.tensors.storage import Storage
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

    def keep(self, tokens: Sequence[int], held: Row, salt: str) -> None:
        """Store the full pages of a text that its table holds, which are sealed."""


GroupTable = Row
"""Name of ``Row`` in files of earlier releases."""


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

    def new_table(self) -> Row:
        """Empty table of a new text."""
        return Row(PageTable(self.pages.pool, self.pages.format.page_size))

    def num_missing(self, held: Row, end: int) -> int:
        """Number of pages that a text needs for its tokens before ``end``, copies included."""
        return Growth([held.table], [max(end - held.num_tokens, 0)]).num_pages

    def append(self, held: Row, num_tokens: int) -> None:
        """Make room for more tokens of a text; raises as ``Pages.append``."""
        self.pages.append([held.table], [num_tokens])

    def release_passed(self, held: Row, start: int) -> None:
        """Release the pages that no token from position ``start`` on sees."""
        if self.window is not None:
            held.release_passed(start - self.window + 1)

    def _place_of(self, held: Row, storage: Storage) -> tuple[Tensor, int]:
        """First slots ``[1, P]`` of the pages of a text, and the position of the first, a multiple of
        ``PARTIAL`` by placeholders in front.
        """
        before = held.num_before()
        if held.place is None:
            held.place = PageSlots(self.pages, [held.table], storage, [before])
        return held.place.follow(), (held.first - before) * storage.page_size

    def index_of(self, held: Sequence[Row], storage: Storage) -> tuple[CacheIndex, list[int]]:
        """Slots of the tokens of some texts in a storage, and the positions at which they begin."""
        places = [self._place_of(own, storage) for own in held]
        tables = [slots for slots, _ in places]
        table = tables[0] if len(tables) == 1 else pad_sequence([slots[0] for slots in tables], True, -1.0)
        return CacheIndex.pages(table, storage.page_size), [base for _, base in places]

    def expect_seen(self, held: Row, start: int) -> None:
        """Raise StateError unless a text still holds the window of its token at position ``start``."""
        first = held.start
        if start > 0 and self.window is not None and first_seen(start, self.window) < first:
            raise StateError(
                f"a token at position {start} must have the {self.window} tokens of its window, got those "
                f"from {first} on"
            )
