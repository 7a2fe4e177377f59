"""Store below a replayed pool: pages, and recurrent states of some texts, in one budget."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

Item: TypeAlias = tuple[int, bool]
"""Id of the last page of a text, which identifies the text; and whether the item is its states."""


class SimulatedStore:
    """Contents of a store, with LRU eviction by writes and reads.

    Args:
        capacity: Number of tokens.
        page_size: Tokens in a page.
        state_tokens: Number of tokens with as many bytes as the states of one text.
    """

    def __init__(self, capacity: int, page_size: int, state_tokens: int) -> None:
        self._room = capacity
        self._sizes = (page_size, state_tokens)
        self._items: OrderedDict[Item, None] = OrderedDict()

    def has(self, item: Item) -> bool:
        """Whether the store has an item."""
        return item in self._items

    def write(self, items: Iterable[Item]) -> None:
        """Write missing items, the most useful last."""
        for item in items:
            if item not in self._items:
                self._items[item] = None
                self._room -= self._sizes[item[1]]
        while self._room < 0:
            (_, is_state), _ = self._items.popitem(last=False)
            self._room += self._sizes[is_state]

    def read(self, items: Iterable[Item]) -> None:
        """Record the use of items that the store has, the most useful last."""
        for item in items:
            self._items.move_to_end(item)
