"""Lists of pages, which a page leaves without a search. Integers only; imports no torch."""

from collections.abc import Iterable, Iterator
from typing import Final

FREE: Final = -1
IDLE: Final = -2
PASSED: Final = -3
"""The lists, which are also the indices of their heads: the last items of both flat lists."""


class Rings:
    """Doubly linked lists of pages, each closed by its head. A page is in one of them at most.

    Args:
        num_pages: Number of pages, which are in no list yet.

    Attributes:
        before: The page or head before each page, and before each head.
        after: The page or head after each.
    """

    __slots__ = ("after", "before")

    def __init__(self, num_pages: int = 0) -> None:
        self.after = [0] * num_pages + [PASSED, IDLE, FREE]
        self.before = self.after.copy()

    def each(self, ring: int) -> Iterator[int]:
        """Pages of a list from the first on. Valid until the list changes."""
        page = self.after[ring]
        while page >= 0:
            yield page
            page = self.after[page]

    def add(self, ring: int, pages: Iterable[int]) -> None:
        """Put pages at the end of a list."""
        before, after = self.before, self.after
        last = before[ring]
        for page in pages:
            before[page], after[last] = last, page
            last = page
        after[last], before[ring] = ring, last

    def remove(self, pages: Iterable[int]) -> None:
        """Take pages out of their lists."""
        before, after = self.before, self.after
        for page in pages:
            last, then = before[page], after[page]
            after[last], before[then] = then, last

    def pop(self, ring: int, num_pages: int) -> list[int]:
        """Take ``num_pages`` pages from the end of a list, the last one first."""
        popped, before = list[int](), self.before
        page = before[ring]
        for _ in range(num_pages):
            popped.append(page)
            page = before[page]
        before[ring], self.after[page] = page, ring
        return popped

    def grown(self, new: list[int]) -> "Rings":
        """Copy with new pages, whose ids follow the others, before those of ``FREE``; the last one first."""
        twin, num_old = Rings(), len(self.after) - 3
        twin.before = self.before[:num_old] + new[1:] + [FREE][: len(new)] + self.before[num_old:]
        twin.after = self.after[:num_old] + [self.after[FREE]][: len(new)] + new[:-1] + self.after[num_old:]
        if new:
            twin.before[self.after[FREE]], twin.after[FREE] = new[0], new[-1]
        return twin
