"""LRU stack with O(log n) reuse distances: how many items were used after a given one. Integers only."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

_SMALLEST: Final = 64


class Item:
    """Item of a ``Recency``.

    Attributes:
        place: Its index in the stack; -1 outside.
    """

    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = -1


class Recency:
    """LRU stack of items and holes, the most recently used on top.

    A hole is room that was in use and is free again: the next item fills the topmost hole, so the stack above
    the items below it does not grow. So ``num_above`` is the maximum that was ever above an item since it was
    pushed, items in use included, if each of these called ``fill``.

    Pushing, pulling and counting take O(log n), by a Fenwick tree over places.
    """

    __slots__ = ("_holes", "_items", "_sums", "num_entries")

    def __init__(self) -> None:
        self.num_entries = 0
        self._holes: list[int] = []  # places, ascending
        self._items: list[Item | None] = []  # by place
        self._sums = [0] * (_SMALLEST + 1)

    def push(self, item: Item | None) -> None:
        """Put an item on top, or a hole if ``None``."""
        if len(self._items) == len(self._sums) - 1:
            self._compact()
        place = len(self._items)
        self._items.append(item)
        if item is None:
            self._holes.append(place)
        else:
            item.place = place
        self._add(place, 1)

    def pull(self, item: Item) -> None:
        """Remove an item that is used now: items above it fill their topmost hole, and a hole moves down."""
        place = self._take(item)
        if self._holes and self._holes[-1] > place:
            self._add(self._holes.pop(), -1)
            insort(self._holes, place)
        else:
            self._add(place, -1)

    def leave_hole(self, item: Item) -> None:
        """Replace an item by a hole, where its room was counted already."""
        insort(self._holes, self._take(item))

    def fill(self) -> None:
        """Fill the topmost hole, if there is one, by something new that is in use."""
        if self._holes:
            self._add(self._holes.pop(), -1)

    def num_above(self, item: Item) -> int:
        """Number of items and holes above an item of the stack."""
        return self.num_entries - self._sum(item.place)

    def _take(self, item: Item) -> int:
        place, item.place = item.place, -1
        self._items[place] = None
        return place

    def _add(self, place: int, number: int) -> None:
        self.num_entries += number
        sums, i = self._sums, place + 1
        while i < len(sums):
            sums[i] += number
            i += i & -i

    def _sum(self, place: int) -> int:
        """Number of entries at this place and below."""
        sums, i, total = self._sums, place + 1, 0
        while i:
            total += sums[i]
            i &= i - 1
        return total

    def _compact(self) -> None:
        """Close the gaps between entries, and make room for as many more."""
        holes, items, self._holes = self._holes, self._items, []
        kept: list[Item | None] = []
        self._items = kept
        for place, item in enumerate(items):
            if item is not None:
                item.place = len(kept)
            elif (i := bisect_left(holes, place)) < len(holes) and holes[i] == place:
                self._holes.append(len(kept))
            else:
                continue
            kept.append(item)
        size = max(_SMALLEST, 2 * len(kept))
        self._sums = sums = [0] + [1] * len(kept) + [0] * (size - len(kept))
        for i in range(1, size + 1):
            if (above := i + (i & -i)) <= size:
                sums[above] += sums[i]
