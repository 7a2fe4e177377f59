"""Eviction policy that learns from the use of pages. Integers only; imports no torch.

Texts differ: conversations are used again after a while, instructions again and again, most ends never. No
fixed order suits all, so the pool counts how often pages are used again. The digest of an evicted page is
remembered for a while, to see whether the page would have been used.
"""

from array import array
from bisect import bisect_right
from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import Any, Final

from kvloom.paging.odds import LIMITS, NUM_KINDS, NUM_USES, Odds
from kvloom.paging.remembered import FAR, NEAR, Texts

_MEMORY: Final = 8
"""Number of remembered pages for each sealed page."""
_LEAD: Final = 0.005
"""Tolerated loss of hits against LRU, as a share of the pages asked for."""

_AT_ONCE: Final = 64
"""Number of rests that grow older for each page that is evicted, so that no eviction takes long."""


class _Text:
    """Text of a page as an earlier release pickled it."""

    __slots__ = ("children", "digest", "is_recent", "page", "parent", "rest", "uses")


class _Rest:
    """Pages of one sequence and kind that became idle together, each before its parent.

    The pool has those from ``first`` on, except for those that were used again.
    """

    __slots__ = ("age", "checked", "first", "is_listed", "kind", "num_left", "number", "start", "texts")

    def __init__(self, kind: int, number: int, start: int) -> None:
        self.kind, self.number, self.start = kind, number, start
        self.texts = array("q")
        self.first = 0
        self.num_left = 0  # number of pages that were not used since
        self.age = -1  # last age that ``Odds`` has counted
        self.checked = -1  # the clock at that time
        self.is_listed = False  # its first page has no children, so it can be evicted


class WorthOrder:
    """Idle pages in the order of eviction: fewest expected hits for their time in the pool first.

    ``Odds`` counts hits by a page's number of uses, whether a sequence ended with it, and its idle time. A
    list of the pages that LRU would have tells whether LRU would find more: then LRU order is used until the
    hits have caught up. Operations take O(log n) amortized time.

    A page enters by ``seal``, is idle between ``rest`` and ``wake``, and leaves by ``evict``.
    """

    __slots__ = (
        "_above", "_asked", "_cells", "_clock", "_counted", "_counting", "_follows_use", "_lost",
        "_num_rests", "_odds", "_open", "_rests", "_room", "_sealed", "_slack", "_texts", "num_sealed",
    )  # fmt: skip

    def __init__(self) -> None:
        self._texts = Texts()
        self._sealed = array("q")  # text of each page; -1 if it is not sealed
        self.num_sealed = 0
        self._room = 0  # length of ``NEAR``: number of sealed pages at the last eviction
        self._slack: float = inf  # length at which ``NEAR`` is trimmed, a little more
        self._clock = 0  # number of pages that became idle
        self._counted = 0  # clock when ``_count_all_ages`` last ended
        self._counting: tuple[int, int] | None = None  # age that it counts, and the clock when it began
        self._odds = Odds()
        self._rests: list[deque[_Rest]] = [deque() for _ in LIMITS]  # by counted age, oldest first
        self._cells: dict[int, list[tuple[int, _Rest]]] = {}  # heaps of evictable rests, by age and kind
        self._num_rests = 0
        self._open: _Rest | None = None  # rest to which the next parent can be added
        self._above = -1  # id of that parent
        self._lost = 0.0  # hits that LRU would have had more, with decay
        self._asked = 0.0  # pages asked for, with decay
        self._follows_use = False  # evict in LRU order

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        own = state[1]
        if "_near" in own:
            self._read_objects(own)
            return
        for name, value in own.items():
            setattr(self, name, value)

    def _read_objects(self, old: dict[str, Any]) -> None:
        """Read what an earlier release pickled: what was learned, and pages, whose ages begin anew."""
        WorthOrder.__init__(self)
        self._odds = old["_odds"]
        for page, text in old["_sealed"].items():
            self.seal(page, None, (text.digest,))
            own = self._sealed[page]
            self._texts.digests[own], self._texts.children[own] = text.digest, text.children
            self._texts.parents[own] = -1 if text.parent is None else text.parent
            self._texts.uses[own] = max(text.uses - 1, 0)
        for text in (*old["_far"].values(), *old["_near"].values()):
            if text.page is not None and text.rest is not None:
                self.rest(text.page)
        for name in ("_lost", "_asked", "_follows_use"):
            setattr(self, name, old[name])

    def seal(self, page: int, parent: int | None, content: tuple[object, ...]) -> None:
        """Add an active page that was sealed.

        Args:
            page: Id of the page.
            parent: Id of the sealed page before it.
            content: Salt and tokens of the page.
        """
        texts, digest = self._texts, hash(content)
        if parent is not None:
            above = self._sealed[parent]
            texts.children[above] += 1
            digest = hash((texts.digests[above], content))
        text = texts.find(digest)
        if text >= 0 and texts.pages[text] >= 0:  # two texts with one digest
            text, digest = -1, hash((digest, page, self._clock))
        if text < 0:
            text = texts.new(digest)
        else:
            self._lost += texts.lists[text] == NEAR
            self._count_use(text)
        self._asked += 1
        texts.pages[text], texts.parents[text] = page, -1 if parent is None else parent
        texts.children[text] = 0
        self._sealed.extend([-1] * (page + 1 - len(self._sealed)))
        self._sealed[page] = text
        self.num_sealed += 1

    def rest(self, page: int) -> None:
        """Record that a page became idle, after its children."""
        texts, text = self._texts, self._sealed[page]
        self._clock += 1
        uses = texts.uses[text]
        if uses < NUM_USES:
            texts.uses[text] = uses = uses + 1
        kind = 2 * uses - (1 if texts.children[text] else 2)
        rest = self._open
        if rest is None or page != self._above or rest.kind != kind:
            self._open = rest = _Rest(kind, self._num_rests, self._clock)
            self._num_rests += 1
            self._rests[0].append(rest)
            if not texts.children[text]:
                self._list_rest(rest, 0)
        rest.texts.append(text)
        rest.num_left += 1
        texts.rests[text] = rest
        self._above = texts.parents[text]
        texts.move(text, NEAR)
        if texts.lengths[NEAR] > self._slack:
            self._forget()

    def wake(self, page: int) -> None:
        """Record that an idle page is used again."""
        text = self._sealed[page]
        self._asked += 1
        self._lost -= self._texts.lists[text] != NEAR
        self._count_use(text)

    def evict(self, num_pages: int) -> list[int]:
        """Evict ``num_pages`` idle pages, or all if there are fewer; each comes after its children."""
        self._open = None
        if not num_pages or not self.num_sealed:
            return []
        self._room = self.num_sealed
        self._slack = self._room + self._room // 64
        self._forget()
        is_due = self._clock - self._counted >= min(max(self._room // 4, 1024), self._counted // 2)
        if self._counting is None and is_due:
            self._counting = len(LIMITS) - 2, self._clock
        if self._counting is not None:
            self._count_all_ages(_AT_ONCE * num_pages)
        self._odds.go_on()
        self._grow_older(_AT_ONCE * num_pages)
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
            self._evict_from(entry[1], num_pages, gone)
            if entry[1].is_listed:
                heappush(cells.setdefault(cell, []), entry)
        return gone

    def _evict_from(self, rest: _Rest, num_pages: int, gone: list[int]) -> None:
        """Evict pages of a rest until ``gone`` has ``num_pages``, or no other can be evicted now."""
        texts = self._texts
        while rest.first < len(rest.texts):
            text = rest.texts[rest.first]
            page, parent = texts.pages[text], texts.parents[text]
            if texts.rests[text] is not rest or page < 0:
                rest.first += 1
                continue
            if texts.children[text]:
                break  # children are evicted first
            if len(gone) == num_pages:
                return
            rest.first += 1
            gone.append(page)
            self._sealed[page] = texts.pages[text] = -1
            self.num_sealed -= 1
            if texts.lists[text] < 0:
                self._leave_rest(text)
                texts.drop(text)
            if parent >= 0:
                above = self._sealed[parent]
                texts.children[above] -= 1
                other = texts.rests[above]
                if not texts.children[above] and other is not None and other is not rest:
                    self._list_rest(other, bisect_right(LIMITS, self._clock - other.start) - 1)
        rest.is_listed = False

    def _list_rest(self, rest: _Rest, age: int) -> None:
        if not rest.is_listed:
            rest.is_listed = True
            heappush(self._cells.setdefault(NUM_KINDS * age + rest.kind, []), (rest.number, rest))

    def _grow_older(self, most: int) -> None:
        """Move up to ``most`` evictable rests to the cells of their present age, the oldest first."""
        for cell in sorted(self._cells, reverse=True):
            heap = self._cells[cell]
            start = self._clock - LIMITS[cell // NUM_KINDS + 1]  # older than this cell
            while most and heap and heap[0][1].start <= start:
                most -= 1
                _, rest = heappop(heap)
                rest.is_listed = False
                if rest.num_left:
                    self._list_rest(rest, bisect_right(LIMITS, self._clock - rest.start) - 1)
            if not heap:
                del self._cells[cell]

    def _count_use(self, text: int) -> None:
        """Count the use of a page that was idle or evicted."""
        rest, self._open = self._texts.rests[text], None
        if rest is not None:
            if rest.checked != self._clock:
                self._count_ages(rest)
            self._odds.used[rest.kind][rest.age] += 1
            self._leave_rest(text)

    def _leave_rest(self, text: int) -> None:
        """Remove a page from its rest."""
        rest: _Rest | None = self._texts.rests[text]
        if rest is not None:
            rest.num_left -= 1
            self._texts.rests[text] = None

    def _count_ages(self, rest: _Rest) -> None:
        """Count the ages that a rest has reached."""
        rest.checked = self._clock
        age = bisect_right(LIMITS, self._clock - rest.start) - 1
        if age > rest.age:
            entered = self._odds.entered[rest.kind]
            for i in range(rest.age + 1, age + 1):
                entered[i] += rest.num_left
            rest.age = age

    def _count_all_ages(self, most: int) -> None:
        """Count the ages of up to ``most`` rests; learn from the counts once those of all are counted."""
        while self._counting is not None:
            age, clock = self._counting
            start, rests = clock - LIMITS[age + 1], self._rests[age]
            while rests and rests[0].start <= start:
                if not most:
                    return
                most -= 1
                rest = rests.popleft()
                if rest.num_left:
                    self._count_ages(rest)
                    self._rests[rest.age].append(rest)
            self._counting = (age - 1, clock) if age else None
        kept = 0.5 ** ((self._clock - self._counted) / (16 * self._room))
        self._odds.learn(kept)
        self._lost *= kept
        self._asked *= kept
        self._counted = self._clock

    def _forget(self) -> None:
        """Trim the pages that LRU would have, and forget those that it would have evicted long ago."""
        texts = self._texts
        while texts.lengths[NEAR] > self._room:
            texts.move(texts.first(NEAR), FAR)
        while texts.lengths[FAR] > (_MEMORY - 1) * self._room:
            text = texts.first(FAR)
            texts.move(text, -1)
            if texts.pages[text] < 0:
                self._leave_rest(text)
                texts.drop(text)
