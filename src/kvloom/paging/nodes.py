"""Nodes of a prefix tree in arrays, and how a recording of events names them. Imports no torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvloom.paging.causes import TracedPage
from kvloom.paging.events import Events
from kvloom.paging.page_states import PageRef
from kvloom.paging.pool import PagePool


class Nodes:
    """Tokens of pages, each after those of its parent, whether the pool still has the page or not.

    A node is a number: an index of the arrays. A child is found by the hash of its parent and its tokens, and
    then both are compared; Python hashes bytes with a secret of the process. The parent of the first page of
    a text is the root of its salt, so a node stands for all tokens from the start of a sequence. The table of
    hashes grows by one entry at a time, so no new page costs more than others.

    Attributes:
        pages: Page of each node; -1 if it was evicted, and of a root.
        parents: Parent of each node; -1 of a root, and of a number that is not in use.
        num_children: Number of child nodes of each.
        num_pages: Number of pages of all nodes.
    """

    __slots__ = (
        "_free", "_hashes", "_last", "_mask", "_next", "_node_of", "_root_of", "_roots",
        "_salts", "_table", "_tokens", "num_children", "num_pages", "pages", "parents",
    )  # fmt: skip

    def __init__(self) -> None:
        self.num_pages = 0
        self.pages: list[int] = []
        self.num_children: list[int] = []
        self.parents = array("i")
        self._tokens: list[bytes] = []  # of each node
        self._hashes, self._root_of, self._last = array("q"), array("i"), array("i")
        self._next = array("i")  # another node of the same entry
        self._free: list[int] = []  # numbers that are not in use
        self._table, self._mask = array("i", [-1]), 0  # the first node of each entry; bits of their numbers
        self._node_of = array("i")  # by page; -1 if it is not sealed
        self._roots: dict[str, int] = {}
        self._salts: dict[int, str] = {}

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        for name, value in state[1].items():
            setattr(self, name, value)
        self._table = array("i", [-1]) * len(self._table)  # another process has other hashes
        for node in self:
            self._hashes[node] = digest = hash((self.parents[node], self._tokens[node]))
            entry = self._entry(digest)
            self._next[node], self._table[entry] = self._table[entry], node

    def __iter__(self) -> Iterator[int]:
        """Nodes in use without roots."""
        return (node for node, parent in enumerate(self.parents) if parent >= 0)

    def find(self, pages: Iterable[bytes], salt: str, above: int | None = None) -> list[int]:
        """Longest path of pages from the start of a text, or after a node."""
        path, tokens, last = list[int](), self._tokens, self._last
        parent = self._roots.get(salt, -1) if above is None else above
        for page in pages:
            node = last[parent] if parent >= 0 else -1  # often the only child
            if node < 0 or tokens[node] != page:
                node = self._child(parent, page)
                if node < 0:
                    break
                last[parent] = node
            path.append(node)
            parent = node
        return path

    def _child(self, parent: int, page: bytes) -> int:
        """Child of a node with these tokens; -1 if there is none."""
        node = self._table[self._entry(hash((parent, page)))]
        while node >= 0 and (self.parents[node] != parent or self._tokens[node] != page):
            node = self._next[node]
        return node

    def extend(self, above: int | None, pages: Sequence[bytes], salt: str) -> list[int]:
        """New nodes, each after the one before: after ``above``, or from the start of a text of ``salt``."""
        parent = self._roots.get(salt, -1) if above is None else above
        if parent < 0:
            [parent] = self._numbers(1)
            self._root_of[parent], self._roots[salt], self._salts[parent] = parent, parent, salt
        root, numbers = self._root_of[parent], self._numbers(len(pages))
        parents, tokens, hashes, table, following = (
            self.parents, self._tokens, self._hashes, self._table, self._next,
        )  # fmt: skip
        for node, page in zip(numbers, pages, strict=True):
            hashes[node] = digest = hash((parent, page))
            entry = digest & self._mask
            if entry >= len(table):
                entry &= self._mask >> 1
            following[node], table[entry] = table[entry], node
            parents[node], tokens[node], self._root_of[node] = parent, page, root
            self.num_children[parent] += 1
            parent = node
        return numbers

    def seal(self, nodes: Sequence[int], pages: Sequence[int]) -> None:
        """Say which pages have the keys and values of nodes without one."""
        self.num_pages += len(pages)
        for node, page in zip(nodes, pages, strict=True):
            if page >= len(self._node_of):
                self._node_of.extend([-1] * (page + 1 - len(self._node_of)))
            self.pages[node], self._node_of[page] = page, node

    def evict(self, pages: Sequence[int]) -> None:
        """Forget pages, and nodes that have neither page nor children then."""
        self.num_pages -= len(pages)
        for page in pages:
            node, self._node_of[page] = self._node_of[page], -1
            self.pages[node] = -1
            while node >= 0 and self.pages[node] < 0 and not self.num_children[node]:
                parent = self.parents[node]
                if parent < 0:
                    del self._roots[self._salts.pop(node)]
                else:
                    self._leave(node)
                    self.num_children[parent] -= 1
                    if self._last[parent] == node:
                        self._last[parent] = -1
                self.parents[node], self._tokens[node] = -1, b""
                self._free.append(node)
                node = parent

    def node_of(self, page: int) -> int:
        """Node of a page; -1 if it is not sealed."""
        return self._node_of[page] if page < len(self._node_of) else -1

    def tokens(self, node: int) -> bytes:
        """Token ids of a node, int64."""
        return self._tokens[node]

    def path(self, node: int) -> list[int]:
        """Nodes from the start of the sequence to this one."""
        path = list[int]()
        while self.parents[node] >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def parent(self, node: int) -> int:
        """Node of the page before; -1 at the start of a sequence."""
        parent = self.parents[node]
        return parent if self.parents[parent] >= 0 else -1

    def salt(self, node: int) -> str:
        """Salt of the sequence."""
        return self._salts[self._root_of[node]]

    def _numbers(self, count: int) -> list[int]:
        """Numbers of new nodes, which have no parents yet and are not in the table."""
        numbers = [self._free.pop() for _ in range(min(count, len(self._free)))]
        if missing := count - len(numbers):
            numbers += range(len(self.pages), len(self.pages) + missing)
            for of_each in (self.pages, self.parents, self._root_of, self._hashes, self._next, self._last):
                of_each.extend([-1] * missing)
            self.num_children += [0] * missing
            self._tokens += [b""] * missing
            for _ in range(missing):
                self._split()
        return numbers

    def _split(self) -> None:
        """Add an entry to the table, for some nodes of another one."""
        table, following = self._table, self._next
        new = len(table)
        self._mask = mask = (1 << new.bit_length()) - 1
        old = new & (mask >> 1)
        node, table[old] = table[old], -1
        table.append(-1)
        while node >= 0:
            entry, after = new if self._hashes[node] & mask == new else old, following[node]
            following[node], table[entry] = table[entry], node
            node = after

    def _entry(self, digest: int) -> int:
        """Entry of a hash: its last bits, or where one is not there yet, one bit less."""
        entry = digest & self._mask
        return entry if entry < len(self._table) else entry & (self._mask >> 1)

    def _leave(self, node: int) -> None:
        """Take a node out of the table."""
        entry, following = self._entry(self._hashes[node]), self._next
        step = self._table[entry]
        if step == node:
            self._table[entry] = following[node]
        else:
            while following[step] != node:
                step = following[step]
            following[step] = following[node]


class Node:
    """Node of a tree that an earlier release pickled.

    Attributes:
        key: Salt, parent or ``None``, and token ids.
        page: Its page, or ``None``.
        num_children: Number of child nodes.
    """

    __slots__ = ("key", "num_children", "page")

    key: tuple[str, Node | None, bytes]
    page: PageRef | None


def of_objects(old: Iterable[Node]) -> Nodes:
    """Nodes of a tree that an earlier release pickled, parents first."""
    nodes, numbers = Nodes(), dict[Node | None, int | None]({None: None})
    for node in old:
        salt, parent, tokens = node.key
        [number] = nodes.extend(numbers[parent], [tokens], salt)
        numbers[node] = number
        if node.page is not None:
            nodes.seal([number], [node.page.id])
    return nodes


def record_present(events: Events, pool: PagePool, nodes: Nodes) -> None:
    """Begin a recording with the state of a pool and its tree."""
    events.note("grow", [], num_pages=pool.num_pages)
    idle = [ref.id for ref in pool.evictable()]
    free = {page for page in range(pool.num_pages) if pool.is_free(page)}
    events.take([page for page in range(pool.num_pages) if page not in free])
    known: dict[int, TracedPage | None] = {-1: None}
    for last in nodes:
        above, step = list[int](), last
        while step not in known:
            above.append(step)
            step = nodes.parent(step)
        for node in reversed(above):
            before = known[nodes.parent(node)]
            known[node] = own = events.causes.node_after(before, nodes.salt(node), nodes.tokens(node))
            if nodes.pages[node] >= 0:
                events.seal([own], [nodes.pages[node]])
    for page, number in _holders(pool).items():
        for _ in range(1, number):
            events.add("share", page)
        if not number:
            events.add("release", page)
    for page in idle:
        events.causes.idle(page)


def recorded(events: Events, nodes: Nodes, path: Sequence[int]) -> list[TracedPage]:
    """Nodes of consecutive pages of a text in the history of causes."""
    above: list[int] = []  # pages before them, up to one that is known to be sealed, the last one first
    known, step, salt = None, nodes.parent(path[0]), nodes.salt(path[0])
    while step >= 0 and known is None:
        known = None if nodes.pages[step] < 0 else events.causes.node_of(nodes.pages[step])
        if known is None:
            above.append(step)
            step = nodes.parent(step)
    found: list[TracedPage] = []
    for node in [*reversed(above), *path]:
        known = events.causes.node_after(known, salt, nodes.tokens(node))
        found.append(known)
    return found[len(above) :]


def _holders(pool: PagePool) -> dict[int, int]:
    """Number of references to each page, without those of its children."""
    held = {page: number for page, number in enumerate(pool._counts) if not pool.is_free(page)}
    for page, parent in enumerate(pool._parents):
        if parent >= 0 and pool._counts[page]:
            held[parent] -= 1
    return held
