"""Predicts every answer of pool and tree: what is found, copied, refused, and evicted in which order.

It remembers which contents were sealed, and when each was last held. From the library it takes references as
opaque names, and nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest
from paging.world import Request, World

from kvloom.errors import StateError
from kvloom.paging import Copy, PageRef
from kvloom.paging.rings import FREE, IDLE, PASSED


class Oracle(World):
    """A world that is compared with its model after every operation."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.total = num_pages
        self.sealed: dict[int, PageRef] = {}  # content at a page's end: the page
        self.path: dict[
            int, tuple[str, tuple[int, ...]]
        ] = {}  # that content: its salt, and the ends up to it
        self.last_held: dict[int, int] = {}  # that content: when
        self.seen: deque[PageRef] = deque(maxlen=16)  # handed out lately
        self.clock = 0

    def match(self, salt: str, tokens: Sequence[int]) -> list[PageRef]:
        expected: list[PageRef] = []
        contents = self.contents(salt, tokens)
        for end in range(self.page_size - 1, len(tokens) - 1, self.page_size):
            if contents[end] not in self.sealed:
                break
            expected.append(self.sealed[contents[end]])
        refs = super().match(salt, tokens)
        assert refs == expected
        return refs

    def extend(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> list[Copy] | None:
        moved = self._moved(requests, tokens)
        num_new = len(moved)
        for request, new in zip(requests, tokens, strict=True):
            length = len(request.tokens)
            num_new += -(-(length + len(new)) // self.page_size) - -(-length // self.page_size)
        order, num_free = self.evictable(), self.num_free()
        refused = num_new > 0 and self.pool.will_fail
        before = self._state()
        copies = super().extend(requests, tokens)
        if refused or num_new > num_free + len(order):
            assert copies is None and self._state() == before
            return None
        assert copies is not None
        assert [copy.source for copy in copies] == [ref.id for ref in moved]
        self._forget(order[: max(0, num_new - num_free)])
        for ref in moved:
            self._drop([ref])
        handed_out = {
            ref: None for request in requests for ref in request.table.pages if ref not in self.seen
        }
        self.seen.extend(handed_out)
        return copies

    def commit(self, request: Request) -> list[PageRef]:
        expected = list(request.table.pages)
        ends = request.contents[self.page_size - 1 :: self.page_size]
        for i, end in enumerate(ends):
            expected[i] = self.sealed.setdefault(end, expected[i])
            self.path[end] = (request.salt, tuple(ends[: i + 1]))
        refs = super().commit(request)
        assert refs == expected
        return refs

    def truncate(self, request: Request, num_tokens: int) -> None:
        before = request.table.pages
        super().truncate(request, num_tokens)
        assert request.table.pages == before[: -(-num_tokens // self.page_size)]
        self._drop(before[len(request.table.pages) :])

    def end(self, request: Request) -> None:
        refs = request.table.pages
        super().end(request)
        self._drop(refs)

    def evict(self, num_pages: int) -> int:
        expected = self.evictable()[:num_pages]
        num_evicted = super().evict(num_pages)
        assert num_evicted == len(expected)
        self._forget(expected)
        return num_evicted

    def grow(self, num_pages: int) -> None:
        super().grow(num_pages)
        self.total += num_pages

    def verify(self) -> None:
        """The model agrees on every page, and every late reference is refused."""
        super().verify()
        pool, order = self.pool, [self.sealed[end] for end in self.evictable()]
        assert list(pool.evictable()) == order
        assert (pool.num_pages, pool.num_free, pool.num_evictable) == (
            self.total,
            self.num_free(),
            len(order),
        )
        assert pool.num_active == self.total - self.num_free() - len(order)
        assert self.tree.num_pages == len(self.sealed)
        held, sealed = self._held(), set(self.sealed.values())
        for ref in held.keys() | sealed:
            assert pool.is_sealed(ref) == (ref in sealed)
            assert pool.is_writable(ref) == (held[ref] == 1 and ref not in sealed)
            if ref not in sealed:
                assert pool.count(ref) == held[ref]
        for ref in set(self.seen) - held.keys() - sealed:
            for method in (pool.retain, pool.release, pool.count, pool.is_sealed, pool.is_writable):
                with pytest.raises(StateError):
                    method(ref)

    def evictable(self) -> list[int]:
        """Sealed contents that nobody holds, nor anything behind them: longest ago first, then ends first."""
        held: set[int] = set()
        names = {ref: end for end, ref in self.sealed.items()}
        for ref in self._held():
            if ref in names:
                held.update(self.path[names[ref]][1])
        idle = [end for end in self.sealed if end not in held]
        return sorted(idle, key=lambda end: (self.last_held[end], -len(self.path[end][1])))

    def num_free(self) -> int:
        return self.total - len(self._held().keys() | set(self.sealed.values()))

    def _moved(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> list[PageRef]:
        """Last pages that must be copied: sealed, or shared with a holder that has not left before."""
        held, sealed = self._held(), set(self.sealed.values())
        moved: list[PageRef] = []
        for request, new in zip(requests, tokens, strict=True):
            if new and len(request.tokens) % self.page_size:
                last = request.table.pages[-1]
                if last in sealed or held[last] > 1:
                    held[last] -= 1
                    moved.append(last)
        return moved

    def _held(self) -> Counter[PageRef]:
        return Counter(ref for request in self.requests for ref in request.table.pages)

    def _drop(self, refs: Sequence[PageRef]) -> None:
        """A holder released these now, and therefore all pages before them."""
        self.clock += 1
        names = {ref: end for end, ref in self.sealed.items()}
        for ref in refs:
            if ref in names:
                self.last_held.update(dict.fromkeys(self.path[names[ref]][1], self.clock))

    def _forget(self, ends: Sequence[int]) -> None:
        for end in ends:
            del self.sealed[end], self.path[end], self.last_held[end]

    def _state(self) -> object:
        """All there is to change."""
        pool, tree = self.pool, self.tree
        return (
            [list(part) for part in (pool._generations, pool._counts, pool._flags, pool._parents)],
            [list(pool._rings.each(ring)) for ring in (FREE, IDLE, PASSED)],
            [(tree.text_of(ref), ref) for ref in tree.sealed()],
            [(node, tree._nodes.num_children[node]) for node in tree._nodes],
            [(request.table.pages, request.table.num_tokens) for request in self.requests],
        )
