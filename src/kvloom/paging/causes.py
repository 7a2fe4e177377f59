"""Causes of missed pages, from the history of pages that were asked for or sealed. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvloom.paging.recency import Item, Recency

CAUSES: Final = (
    "below", "evicted", "other salt", "tokens differ", "never stored", "window passed", "no states",
    "damaged", "other format",
)  # fmt: skip
"""Causes of a miss; the last two come from a store, ``no states`` from a pool."""

_MOST_ASKED: Final = 1024


class Miss(NamedTuple):
    """Cause of a miss of consecutive pages of a text.

    Attributes:
        cause: One of ``CAUSES``.
        first: Number of the first page in the text.
        num_pages: Number of pages.
        at: ``below``: the missed page before them; ``tokens differ``: the first token that differs.
        time: ``evicted``: time of the eviction.
        by: ``evicted``: the request that needed the room.
        more: ``evicted``: fewest additional pages with which the pool would have kept it; ``None`` if
            unknown.
        what: ``damaged``, ``other format``: the store's message.
    """

    cause: str
    first: int
    num_pages: int = 1
    at: int | None = None
    time: float | None = None
    by: int | None = None
    more: int | None = None
    what: str | None = None

    def __str__(self) -> str:
        """Sentence about the miss, with times in seconds of the recording."""
        match self.cause:
            case "below":
                return f"below page {self.at}"
            case "tokens differ":
                return f"tokens differ at index {self.at}"
            case "evicted":
                kept = "" if self.more is None else f", kept with {self.more} more pages"
                when = "" if self.time is None else f" at {self.time:.3f} s by request {self.by}"
                return f"evicted{when}{kept}"
        return self.cause if self.what is None else f"{self.cause}: {self.what}"


class TracedPage(Item):
    """Page of a text under a salt, in the pool or not.

    Attributes:
        id: Number, counted from 0.
        salt: Salt of the text.
        parent: The page before it.
        text: Number of the text up to here, the same under each salt.
        tokens: Token ids of the page, int64.
        state: ``"asked"`` for and never sealed, ``"kept"``, ``"evicted"``, or ``"passed"`` by a window.
        time: When it was evicted.
        by: The request that needed the room.
        more: Additional pages that the pool needed to keep it, when it was last asked for.
        used: Time of the last look-up or seal, counted in these.
        num_users: Number of requests that compute it again, plus 1 if it is held.
    """

    __slots__ = ("by", "id", "more", "num_users", "parent", "salt", "state", "text", "time", "tokens", "used")

    def __init__(self, id: int, salt: str, parent: TracedPage | None, text: int, tokens: bytes) -> None:
        super().__init__()
        self.id, self.salt, self.parent, self.text, self.tokens = id, salt, parent, text, tokens
        self.state = "asked"
        self.time, self.by, self.used, self.num_users = 0.0, 0, 0, 0
        self.more: int | None = None


class Causes:
    """History of a pool and its prefix tree, which gives the cause of each missed page.

    For an LRU pool the number of pages that would have kept a page is exact, by its reuse distance: a larger
    pool would have found the evicted pages of a text when it was asked for, and computed only the rest. For
    other pools it is unknown.

    Args:
        page_size: Tokens in a page.
        is_lru: Whether the pool evicts the least recently used pages first.
        max_remembered: Number of pages to remember; beyond it, the least recently used are forgotten and
            reported as ``never stored``.
    """

    def __init__(self, page_size: int, max_remembered: int, is_lru: bool = True) -> None:
        self.page_size, self._is_lru = page_size, is_lru
        self._max_remembered = max_remembered
        self._texts: dict[tuple[int, bytes], int] = {}
        self._num_texts = 0
        self._num_ids = 0
        self.nodes: dict[tuple[str, int], TracedPage] = {}
        self._following: dict[tuple[str, int], list[bytes]] = {}  # sealed pages after a text, sorted
        self._salts: Counter[int] = Counter()  # number of salts under which each text is sealed
        self._order = Recency()
        self._pages: dict[int, TracedPage] = {}  # sealed pages
        self._asked: dict[int, list[TracedPage]] = {}  # by request, the last ones
        self._passed: Counter[int] = Counter()  # number of pages that a window has passed, by request
        self._owed: dict[int, deque[TracedPage]] = {}  # evicted pages that a request is about to compute
        self._num_held = 0  # pages in use if those that are computed again had been found
        self._paid: dict[int, TracedPage] = {}  # pages that are being computed again
        self._clock = 0

    def nodes_of(self, salt: str, pages: Sequence[bytes]) -> list[TracedPage]:
        """Get or make the nodes of a text from its start."""
        if len(self.nodes) + len(pages) > max(self._max_remembered, 2 * len(self._pages)):
            self._forget()
        self._clock += 1
        found, node = list[TracedPage](), None
        for tokens in pages:
            node = self.node_after(node, salt, tokens)
            found.append(node)
        return found

    def node_of(self, page: int) -> TracedPage | None:
        """TracedPage of a sealed page, if it was sealed since the recording began."""
        return self._pages.get(page)

    def node_after(self, parent: TracedPage | None, salt: str, tokens: bytes) -> TracedPage:
        """Get or make the node of the page after ``parent``; ``None`` at the start of a text."""
        key = 0 if parent is None else parent.text, tokens
        text = self._texts.get(key, 0)
        if not text:
            self._num_texts += 1
            self._texts[key] = text = self._num_texts
        node = self.nodes.get((salt, text))
        if node is None:
            self.nodes[salt, text] = node = TracedPage(self._num_ids, salt, parent, text, tokens)
            self._num_ids += 1
        node.used = self._clock
        return node

    def explain(self, nodes: Sequence[TracedPage], num_found: int, num_pages: int) -> list[Miss]:
        """Causes of the misses of all pages of a text after the first ``num_found``.

        Args:
            nodes: Nodes of the text.
            num_found: Number of first pages that are found.
            num_pages: Number of pages of the pool.
        """
        misses: list[Miss] = []
        for i in range(num_found, len(nodes)):
            node = nodes[i]
            if node.state == "evicted":
                if node.place >= 0 and self._is_lru:
                    more = self._order.num_above(node) + self._num_held + 1 - num_pages
                    node.more = max(more, node.more or 1)  # it was not sealed since the last look-up
                misses.append(Miss("evicted", i, time=node.time, by=node.by, more=node.more))
                continue
            if node.state == "kept":  # found; another page of the window is missed
                continue
            misses.append(self._first_miss(node, i))
            if i + 1 < len(nodes):
                misses.append(Miss("below", i + 1, len(nodes) - i - 1, at=i))
            break
        return misses

    def ask(self, request: int, nodes: list[TracedPage], num_found: int) -> None:
        """Record that a request asked for these pages and will compute those that were not found."""
        self._asked[request] = nodes
        if len(self._asked) > _MOST_ASKED:
            first = next(iter(self._asked))
            del self._asked[first]
            self._passed.pop(first, None)
            self.end(first)
        gone = [node for node in nodes[num_found:] if node.state == "evicted"]
        for node in gone:
            self._use(node)
        if gone:
            self._owed[request] = deque(gone)

    def take(self, request: int, page: int) -> None:
        """Record that a page is allocated."""
        if owed := self._owed.get(request):
            self._paid[page] = owed.popleft()
        else:
            self._order.fill()
            self._num_held += 1

    def seal(self, page: int, node: TracedPage) -> None:
        """Record that a held page is sealed and can be found."""
        computed = self._paid.pop(page, None)
        if computed is not node:
            if computed is not None:  # it was expected to be another page
                self._leave(computed)
                self._order.fill()
                self._num_held += 1
            if node.num_users:  # others compute it, too
                self._order.push(None)
                self._num_held -= 1
            elif node.place >= 0:
                self._order.leave_hole(node)
            node.num_users += 1
        node.state, node.more = "kept", None
        self._pages[page] = node
        insort(self._following.setdefault(self._before(node), []), node.tokens)
        self._salts[node.text] += 1

    def wake(self, page: int) -> None:
        """Record that an idle page is held again."""
        if (node := self._pages.get(page)) is not None:
            self._use(node)

    def idle(self, page: int) -> None:
        """Record that the last holder released a sealed page."""
        if (node := self._pages.get(page)) is not None:
            self._leave(node)

    def free(self, page: int) -> None:
        """Record that the last holder released a page that is not sealed."""
        if (node := self._paid.pop(page, None)) is not None:
            self._leave(node)
        else:
            self._order.push(None)
            self._num_held -= 1

    def evict(self, page: int, time: float, request: int) -> None:
        """Record that an idle page is evicted."""
        node = self._pages.pop(page, None)
        if node is not None:
            self._give_up(node, time, request)
            siblings = self._following[self._before(node)]
            del siblings[bisect_left(siblings, node.tokens)]
            self._salts[node.text] -= 1

    def refuse(self, nodes: Sequence[TracedPage], time: float, request: int) -> None:
        """Record that there was no room for the last pages of a text, which a request has computed."""
        self.end(request)
        for node in reversed(nodes):
            if node.num_users:
                continue
            if node.place >= 0:
                self._order.leave_hole(node)
            self._order.fill()
            self._give_up(node, time, request)
            node.more = None
            self._order.push(node)

    def drop(self, request: int, pages: Sequence[int]) -> None:
        """Record that a window has passed the first pages that a request held."""
        nodes, start = self._asked.get(request, []), self._passed[request]
        self._passed[request] += len(pages)
        for page, node in zip(pages, nodes[start:], strict=False):
            if page not in self._pages and node.state == "asked":
                node.state = "passed"

    def end(self, request: int) -> None:
        """Record that a request computes nothing more."""
        for node in reversed(self._owed.pop(request, ())):
            self._leave(node)

    def _use(self, node: TracedPage) -> None:
        node.num_users += 1
        if node.place >= 0:
            self._order.pull(node)
            self._num_held += 1

    def _leave(self, node: TracedPage) -> None:
        node.num_users -= 1
        if not node.num_users:
            self._order.push(node)
            self._num_held -= 1

    def _give_up(self, node: TracedPage, time: float, request: int) -> None:
        node.state, node.time, node.by = "evicted", time, request

    def _first_miss(self, node: TracedPage, i: int) -> Miss:
        """Cause of the first miss that is no eviction; all pages before it were found or evicted."""
        if node.state == "passed":
            return Miss("window passed", i)
        if self._salts[node.text]:
            return Miss("other salt", i)
        siblings = self._following.get(self._before(node), [])
        at = bisect_left(siblings, node.tokens)
        near = siblings[max(at - 1, 0) : at + 1]
        if near:
            same = i * self.page_size + max(_num_common_tokens(x, node.tokens) for x in near)
            if same:
                return Miss("tokens differ", i, at=same)
        return Miss("never stored", i)

    @staticmethod
    def _before(node: TracedPage) -> tuple[str, int]:
        return node.salt, 0 if node.parent is None else node.parent.text

    def _forget(self) -> None:
        """Forget half of the pages that are not in the pool, the least recently used."""
        gone = [x for x in self.nodes.values() if x.state != "kept" and not x.num_users]
        gone.sort(key=lambda node: (node.used, node.id))
        old = {id(node) for node in gone[: len(gone) // 2]}
        needed = {id(x.parent) for x in self.nodes.values() if id(x) not in old and x.parent is not None}
        for node in gone:
            if id(node) in old and id(node) not in needed:
                if node.place >= 0:
                    self._order.leave_hole(node)
                del self.nodes[node.salt, node.text]
        texts = {text for _, text in self.nodes}
        self._texts = {key: text for key, text in self._texts.items() if text in texts}


def _num_common_tokens(left: bytes, right: bytes) -> int:
    """Number of first tokens that two pages have in common."""
    size = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), len(left))
    return size // 8
