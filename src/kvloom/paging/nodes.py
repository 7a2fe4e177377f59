"""Nodes of a prefix tree, and how a recording of events names them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvloom.paging.causes import Node as TextNode
from kvloom.paging.events import Events
from kvloom.paging.pool import PagePool, PageRef


class Node:
    """Tokens of one page after those of its parent, whether the pool still has the page or not.

    Attributes:
        key: Salt, parent, and the S token ids as int64, so it identifies all tokens from the start of the
            sequence. Python hashes bytes with a secret of the process, and compares them when their hashes
            are equal; a parent is compared by identity.
        page: Page with their keys and values; ``None`` if it was evicted.
        num_children: Number of child nodes.
    """

    __slots__ = ("key", "num_children", "page")

    def __init__(self, key: tuple[str, Node | None, bytes]) -> None:
        self.key = key
        self.page: PageRef | None = None
        self.num_children = 0

    def path(self) -> list[Node]:
        """Nodes from the start of the sequence to this one."""
        path, step = [self], self.key[1]
        while step is not None:
            path.append(step)
            step = step.key[1]
        return path[::-1]


def record_present(events: Events, pool: PagePool, nodes: Iterable[Node]) -> None:
    """Begin a recording with the state of a pool; of its tree's ``nodes`` parents come first."""
    events.note("grow", [], num_pages=pool.num_pages)
    idle = [ref.id for ref in pool.evictable()]
    free = {page for page in range(pool.num_pages) if pool.is_free(page)}
    events.take([page for page in range(pool.num_pages) if page not in free])
    known: dict[Node | None, TextNode | None] = {None: None}
    for node in nodes:
        salt, parent, tokens = node.key
        known[node] = own = events.causes.node_after(known[parent], salt, tokens)
        if node.page is not None:
            events.seal([own], [node.page.id])
    for page, number in _holders(pool).items():
        for _ in range(1, number):
            events.add("share", page)
        if not number:
            events.add("release", page)
    for page in idle:
        events.causes.idle(page)


def recorded(events: Events, path: Sequence[Node]) -> list[TextNode]:
    """Nodes of consecutive pages of a text in the history of causes."""
    above: list[Node] = []  # pages before them, up to one that is known to be sealed, the last one first
    known, step = None, path[0].key[1]
    while step is not None and known is None:
        known = None if step.page is None else events.causes.node_of(step.page.id)
        if known is None:
            above.append(step)
            step = step.key[1]
    found: list[TextNode] = []
    for node in [*reversed(above), *path]:
        known = events.causes.node_after(known, node.key[0], node.key[2])
        found.append(known)
    return found[len(above) :]


def _holders(pool: PagePool) -> dict[int, int]:
    """Number of references to each page, without those of its children."""
    held = {page: number for page, number in enumerate(pool._counts) if not pool.is_free(page)}
    for page, parent in pool._parents.items():
        if parent is not None and pool._counts[page]:
            held[parent] -= 1
    return held
