"""In which order things were last used, and how many were used after one of them. Integers only."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

_SMALLEST: Final = 64


class Item:
    """Something that is used.

    Attributes:
        place: Where it stands in a ``Recency``; -1 outside.
    """

    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = -1


class Recency:
    """A stack of items, the one that was used last on top, with holes among them.

    A hole is room that was needed once and is not now: what comes next takes the newest hole, and makes the
    stack no deeper for what lies below it. So ``num_above`` is the most that ever lay above an item since it
    was pushed, those that are in use meanwhile included, if each of them took its place by ``fill``.

    Pushing, pulling and counting take O(log n), by a Fenwick tree over places.
    """

    __slots__ = ("_holes", "_items", "_sums", "num_entries")

    def __init__(self) -> None:
        self.num_entries = 0
        self._holes: list[int] = []  # places, ascending
        self._items: list[Item | None] = []  # by place
        self._sums = [0] * (_SMALLEST + 1)

    def push(self, item: Item | None) -> None:
        """Put an item that is outside on top, or a hole."""
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
        """Take an item out, to be used: what was used after it has one more above it from now on."""
        place = self._take(item)
        if self._holes and self._holes[-1] > place:
            self._add(self._holes.pop(), -1)
            insort(self._holes, place)
        else:
            self._add(place, -1)

    def leave_hole(self, item: Item) -> None:
        """Take an item out whose room was counted already."""
        insort(self._holes, self._take(item))

    def fill(self) -> None:
        """Something new is in use: it takes the newest hole, if there is one."""
        if self._holes:
            self._add(self._holes.pop(), -1)

    def num_above(self, item: Item) -> int:
        """Items and holes above one that is inside."""
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
        """Entries at this place and below."""
        sums, i, total = self._sums, place + 1, 0
        while i:
            total += sums[i]
            i &= i - 1
        return total

    def _compact(self) -> None:
        """Close the gaps between entries, and have room for as many more."""
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
