"""Ring buffer of page events: allocations, shares, hits, misses, evictions. Imports no torch."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes
from struct import unpack
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.paging.causes import Causes, Miss, TracedPage
from kvloom.paging.recorded_states import Event, PageStates

FORMAT: Final = "kvloom-events/1"
"""Format name in the first line of a file."""

_MOST_PAGES: Final = 256


class Events:
    """Last events of a pool, and causes of misses; ``PrefixTree.record`` makes one.

    Consecutive events of one kind and request are merged into one event of several pages. Events that leave
    the ring are applied to ``before``, so that the state at the oldest event is known. Not thread-safe, as
    the pool.

    Args:
        page_size: Tokens in a page.
        capacity: Number of events to keep.
        max_remembered: Number of pages of texts to remember.
        clock: Function that returns seconds.
        is_lru: Whether the pool evicts the least recently used pages first, so that ``Miss.more`` is known.

    Attributes:
        causes: History that explains misses.
        before: State of all pages before the oldest event.
        num_dropped: Number of events that have left the ring.
        request: Request of the next events; 0 for none.
        takers: Requests of the next allocated pages, if they differ.
        num_requests: Number of requests so far.
        page_bytes: Bytes of a page; 0 if unknown.
        scale: Number of text tokens that one token of the tree stands for.
    """

    def __init__(
        self,
        page_size: int,
        capacity: int = 100_000,
        *,
        max_remembered: int = 200_000,
        clock: Callable[[], float] = time.perf_counter,
        is_lru: bool = True,
    ) -> None:
        if capacity < 1:
            raise ArgumentError(f"capacity must be at least 1, got {capacity}")
        if max_remembered < 1:
            raise ArgumentError(f"max_remembered must be at least 1, got {max_remembered}")
        self.causes = Causes(page_size, max_remembered, is_lru)
        self.before = PageStates()
        self.num_dropped = self.request = self.num_requests = self.page_bytes = 0
        self.takers: list[int] = []
        self.scale = 1
        self._page_size, self.capacity, self._clock = page_size, capacity, clock
        self._ring: deque[Event] = deque()
        self._began, self._date = clock(), time.time()
        self._kind, self._of, self._pages = "", 0, list[int]()  # event to which the next page may belong
        self._secret = token_bytes(16)

    def __reduce__(self) -> Any:
        """Pickle as ``None``: a copy or a saved pool records nothing."""
        return type(None), ()

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[Event]:
        """Iterate from the oldest event on, after events that make the state before it."""
        if self.num_dropped:
            yield from self.before.events(self._ring[0][0])
        yield from self._ring

    # From the pool

    def add(self, kind: str, page: int) -> None:
        """Record an event of a page."""
        if kind != self._kind or self.request != self._of or len(self._pages) == _MOST_PAGES:
            self.note(kind, [page])
            self._kind, self._of, self._pages = kind, self.request, self._ring[-1][3]
        else:
            self._pages.append(page)

    def note(self, kind: str, pages: list[int], **more: Any) -> None:
        """Record an event that is not merged with others."""
        ring = self._ring
        if len(ring) == self.capacity:
            self.before.apply(ring.popleft())
            self.num_dropped += 1
        ring.append((self._clock() - self._began, kind, self.request, pages, more))
        self._kind = ""

    def take(self, pages: Sequence[int]) -> None:
        """Record that pages are allocated."""
        claimed = self.request
        for page, request in zip(pages, self.takers or [claimed] * len(pages), strict=True):
            self.request = request
            self.add("allocate", page)
            self.causes.take(request, page)
        self.request = claimed

    def evict(self, page: int) -> None:
        """Record that a sealed page is evicted."""
        self.add("evict", page)
        self.causes.evict(page, self._ring[-1][0], self.request)

    # From the tree

    def look_up(
        self, salt: str, num_tokens: int, asked: list[bytes], found: list[int], num_pages: int, first: int = 0
    ) -> None:
        """Record that a request begins and looks up its text.

        Args:
            salt: Salt of the look-up.
            num_tokens: Number of tokens of the text.
            asked: Tokens of each page that could be found.
            found: Consecutive pages that are found.
            num_pages: Number of pages of the pool.
            first: Number of the first page found; a window does not reach those before it.
        """
        nodes = self.causes.nodes_of(salt, asked)
        ids = [node.id for node in nodes]
        self.begin(salt, num_tokens, ids)
        end = first + len(found)
        if found:
            self.note("hit", found, nodes=ids[first:end])
        for miss in self.causes.explain(nodes, end, num_pages):
            if miss.cause == "tokens differ" and miss.at is not None:
                miss = miss._replace(at=miss.at * self.scale)
            self.note("miss", [], **{name: x for name, x in miss._asdict().items() if x is not None})
        self.causes.ask(self.request, nodes, end)

    def begin(self, salt: str, num_tokens: int, nodes: Sequence[int] = ()) -> None:
        """Record that a request begins; a forked one looks up no pages."""
        self.num_requests += 1
        self.request = self.num_requests
        tenant = self.tenant(salt)
        self.note("begin", [], tenant=tenant, tokens=num_tokens * self.scale, nodes=list(nodes))

    def explain(self, salt: str, asked: list[bytes], num_found: int, num_pages: int) -> list[Miss]:
        """Causes for which the pages of a text after the first ``num_found`` would be missed now."""
        return self.causes.explain(self.causes.nodes_of(salt, asked), num_found, num_pages)

    def seal(self, nodes: Sequence[TracedPage], pages: list[int]) -> None:
        """Record that pages are sealed under these nodes of ``causes``."""
        self.note("seal", pages, nodes=[node.id for node in nodes])
        for page, node in zip(pages, nodes, strict=True):
            self.causes.seal(page, node)

    # From tables and stores

    def refuse(self, salt: str, asked: list[bytes], first: int) -> None:
        """Record that the request, which holds its pages before ``first``, has no room for the others."""
        self.causes.refuse(
            self.causes.nodes_of(salt, asked)[first:], self._clock() - self._began, self.request
        )

    def drop(self, pages: list[int]) -> None:
        """Record that a window has passed the first pages of the request, which will be released."""
        self.causes.drop(self.request, pages)

    def name(self, name: str) -> None:
        """Name the request."""
        self.note("name", [], name=name)

    def tenant(self, salt: str) -> str:
        """Public name for a salt, which may be a secret."""
        name = salt.encode("utf-8", "surrogatepass")
        return blake2b(name, key=self._secret, digest_size=3).hexdigest() if salt else ""

    # Files

    def lines(
        self, *, tokens: bool = True, decode: Callable[[list[int]], str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Lines of JSON: a header, the pages of texts that events name, and the events in order.

        Args:
            tokens: Whether to write token ids.
            decode: Function from token ids to text; ``None`` for no text.
        """
        self._kind = ""  # events that were returned do not change
        yield {
            "format": FORMAT,
            "date": self._date,
            "page_size": self._page_size * self.scale,
            "page_bytes": self.page_bytes,
            "dropped": self.num_dropped,
        }
        named = {id for event in self for id in event[4].get("nodes", ())}
        wanted: dict[int, Any] = {}
        for node in self.causes.nodes.values():
            step = node if node.id in named else None
            while step is not None and step.id not in wanted:
                wanted[step.id] = step
                step = step.parent
        for id, node in sorted(wanted.items()):
            line: dict[str, Any] = {"node": id, "parent": None if node.parent is None else node.parent.id}
            line["tenant"] = self.tenant(node.salt)
            ids = list(unpack(f"={len(node.tokens) // 8}q", node.tokens))
            if tokens:
                line["tokens"] = ids
            if decode is not None:
                line["text"] = decode(ids)
            yield line
        for at, kind, request, pages, more in self:
            yield {"t": round(at, 6), "kind": kind, "request": request, "pages": pages, **more}

    def save(
        self, path: str | Path, *, tokens: bool = True, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        """Write JSON lines, as of ``lines``, for ``kvloom trace replay`` and ``kvloom view``."""
        write_lines(self.lines(tokens=tokens, decode=decode), path)


def write_lines(lines: Iterable[dict[str, Any]], path: str | Path) -> None:
    """Write a file of JSON lines."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
