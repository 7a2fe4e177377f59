"""Which sealed page holds which tokens behind which prefix. Token ids are compared, never only their hashes.

Shapes: S tokens in a page.
"""

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from kvloom.errors import ArgumentError, StateError
from kvloom.paging.events import Events
from kvloom.paging.pool import PagePool, PageRef, expect_page_size

Key: TypeAlias = tuple[str, PageRef | None, bytes]
"""Salt, parent page, and the page's S token ids as int64.

A reference names one generation of a page, which is sealed under one key only; so a key stands for all tokens
from the start of the sequence. Python hashes bytes with a secret of the process, and compares them when their
hashes are equal.
"""


class PrefixTree:
    """Finds the sealed pages whose tokens begin a sequence; a page is found only under its own salt.

    The keys and values of a token depend on all tokens before it. So a page is found by its own tokens *and*
    its parent, which is a page of the same tree, or ``None`` at the start of a sequence.

    Args:
        pool: Pool of the pages; a pool has one tree.
        page_size: S, tokens in a page.
    """

    __slots__ = ("_format", "_keys", "_pool", "_refs", "page_size")

    def __init__(self, pool: PagePool, page_size: int) -> None:
        expect_page_size(page_size)
        self.page_size = page_size
        self._pool = pool
        self._format = f"={page_size}q"
        self._refs: dict[Key, PageRef] = {}
        self._keys: dict[int, Key] = {}  # of each page in the tree
        pool.attach(self.evict)

    @property
    def num_pages(self) -> int:
        """Pages that can be found: the evictable ones, and those that are held and sealed."""
        return len(self._refs)

    def match(self, tokens: Sequence[int], salt: str = "", *, max_tokens: int | None = None) -> list[PageRef]:
        """Retain the longest chain of pages that holds the first tokens of a sequence.

        Args:
            tokens: Ids from the start of the sequence, signed 64-bit.
            salt: Only pages inserted under the same salt are found.
            max_tokens: Match no more tokens than this: ``len(tokens) - 1`` for a caller that must compute the
                last token to have its logits.

        Returns:
            Pages in order, S tokens each. The caller holds one reference to each: valid until released, by
            itself or by the table that adopts them.

        Raises:
            ArgumentError: a token is not a signed 64-bit integer; nothing was changed.
        """
        limit = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
        pages: Iterable[bytes] = self.packed(tokens, limit // self.page_size)
        events = self._pool.events
        if events is not None:
            pages = list(pages)
        found = self._find(pages, salt)
        if events is not None:
            events.look_up(salt, len(tokens), list(pages), [ref.id for ref in found], self._pool.num_pages)
        for ref in found:
            self._pool.hold(ref.id)
        return found

    def num_known(self, tokens: Sequence[int], salt: str = "", *, max_tokens: int | None = None) -> int:
        """How many pages ``match`` would find; nothing is retained, and no event is made.

        Raises:
            ArgumentError: as ``match``.
        """
        limit = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
        return len(self._find(self.packed(tokens, limit // self.page_size), salt))

    def record(
        self,
        capacity: int = 100_000,
        *,
        max_remembered: int = 200_000,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Events:
        """Record what happens to the pages of the pool from now on, until ``pool.events`` is ``None``.

        Args:
            capacity: Events that are kept.
            max_remembered: Pages of texts that are remembered, to say why they are missed.
            clock: Seconds from some moment on.

        Returns:
            The events, which begin with the present state; ``pool.events``.
        """
        pool = self._pool
        events = Events(
            self.page_size, capacity, max_remembered=max_remembered, clock=clock, is_lru=pool.worth is None
        )
        events.note("grow", [], num_pages=pool.num_pages)
        idle = [ref.id for ref in pool.evictable()]
        free = {page for page in range(pool.num_pages) if pool.is_free(page)}
        events.take([page for page in range(pool.num_pages) if page not in free])
        texts: dict[int, list[bytes]] = {}
        for page in [page for page in self._keys if page not in texts]:
            path = [page]
            while (parent := self._keys[path[-1]][1]) is not None and parent.id not in texts:
                path.append(parent.id)
            text = [] if parent is None else texts[parent.id]
            for page in reversed(path):
                salt, _, tokens = self._keys[page]
                texts[page] = text = [*text, tokens]
                events.seal(salt, text, [page])
        for page, number in self._holders().items():
            for _ in range(1, number):
                events.add("share", page)
            if not number:
                events.add("release", page)
        for page in idle:
            events.causes.idle(page)
        pool.events = events
        return events

    def insert(self, tokens: Sequence[int], refs: Sequence[PageRef], salt: str = "") -> list[PageRef]:
        """Seal the full pages of a sequence, so that ``match`` finds them.

        Where the tree has a page of the same tokens already, that one stays: the caller's reference moves to
        it, and the caller's duplicate is released.

        Args:
            tokens: Ids from the start of the sequence, signed 64-bit; their keys and values are written.
            refs: Pages of the sequence, one reference to each held by the caller. Those past the last full
                page are left alone.
            salt: Who may find the pages.

        Returns:
            As many references as ``refs``, to be held in their place: ``table.replace(tree.insert(...))``.

        Raises:
            ArgumentError: there are fewer ``refs`` than full pages, or one twice, or a token is not a signed
                64-bit integer; nothing was changed.
            StateError: a page is stale, not held, or sealed under other tokens; nothing was changed.
        """
        pages = list(self.packed(tokens))
        if len(refs) < len(pages) or len(set(refs)) < len(refs):
            raise ArgumentError(f"refs must be at least {len(pages)} distinct pages, got {list(refs)}")
        found = self._find(pages, salt)
        for i, ref in enumerate(refs[: len(pages)]):
            if not self._pool.count(ref):
                raise StateError(f"page {ref.id} of generation {ref.generation} must be held by the caller")
            if ref.id in self._keys and ref not in found[i : i + 1]:
                raise StateError(f"page {ref.id} of generation {ref.generation} is sealed under other tokens")
        for have, ref in zip(found, refs, strict=False):
            if have != ref:
                self._pool.retain(have)
                self._pool.release(ref)
        parent = found[-1] if found else None
        self._pool.seal(refs[len(found) : len(pages)], parent)
        worth = self._pool.worth
        for page, ref in zip(pages[len(found) :], refs[len(found) :], strict=False):
            if worth is not None:
                worth.seal(ref.id, None if parent is None else parent.id, (salt, page))
            self._keys[ref.id] = key = (salt, parent, page)
            self._refs[key] = parent = ref
        if self._pool.events is not None and len(found) < len(pages):
            self._pool.events.seal(salt, pages, [ref.id for ref in refs[len(found) : len(pages)]])
        return found + list(refs[len(found) :])

    def evict(self, num_pages: int) -> int:
        """Free ``num_pages`` evictable pages, first those that the pool's policy names, or all there are.

        Returns:
            How many were freed.
        """
        if num_pages < 0:
            raise ArgumentError(f"num_pages must be at least 0, got {num_pages}")
        return self._forget(self._pool.victims(num_pages))

    def sequences(self) -> Iterator[tuple[str, list[int], list[PageRef]]]:
        """Salt, tokens and pages of the longest sequences that can be found; all others begin them."""
        parents = {parent for _, parent, _ in self._refs}
        for ref in [ref for ref in self._refs.values() if ref not in parents]:
            pages, tokens = [], b""
            step: PageRef | None = ref
            while step is not None:
                pages.append(step)
                salt, step, page = self._keys[step.id]
                tokens = page + tokens
            yield salt, list(struct.unpack(f"={len(tokens) // 8}q", tokens)), pages[::-1]

    def _holders(self) -> dict[int, int]:
        """How often each page is held, references of pages under it left out."""
        pool = self._pool
        held = {page: number for page, number in enumerate(pool._counts) if not pool.is_free(page)}
        for page, (_, parent, _) in self._keys.items():
            if parent is not None and pool._counts[page]:
                held[parent.id] -= 1
        return held

    def _forget(self, refs: list[PageRef]) -> int:
        self._pool.reclaim(refs)
        for ref in refs:
            del self._refs[self._keys.pop(ref.id)]
        return len(refs)

    def _find(self, pages: Iterable[bytes], salt: str) -> list[PageRef]:
        """The longest chain from the root; nothing is retained."""
        found: list[PageRef] = []
        ref: PageRef | None = None
        for page in pages:
            ref = self._refs.get((salt, ref, page))
            if ref is None:
                break
            found.append(ref)
        return found

    def packed(self, tokens: Sequence[int], num_pages: int | None = None) -> Iterator[bytes]:
        """Token ids of each of the first ``num_pages`` pages as int64, all full ones if ``None``."""
        size = self.page_size
        num_pages = len(tokens) // size if num_pages is None else num_pages
        try:
            for start in range(0, num_pages * size, size):
                yield struct.pack(self._format, *tokens[start : start + size])
        except struct.error as problem:
            raise ArgumentError(f"tokens must be signed 64-bit integers: {problem}") from None
