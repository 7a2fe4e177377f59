"""Which idle pages are evicted, by what is seen of the use of pages. Integers only; imports no torch.

What is worth keeping differs: conversations come back after a while, instructions again and again, most
tails never. No order of pages by one number suits all, so the odds are counted as the pool runs. A page that
goes is remembered by a digest for a while, to see whether it would have been of use.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from heapq import heappop, heappush
from math import inf
from typing import Final

from kvloom.paging.odds import LIMITS, NUM_KINDS, NUM_USES, Odds

_MEMORY: Final = 8
"""Pages remembered, of those that are sealed."""
_LEAD: Final = 0.005
"""How far fewer hits than least recently used would have had are taken, of the pages asked for."""


class _Text:
    """A page's text, be it in the pool or remembered. Pages are named by their ids."""

    __slots__ = ("children", "digest", "is_recent", "page", "parent", "rest", "uses")

    def __init__(self, digest: int) -> None:
        self.digest = digest
        self.page: int | None = None
        self.parent: int | None = None
        self.children = 0  # sealed pages
        self.uses = 0  # times that it became idle, up to those that are told apart
        self.rest: _Rest | None = None  # while it is idle, or gone and remembered
        self.is_recent = False  # least recently used would have it


class _Rest:
    """Pages of one sequence that became idle together, each before its parent, and of which as much is known.

    The pool has those from ``first`` on, but for those that were used again.
    """

    __slots__ = ("age", "checked", "first", "is_listed", "kind", "num_left", "number", "start", "texts")

    def __init__(self, kind: int, number: int, start: int) -> None:
        self.kind, self.number, self.start = kind, number, start
        self.texts: list[_Text] = []
        self.first = 0
        self.num_left = 0  # of the pages, those that were not used since
        self.age = -1  # the one that ``Odds`` has counted it up to
        self.checked = -1  # the clock at that time
        self.is_listed = False  # its first page has no children, so it can go


class WorthOrder:
    """Idle pages, of which those go that are worth least: hits to expect for the time that they take room.

    Pages are told apart by how often they were used and whether a sequence ended with them, and by how long
    they are idle: ``Odds`` counts. Where that finds fewer hits than least recently used would, by a list of
    what that would have, the longest idle go until it has caught up. Operations take O(log n) time, counted
    over all of them.

    A page enters by ``seal``, is idle between ``rest`` and ``wake``, and leaves by ``evict``.
    """

    __slots__ = (
        "_above", "_asked", "_cells", "_clock", "_counted", "_far", "_follows_use", "_lost", "_near",
        "_num_rests", "_odds", "_open", "_rests", "_room", "_sealed", "_slack",
    )  # fmt: skip

    def __init__(self) -> None:
        self._sealed: dict[int, _Text] = {}  # by page
        self._near: OrderedDict[int, _Text] = OrderedDict()  # what least recently used would have, by digest
        self._far: OrderedDict[int, _Text] = OrderedDict()  # what it would have had
        self._room = 0  # pages for it: those that are sealed when pages must go
        self._slack: float = inf  # a little more
        self._clock = 0  # pages that became idle
        self._counted = 0  # the clock when odds were counted
        self._odds = Odds()
        self._rests: list[deque[_Rest]] = [deque() for _ in LIMITS]  # by age, oldest first, to be counted
        self._cells: dict[int, list[tuple[int, _Rest]]] = {}  # by age and kind, heaps of what can go
        self._num_rests = 0
        self._open: _Rest | None = None  # to which a parent can be added
        self._above: int | None = None  # the page that would be
        self._lost = 0.0  # hits that least recently used would have had beyond those there were
        self._asked = 0.0  # of so many, both fading
        self._follows_use = False  # the longest idle go

    def seal(self, page: int, parent: int | None, content: tuple[object, ...]) -> None:
        """A page can be found from now on; it is active.

        Args:
            page: Its id.
            parent: The sealed page before it.
            content: What it holds, its salt among it.
        """
        if parent is None:
            digest = hash(content)
        else:
            above = self._sealed[parent]
            above.children += 1
            digest = hash((above.digest, content))
        text = self._near.get(digest) or self._far.get(digest)
        if text is None:
            text = _Text(digest)
        elif text.page is not None:  # two texts of one digest
            text = _Text(hash((digest, page, self._clock)))
        else:
            self._lost += text.is_recent
            self._used(text)
        self._asked += 1
        text.page, text.parent, text.children = page, parent, 0
        self._sealed[page] = text

    def rest(self, page: int) -> None:
        """A page became idle, after its children."""
        text = self._sealed[page]
        self._clock += 1
        uses = text.uses
        if uses < NUM_USES:
            text.uses = uses = uses + 1
        kind = 2 * uses - (1 if text.children else 2)
        rest = self._open
        if rest is None or page != self._above or rest.kind != kind:
            self._open = rest = _Rest(kind, self._num_rests, self._clock)
            self._num_rests += 1
            self._rests[0].append(rest)
            if not text.children:
                self._list(rest, 0)
        rest.texts.append(text)
        rest.num_left += 1
        text.rest = rest
        self._above = text.parent
        if text.is_recent:
            self._near.move_to_end(text.digest)
        else:
            self._far.pop(text.digest, None)
            self._near[text.digest] = text
            text.is_recent = True
            if len(self._near) > self._slack:
                self._forget()

    def wake(self, page: int) -> None:
        """An idle page is used again."""
        text = self._sealed[page]
        self._asked += 1
        self._lost -= not text.is_recent
        self._used(text)

    def evict(self, num_pages: int) -> list[int]:
        """Evict ``num_pages`` idle pages, or all if there are fewer; each comes after its children."""
        self._open = None
        if not num_pages or not self._sealed:
            return []
        self._room = len(self._sealed)
        self._slack = self._room + self._room // 64
        self._forget()
        if self._clock - self._counted >= min(max(self._room // 4, 1024), self._counted // 2):
            self._count()
        self._grow_older()
        limit = _LEAD * max(self._asked, 4 * self._room)
        self._lost = max(self._lost, -limit)
        self._follows_use = self._lost > (0.75 * limit if self._follows_use else limit)
        gone: list[int] = []
        while len(gone) < num_pages and self._cells:
            cells = self._cells
            if self._follows_use:
                cell = min(cells, key=lambda cell: cells[cell][0][0])
            else:
                cell = min(cells, key=self._odds.worth.__getitem__)
            entry = heappop(cells[cell])
            if not cells[cell]:
                del cells[cell]
            self._empty(entry[1], num_pages, gone)
            if entry[1].is_listed:
                heappush(cells.setdefault(cell, []), entry)
        return gone

    def _empty(self, rest: _Rest, num_pages: int, gone: list[int]) -> None:
        """Evict pages of a rest until there are enough in ``gone``, or none of it can go for now."""
        while rest.first < len(rest.texts):
            text = rest.texts[rest.first]
            page, parent = text.page, text.parent
            if page is None or text.rest is not rest:
                rest.first += 1
                continue
            if text.children:
                break  # until they are gone
            if len(gone) == num_pages:
                return
            rest.first += 1
            gone.append(page)
            del self._sealed[page]
            text.page = None
            if not text.is_recent and text.digest not in self._far:
                self._lose(text)
            if parent is not None:
                above = self._sealed[parent]
                above.children -= 1
                if not above.children and above.rest is not None and above.rest is not rest:
                    self._list(above.rest, bisect_right(LIMITS, self._clock - above.rest.start) - 1)
        rest.is_listed = False

    def _list(self, rest: _Rest, age: int) -> None:
        if not rest.is_listed:
            rest.is_listed = True
            heappush(self._cells.setdefault(NUM_KINDS * age + rest.kind, []), (rest.number, rest))

    def _grow_older(self) -> None:
        """Put what can go into the cells of its age."""
        for cell in sorted(self._cells, reverse=True):
            heap = self._cells[cell]
            start = self._clock - LIMITS[cell // NUM_KINDS + 1]  # older than this cell
            while heap and heap[0][1].start <= start:
                _, rest = heappop(heap)
                rest.is_listed = False
                if rest.num_left:
                    self._list(rest, bisect_right(LIMITS, self._clock - rest.start) - 1)
            if not heap:
                del self._cells[cell]

    def _used(self, text: _Text) -> None:
        """Count that a page is used that was idle or gone."""
        rest, self._open = text.rest, None
        if rest is not None:
            if rest.checked != self._clock:
                self._age(rest)
            self._odds.used[rest.kind][rest.age] += 1
            self._lose(text)

    def _lose(self, text: _Text) -> None:
        """A page is no longer one of its rest."""
        if text.rest is not None:
            text.rest.num_left -= 1
            text.rest = None

    def _age(self, rest: _Rest) -> None:
        """Count the ages that a rest entered."""
        rest.checked = self._clock
        age = bisect_right(LIMITS, self._clock - rest.start) - 1
        if age > rest.age:
            entered = self._odds.entered[rest.kind]
            for i in range(rest.age + 1, age + 1):
                entered[i] += rest.num_left
            rest.age = age

    def _count(self) -> None:
        """Learn from what was seen since the last time."""
        for age in range(len(LIMITS) - 2, -1, -1):
            start, rests = self._clock - LIMITS[age + 1], self._rests[age]
            while rests and rests[0].start <= start:
                rest = rests.popleft()
                if rest.num_left:
                    self._age(rest)
                    self._rests[rest.age].append(rest)
        kept = 0.5 ** ((self._clock - self._counted) / (16 * self._room))
        self._odds.learn(kept)
        self._lost *= kept
        self._asked *= kept
        self._counted = self._clock

    def _forget(self) -> None:
        """Let go what least recently used would, and what that let go long ago."""
        near, far = self._near, self._far
        while len(near) > self._room:
            digest, text = near.popitem(last=False)
            text.is_recent = False
            far[digest] = text
        while len(far) > (_MEMORY - 1) * self._room:
            _, text = far.popitem(last=False)
            if text.page is None:
                self._lose(text)
