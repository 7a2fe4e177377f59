"""A store below a replayed pool: pages, and recurrent states behind some texts, in one budget."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

Item: TypeAlias = tuple[int, bool]
"""The last page of a text, whose id stands for all of the text; and whether its states are meant."""


class Below:
    """What a store has; what nobody wrote or read for longest is evicted first.

    Args:
        capacity: Tokens.
        page_size: Tokens in a page.
        state_tokens: Tokens that take as many bytes as the states behind one text.
    """

    def __init__(self, capacity: int, page_size: int, state_tokens: int) -> None:
        self._room = capacity
        self._sizes = (page_size, state_tokens)
        self._items: OrderedDict[Item, None] = OrderedDict()

    def has(self, item: Item) -> bool:
        """Whether it is there."""
        return item in self._items

    def write(self, items: Iterable[Item]) -> None:
        """Keep those that are not there, the ones of most use last."""
        for item in items:
            if item not in self._items:
                self._items[item] = None
                self._room -= self._sizes[item[1]]
        while self._room < 0:
            (_, is_state), _ = self._items.popitem(last=False)
            self._room += self._sizes[is_state]

    def read(self, items: Iterable[Item]) -> None:
        """Note that those that are there are used, the ones of most use last."""
        for item in items:
            self._items.move_to_end(item)
