"""Prefix tree: finds sealed pages by their tokens and prefix. Compares token ids, never only hashes.

Shapes: S tokens in a page.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from kvloom.errors import ArgumentError, StateError
from kvloom.paging.arguments import expect_page_size, refused_tokens
from kvloom.paging.events import Events
from kvloom.paging.nodes import Nodes, of_objects, record_present, recorded
from kvloom.paging.page_states import PageRef
from kvloom.paging.pool import PagePool
from kvloom.paging.table import PageTable


class TreePath(NamedTuple):
    """What a tree knows of a text, by ``PrefixTree.walk``. Valid until the tree changes.

    Attributes:
        pages: Ids of its pages from the start on; -1 for a page that was evicted.
        goes_on: Whether the tree knows a longer text that begins with these.
    """

    pages: list[int]
    goes_on: bool


class PrefixTree:
    """Prefix tree of sealed pages: finds those whose tokens begin a sequence, under their salt only.

    The keys and values of a token depend on all tokens before it. So a page is found by its own tokens *and*
    its parent, which is a node of the same tree, or ``None`` at the start of a sequence.

    A prefix is complete if all its pages are found. With a window, those that the token after it sees are
    enough. If pages are copies of recurrent states, only the last page is needed; it must end where the
    prefix does. Without a window a sequence is evicted from its end; with one, pages that windows have passed
    are evicted first.

    Args:
        pool: Pool of the pages; a pool has one tree.
        page_size: S, tokens in a page.
        window: Tokens that a token sees, itself included; ``None`` for all before it, 0 for recurrent states.
    """

    __slots__ = ("_nodes", "_pool", "page_size", "window")

    def __init__(self, pool: PagePool, page_size: int, window: int | None = None) -> None:
        expect_page_size(page_size)
        self.page_size, self.window = page_size, window
        self._pool = pool
        self._nodes = Nodes()
        pool.attach(self.evict)

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        own = state[1]
        if "_pages" in own:  # by an earlier release
            del own["_pages"], own["_format"]
            own["_nodes"] = of_objects(own["_nodes"].values())
        for name, value in own.items():
            setattr(self, name, value)

    @property
    def num_pages(self) -> int:
        """Number of pages that can be found: all sealed ones, held or evictable."""
        return self._nodes.num_pages

    def first_needed(self, num_pages: int) -> int:
        """Number of the first page that the token after a prefix of ``num_pages`` pages sees."""
        return self.first_seen(num_pages * self.page_size)

    def first_seen(self, num_tokens: int) -> int:
        """Number of the first page that the token after ``num_tokens`` tokens sees."""
        if self.window is None:
            return 0
        end = -(-num_tokens // self.page_size)
        if self.window == 0:
            return max(end - 1, 0)
        return min(max(num_tokens - self.window + 1, 0) // self.page_size, end)

    def match(
        self,
        tokens: Sequence[int],
        salt: str = "",
        *,
        max_tokens: int | None = None,
    ) -> list[PageRef]:
        """Retain the pages of the longest prefix of a sequence that can be found.

        Args:
            tokens: Token ids from the start of the sequence, signed 64-bit.
            salt: Only pages inserted under the same salt are found.
            max_tokens: Match no more tokens than this: ``len(tokens) - 1`` for a caller that must compute the
                last token to have its logits.

        Returns:
            Pages in order, S tokens each, without those before a window. The caller holds one reference to
            each: valid until released, by the caller or by the table that adopts them.

        Raises:
            ArgumentError: a token is not a signed 64-bit integer; nothing was changed.
        """
        limit = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
        pages = self.packed(tokens, limit // self.page_size)
        path = self.walk(pages, salt)
        return self.retain(path, self._num_whole(path.pages), pages, salt, len(tokens))

    def walk(self, pages: Iterable[bytes], salt: str) -> TreePath:
        """The longest known path of a text, without references and events.

        Args:
            pages: As of ``packed``.
            salt: Salt of the text.
        """
        path = self._nodes.find(pages, salt)
        goes_on = bool(path) and self._nodes.num_children[path[-1]] > 0
        return TreePath([self._nodes.pages[node] for node in path], goes_on)

    def retain(
        self, path: TreePath, num_pages: int, pages: list[bytes], salt: str, num_tokens: int
    ) -> list[PageRef]:
        """``match`` of a complete prefix of ``num_pages`` pages of a path.

        Args:
            path: Result of ``walk``.
            num_pages: As above.
            pages: Pages that could be found, for events.
            salt: Salt of the text.
            num_tokens: Number of tokens of the text.
        """
        first, pool = self.first_needed(num_pages), self._pool
        ids = [page for page in path.pages[first:num_pages] if page >= 0]
        if pool.events is not None:
            pool.events.look_up(salt, num_tokens, pages, ids, pool.num_pages, first)
        pool.hold(ids)
        found = pool.refs(ids)
        if self.window:
            pool.prefer(found)
        return found

    def run(self, path: TreePath, first: int, end: int) -> list[int]:
        """Ids of the pages of a path from number ``first`` to before ``end``, up to one that was evicted."""
        return [*takewhile((-1).__lt__, path.pages[first:end])]

    def num_known(self, tokens: Sequence[int], salt: str = "", *, max_tokens: int | None = None) -> int:
        """Number of pages of the prefix that ``match`` would find, without references and events.

        Raises:
            ArgumentError: as ``match``.
        """
        limit = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
        return self._num_whole(self.walk(self.packed(tokens, limit // self.page_size), salt).pages)

    def known(self, tokens: Sequence[int], salt: str = "") -> list[bool]:
        """Whether each full page of a sequence is found, even if its prefix is not complete."""
        pages = self.packed(tokens)
        found = [page >= 0 for page in self.walk(pages, salt).pages]
        return found + [False] * (len(pages) - len(found))

    def whole(self, is_there: Sequence[bool]) -> list[bool]:
        """Whether the prefix that ends with each page is complete.

        Args:
            is_there: Whether each page is found.
        """
        size = self.page_size
        return [num_tokens <= (i + 1) * size for i, num_tokens in enumerate(self.fewest(is_there))]

    def fewest(self, is_there: Sequence[bool]) -> list[int]:
        """Fewest tokens of a complete prefix that ends within each page.

        Prefixes from this length up to the end of the page are complete; if none is, the number is greater
        than that.

        Args:
            is_there: Whether each page is found.
        """
        found, size = list[int](), self.page_size
        if self.window is None:
            end = len([*takewhile(bool, is_there)])
            return [i * size + 1 for i in range(end)] + [
                (i + 1) * size + 1 for i in range(end, len(is_there))
            ]
        first_there = 0  # the first of the contiguous pages up to this one
        for i, there in enumerate(is_there):
            first_there = first_there if there else i + 1
            if self.window == 0:
                found.append((i + 1) * size + (not there))
            elif first_there == 0:
                found.append(i * size + 1)
            else:
                found.append(max(first_there * size + self.window - 1, i * size + 1))
        return found

    def num_parted(self, tokens: Sequence[int], salt: str = "") -> int:
        """Number of pages before a sequence diverges from a longer known one; 0 if there is none."""
        path = self.walk(self.packed(tokens), salt)
        return len(path.pages) if path.goes_on else 0

    def pages_from(self, tokens: Sequence[int], salt: str, first: int) -> list[PageRef]:
        """Consecutive found pages of a sequence from page ``first`` on, without references."""
        return self._pool.refs(self.run(self.walk(self.packed(tokens), salt), first, len(tokens)))

    def sealed(self) -> dict[PageRef, None]:
        """Pages that can be found, in the order of their ids."""
        return dict.fromkeys(self._pool.refs(sorted(self._nodes.pages[node] for node in self._there())))

    def text_of(self, ref: PageRef) -> tuple[str, list[bytes]]:
        """Salt, and packed tokens of each page, of the text that ends with a page of ``sealed``."""
        node = self._nodes.node_of(ref.id)
        return self._nodes.salt(node), [*map(self._nodes.tokens, self._nodes.path(node))]

    def record(
        self,
        capacity: int = 100_000,
        *,
        max_remembered: int = 200_000,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Events:
        """Record events of the pool's pages from now on, until ``pool.events`` is set to ``None``.

        Args:
            capacity: Number of events to keep.
            max_remembered: Number of pages of texts to remember, for causes of misses.
            clock: Function that returns seconds.

        Returns:
            The events, which begin with the present state; ``pool.events``.
        """
        pool = self._pool
        is_lru = pool.worth is None and self.window is None
        events = Events(self.page_size, capacity, max_remembered=max_remembered, clock=clock, is_lru=is_lru)
        record_present(events, pool, self._nodes)
        pool.events = events
        return events

    def insert(
        self, tokens: Sequence[int], refs: Sequence[PageRef], salt: str = "", first: int = 0
    ) -> list[PageRef]:
        """Seal the full pages of a sequence, so that ``match`` finds them.

        If the tree already has a page of the same tokens, it is kept: the caller's reference moves to it, and
        the caller's duplicate is released.

        Args:
            tokens: Token ids from the start of the sequence, signed 64-bit; their keys and values are
                written.
            refs: Pages of the sequence, one reference to each held by the caller. Those after the last full
                page are not changed.
            salt: Salt under which the pages can be found.
            first: Number of the first of ``refs`` in the sequence, if a window has passed earlier pages.

        Returns:
            As many references as ``refs``, to be held in their place: ``table.replace(tree.insert(...))``.

        Raises:
            ArgumentError: there are fewer ``refs`` than full pages, or one twice, a token is not a signed
                64-bit integer, or ``first`` is not 0 without a window; nothing was changed.
            StateError: a page is stale, not held, or sealed under other tokens; nothing was changed.
        """
        pages = self.packed(tokens)
        count = max(len(pages) - first, 0)
        if len(refs) < count or len(set(refs)) < len(refs):
            raise ArgumentError(f"refs must be at least {count} distinct pages, got {list(refs)}")
        if first and self.window is None:
            raise ArgumentError(f"first must be 0 in a tree without a window, got {first}")
        return [*self._insert(None, pages, refs[:count], salt), *refs[count:]]

    def seal(self, table: PageTable, tokens: Sequence[int], salt: str = "", first: int = 0) -> bool:
        """``insert`` the full pages of a table that are not sealed yet, in time linear in these.

        Args:
            table: Table of the sequence.
            tokens: Token ids from the start of the sequence; those after the full pages are not read.
            salt: Salt under which the pages can be found.
            first: Number of the table's first page in the sequence, if a window has passed earlier pages.

        Returns:
            Whether the table has other pages now.

        Raises:
            ArgumentError, StateError: as ``insert``; nothing was changed.
        """
        end = max(min(len(tokens) // self.page_size - first, table.num_tokens // self.page_size), 0)
        start, above = min(table.num_sealed, end), None
        if start:
            above = self._nodes.node_of(table.page(start - 1).id)
            [page] = self.packed(tokens, first + start, first + start - 1)
            if (self._nodes.salt(above), self._nodes.tokens(above)) != (salt, page):
                raise _is_of_others(table.page(start - 1))
        pages = self.packed(tokens, first + end, first + start if start else 0)
        refs = table.pages_from(start)
        kept = self._insert(above, pages, refs[: end - start], salt) + refs[end - start :]
        if kept != refs:
            table.replace(kept, start)
        table.num_sealed = max(table.num_sealed, end)
        return kept != refs

    def _insert(
        self, above: int | None, pages: list[bytes], refs: Sequence[PageRef], salt: str
    ) -> list[PageRef]:
        """``insert`` the last of some pages after the node ``above``, or from the start of a sequence."""
        first, pool, nodes = len(pages) - len(refs), self._pool, self._nodes
        path = nodes.find(pages, salt, above)
        known = [nodes.pages[node] for node in path[first:]]
        known += [-1] * (len(refs) - len(known))
        for have, ref, is_sealed in zip(known, refs, pool.are_sealed(refs), strict=True):
            if is_sealed and have != ref.id:
                raise _is_of_others(ref)
        kept = [*refs]
        for i, have in enumerate(known):
            if have >= 0 and have != refs[i].id:
                kept[i] = pool.ref(have)
                pool.retain(kept[i])
                pool.release(refs[i])
        new = [i for i, have in enumerate(known) if have < 0]
        last = path[-1] if path else above
        parent = pool.ref(nodes.pages[last]) if last is not None and self.window is None else None
        pool.seal([refs[i] for i in new], parent, is_chain=self.window is None)
        if refs:
            path += nodes.extend(last, pages[len(path) :], salt)
        nodes.seal([path[first + i] for i in new], [refs[i].id for i in new])
        if pool.worth is not None:
            for node in (path[first + i] for i in new):
                before = nodes.pages[nodes.parents[node]]
                content = salt, nodes.tokens(node)
                pool.worth.seal(nodes.pages[node], None if before < 0 else before, content)
        if pool.events is not None:
            for _, run in groupby(enumerate(new), lambda pair: pair[1] - pair[0]):
                ids = [i for _, i in run]
                names = recorded(pool.events, nodes, path[first + ids[0] : first + ids[-1] + 1])
                pool.events.seal(names, [refs[i].id for i in ids])
        return kept

    def evict(self, num_pages: int) -> int:
        """Free ``num_pages`` evictable pages in the order of the pool's policy, or all if there are fewer.

        Returns:
            Number of freed pages.
        """
        if num_pages < 0:
            raise ArgumentError(f"num_pages must be at least 0, got {num_pages}")
        pages = self._pool.reclaim(num_pages)
        self._nodes.evict(pages)
        return len(pages)

    def sequences(self) -> Iterator[tuple[str, list[int], list[PageRef]]]:
        """Salt, tokens and last pages of each sequence that can be found and is no prefix of another.

        The pages are those after the last evicted one, or all. Those that would be evicted first come first.
        """
        nodes, pool = self._nodes, self._pool
        parents = {nodes.parents[node] for node in self._there()}
        order = [nodes.node_of(ref.id) for ref in pool.evictable()]
        order += [node for node in self._there() if pool.count(pool.ref(nodes.pages[node]))]
        for node in [node for node in order if node not in parents]:
            path = nodes.path(node)
            pages = [*takewhile((-1).__lt__, map(nodes.pages.__getitem__, reversed(path)))]
            tokens = b"".join(map(nodes.tokens, path))
            ids = list(struct.unpack(f"={len(tokens) // 8}q", tokens))
            yield nodes.salt(node), ids, pool.refs(pages[::-1])

    def packed(self, tokens: Sequence[int], num_pages: int | None = None, first: int = 0) -> list[bytes]:
        """Token ids of each page from ``first`` to ``num_pages``, all full ones if ``None``, as int64."""
        size = self.page_size
        end = len(tokens) // size if num_pages is None else max(num_pages, first)
        some = tokens[first * size : end * size]
        try:
            packed = struct.pack(f"={len(some)}q", *some)
        except struct.error:
            raise refused_tokens(some) from None
        return [packed[at : at + 8 * size] for at in range(0, len(packed), 8 * size)]

    def _there(self) -> Iterator[int]:
        """Nodes whose pages can be found."""
        return (node for node in self._nodes if self._nodes.pages[node] >= 0)

    def _num_whole(self, pages: Sequence[int]) -> int:
        """Number of pages of the longest complete prefix of ``TreePath.pages``."""
        if self.window is None:
            return len(pages)
        is_whole = self.whole([page >= 0 for page in pages])
        return max((i + 1 for i, x in enumerate(is_whole) if x), default=0)


def _is_of_others(ref: PageRef) -> StateError:
    return StateError(
        f"tokens and salt must be those under which page {ref.id} of generation {ref.generation} was found "
        f"or committed before, got others"
    )
