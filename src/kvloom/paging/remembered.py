"""Texts of pages, in flat arrays: of those in a pool, and of those that were evicted. Imports no torch."""

from array import array
from typing import Any, Final

NEAR: Final = 0
FAR: Final = 1
"""Lists of texts, which are also the numbers of their heads: pages that LRU would have, and that it would
have evicted."""
_HEADS: Final = (NEAR, FAR)
_NUM_PARTS: Final = 256


class Texts:
    """Texts of pages as numbers: indices of arrays, so that Python's garbage collector visits none of them.

    A text is found by its digest, in one of many small dicts, so that none of them takes long to grow. The
    two lists are doubly linked; a text is in one at most.

    Attributes:
        digests: Hash of a text.
        pages: Its page; -1 if it was evicted.
        parents: Page before it; -1 at the start of a sequence.
        children: Number of sealed pages after it.
        uses: Number of times that it became idle.
        rests: Where it belongs while it is idle, or evicted and remembered.
        lists: ``NEAR``, ``FAR`` or -1 for none.
    """

    __slots__ = (
        "_after", "_before", "_free", "_parts", "children", "digests", "lengths", "lists", "pages", "parents",
        "rests", "uses",
    )  # fmt: skip

    def __init__(self) -> None:
        self.digests = array("q", _HEADS)
        self.rests: list[Any] = [None, None]
        self.pages, self.parents, self.children = array("q", _HEADS), array("q", _HEADS), array("q", _HEADS)
        self.uses, self.lists = array("q", _HEADS), array("q", _HEADS)
        self._before, self._after = array("q", _HEADS), array("q", _HEADS)
        self._free = array("q")  # numbers that are not in use
        self._parts: list[dict[int, int]] = [{} for _ in range(_NUM_PARTS)]
        self.lengths = [0, 0]

    def new(self, digest: int) -> int:
        """Number of a new text, which is in no list and not found."""
        if self._free:
            text = self._free.pop()
        else:
            text = len(self.digests)
            self.rests.append(None)
            for of_each in self._arrays():
                of_each.append(0)
        self.digests[text], self.uses[text] = digest, 0
        self.rests[text], self.lists[text] = None, -1
        return text

    def drop(self, text: int) -> None:
        """Give back the number of a text that is in no list."""
        self._free.append(text)

    def find(self, digest: int) -> int:
        """Text of a list; -1 if there is none with this digest."""
        return self._parts[digest % _NUM_PARTS].get(digest, -1)

    def move(self, text: int, to: int) -> None:
        """Put a text at the end of a list, out of another one; -1 for none."""
        digest, old = self.digests[text], self.lists[text]
        if old >= 0:
            before, after = self._before[text], self._after[text]
            self._after[before], self._before[after] = after, before
            self.lengths[old] -= 1
        if to < 0:
            self._parts[digest % _NUM_PARTS].pop(digest, None)
        else:
            if old < 0:
                self._parts[digest % _NUM_PARTS][digest] = text
            last = self._before[to]
            self._before[text], self._after[text] = last, to
            self._after[last] = self._before[to] = text
            self.lengths[to] += 1
        self.lists[text] = to

    def first(self, of: int) -> int:
        """The text that has been in a list for the longest time; the list must not be empty."""
        return self._after[of]

    def _arrays(self) -> tuple["array[int]", ...]:
        return (
            self.digests, self.pages, self.parents, self.children, self.uses, self.lists, self._before,
            self._after,
        )  # fmt: skip
