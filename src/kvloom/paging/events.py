"""Events of pages, in a ring: who takes, shares, finds, misses and evicts which. Imports no torch."""

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
from kvloom.paging.causes import Causes, Miss
from kvloom.paging.states import Event, PageStates

FORMAT: Final = "kvloom-events/1"
"""In the first line of a file."""

_MOST_PAGES: Final = 256


class Events:
    """The last events of a pool, and why pages are missed; ``PrefixTree.record`` makes one.

    Events of one kind and request that follow each other are one event of several pages. What falls out of
    the ring is folded into ``before``, so that the state at its oldest event is known. Not thread-safe, as
    the pool.

    Args:
        page_size: Tokens in a page.
        capacity: Events that are kept.
        max_remembered: Pages of texts that are remembered.
        clock: Seconds from some moment on.
        is_lru: Whether the pool evicts what is idle for longest, so that a miss knows ``more``.

    Attributes:
        causes: Why pages are missed.
        before: What pages held before the oldest event.
        num_dropped: Events that are not kept any more.
        request: Whose the next events are; 0 is nobody's.
        takers: Whose the pages are that are handed out next, if not all are that request's.
        num_requests: Requests so far.
        page_bytes: Bytes of a page, 0 if nobody said.
        scale: Tokens of a text that one of the tree stands for.
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
        self._kind, self._of, self._pages = "", 0, list[int]()  # what the next page may be added to
        self._secret = token_bytes(16)

    def __reduce__(self) -> Any:
        """A copy or a saved pool records nothing."""
        return type(None), ()

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[Event]:
        """From the oldest on; those of the state before it first."""
        if self.num_dropped:
            yield from self.before.events(self._ring[0][0])
        yield from self._ring

    # From the pool

    def add(self, kind: str, page: int) -> None:
        """Something happens to a page."""
        if kind != self._kind or self.request != self._of or len(self._pages) == _MOST_PAGES:
            self.note(kind, [page])
            self._kind, self._of, self._pages = kind, self.request, self._ring[-1][3]
        else:
            self._pages.append(page)

    def note(self, kind: str, pages: list[int], **more: Any) -> None:
        """An event of its own."""
        ring = self._ring
        if len(ring) == self.capacity:
            self.before.apply(ring.popleft())
            self.num_dropped += 1
        ring.append((self._clock() - self._began, kind, self.request, pages, more))
        self._kind = ""

    def take(self, pages: Sequence[int]) -> None:
        """Pages are handed out."""
        claimed = self.request
        for page, request in zip(pages, self.takers or [claimed] * len(pages), strict=True):
            self.request = request
            self.add("allocate", page)
            self.causes.take(request, page)
        self.request = claimed

    def evict(self, page: int) -> None:
        """A page that was found by its tokens gives way."""
        self.add("evict", page)
        self.causes.evict(page, self._ring[-1][0], self.request)

    # From the tree

    def look_up(
        self, salt: str, num_tokens: int, asked: list[bytes], found: list[int], num_pages: int, first: int = 0
    ) -> None:
        """A request begins.

        Args:
            salt: Under which it looks.
            num_tokens: Of its text.
            asked: The tokens of each page that could be found.
            found: Of these pages those that are, one behind the other.
            num_pages: Of the pool.
            first: The first that is; a window does not reach those in front.
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
        """A request begins; one that is forked asks for no pages."""
        self.num_requests += 1
        self.request = self.num_requests
        tenant = self.tenant(salt)
        self.note("begin", [], tenant=tenant, tokens=num_tokens * self.scale, nodes=list(nodes))

    def explain(self, salt: str, asked: list[bytes], num_found: int, num_pages: int) -> list[Miss]:
        """Why the pages of a text after the first ``num_found`` would be missed now."""
        return self.causes.explain(self.causes.nodes_of(salt, asked), num_found, num_pages)

    def seal(self, salt: str, text: list[bytes], pages: list[int]) -> None:
        """The last pages of a text are found from now on."""
        nodes = self.causes.nodes_of(salt, text)[len(text) - len(pages) :]
        self.note("seal", pages, nodes=[node.id for node in nodes])
        for page, node in zip(pages, nodes, strict=True):
            self.causes.seal(page, node)

    # From tables and stores

    def refuse(self, salt: str, asked: list[bytes], first: int) -> None:
        """The request, which holds the pages of its text before ``first``, finds no room for the others."""
        self.causes.refuse(
            self.causes.nodes_of(salt, asked)[first:], self._clock() - self._began, self.request
        )

    def drop(self, pages: list[int]) -> None:
        """A window has left the first pages of the request behind, which are about to be released."""
        self.causes.drop(self.request, pages)

    def name(self, name: str) -> None:
        """Name the request."""
        self.note("name", [], name=name)

    def tenant(self, salt: str) -> str:
        """A name for a salt, which may be a secret."""
        name = salt.encode("utf-8", "surrogatepass")
        return blake2b(name, key=self._secret, digest_size=3).hexdigest() if salt else ""

    # Files

    def lines(
        self, *, tokens: bool = True, decode: Callable[[list[int]], str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """JSON: the head, the pages of texts that events name, and events in order.

        Args:
            tokens: Whether pages have their token ids.
            decode: Token ids to text; without it there is none.
        """
        self._kind = ""  # what was given out does not change
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
        """Write JSON lines, as ``lines`` makes them, for ``kvloom trace replay`` and ``kvloom view``."""
        write_lines(self.lines(tokens=tokens, decode=decode), path)


def write_lines(lines: Iterable[dict[str, Any]], path: str | Path) -> None:
    """Write a file of JSON lines."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
