"""Invariant check: recomputes the state of every page, and compares it with pool, tree and tables."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from kvloom.errors import StateError
from kvloom.paging.page_states import GONE_BY, PREFERRED, SEALED, PageRef
from kvloom.paging.pool import PagePool
from kvloom.paging.prefix import PrefixTree
from kvloom.paging.rings import FREE, IDLE, PASSED
from kvloom.paging.table import PageTable
from kvloom.paging.worth import WorthOrder


def check(
    pool: PagePool, tree: PrefixTree, tables: Iterable[PageTable], held: Iterable[PageRef] = ()
) -> None:
    """Check every invariant, in time linear in the pages and the references to them.

    Args:
        pool: The pool.
        tree: Its prefix tree.
        tables: All tables of the pool that are not released.
        held: References that are held outside of tables, for example matched and not yet adopted.

    Raises:
        StateError: with a sentence about the first violation.
    """
    if tree._pool is not pool:
        raise StateError("tree must be of the pool, got a tree of another pool")
    holders, sealed = [*held], _sealed(pool)
    for i, table in enumerate(tables):
        if table._pool is not pool:
            raise StateError(f"table {i} must be of the pool, got a table of another pool")
        _check_table(i, table, tree.page_size)
        others = [ref.id for ref in table.pages[: table.num_sealed] if ref.id not in sealed]
        if others:
            raise StateError(f"the first {table.num_sealed} pages of table {i} must be sealed, got {others}")
        holders += table.pages
    for ref in holders:
        if not 0 <= ref.id < pool.num_pages:
            raise StateError(f"references must be to pages in [0, {pool.num_pages}), got {ref}")
        if pool.ref(ref.id) != ref:
            raise StateError(f"references must be valid, got {ref} where the page is {pool.ref(ref.id)} now")
    _check_tree(pool, tree)
    _check_states(pool, Counter(ref.id for ref in holders))
    if pool.worth is not None:
        _check_worth(pool, pool.worth)


def _check_table(i: int, table: PageTable, size: int) -> None:
    """Check that a table has as many pages as its tokens need, and no page twice."""
    pages = table.pages
    if table.page_size != size:
        raise StateError(f"table {i} must have the page_size of the tree, {size}, got {table.page_size}")
    wanted = -(-table.num_tokens // size)
    if len(pages) != wanted:
        raise StateError(
            f"table {i} must have {wanted} pages for {table.num_tokens} tokens, got {len(pages)}"
        )
    num_full = table.num_tokens // size
    if table.num_sealed > num_full:
        raise StateError(f"table {i} must have at most {num_full} sealed pages, got {table.num_sealed}")
    if len(set(pages)) != len(pages):
        raise StateError(f"table {i} must have distinct pages, got {list(pages)}")


def _check_tree(pool: PagePool, tree: PrefixTree) -> None:
    """Check that each sealed page has one node, whose parents lead to a root under one salt."""
    nodes, parents, is_chain = tree._nodes, pool._parents, tree.window is None
    sealed = sorted(_sealed(pool))
    there = sorted(nodes.pages[node] for node in nodes if nodes.pages[node] >= 0)
    if there != sealed or nodes.num_pages != len(there):
        raise StateError(
            f"the tree must have the sealed pages {sealed}, got {there}, of which it counts {nodes.num_pages}"
        )
    children = Counter(nodes.parents[node] for node in nodes)
    for node in [*nodes, *nodes._salts]:
        page, parent = nodes.pages[node], nodes.parents[node]
        if nodes.num_children[node] != children[node]:
            raise StateError(
                f"node {node} must count its {children[node]} children, got {nodes.num_children[node]}"
            )
        if parent < 0:
            if page >= 0 or nodes._roots.get(nodes._salts.get(node, "")) != node:
                raise StateError(f"node {node} must have a parent or be the root of a salt, got neither")
            continue
        if not 0 <= parent < len(nodes.parents) or (nodes.parents[parent] < 0 and parent not in nodes._salts):
            raise StateError(f"page {page} must have a parent in the tree, got node {parent}")
        if nodes._root_of[node] != nodes._root_of[parent]:
            raise StateError(
                f"page {page} must have the salt of its parent {nodes.pages[parent]}, got another"
            )
        if page < 0 and (is_chain or not children[node]):
            raise StateError(f"node {node} must have a page, got none; it has {children[node]} children")
        if len(nodes.tokens(node)) != 8 * tree.page_size:
            raise StateError(
                f"page {page} must have {tree.page_size} tokens, got {len(nodes.tokens(node))} bytes"
            )
        if nodes._last[node] >= 0 and nodes.parents[nodes._last[node]] != node:
            raise StateError(f"node {node} must have found one of its children last, got {nodes._last[node]}")
        if nodes._hashes[node] != hash((parent, nodes.tokens(node))):
            raise StateError(f"page {page} must have the hash of its tokens, got that of others")
        if page >= 0 and nodes.node_of(page) != node:
            raise StateError(f"page {page} must lead to its node {node}, got node {nodes.node_of(page)}")
        if page >= 0 and parents[page] != (nodes.pages[parent] if is_chain else -1):
            raise StateError(f"page {page} must hold its parent {nodes.pages[parent]}, got {parents[page]}")
    entered = list[int]()
    for first in nodes._table:
        while first >= 0 and len(entered) <= len(nodes.pages):
            entered.append(first)
            first = nodes._next[first]
    if sorted(entered) != [*nodes]:
        raise StateError(f"the table of hashes must have the nodes {[*nodes]}, got {sorted(entered)}")
    rooted: set[int] = set()
    for node in nodes:
        path: set[int] = set()
        while node >= 0 and node not in rooted:
            if node in path:
                raise StateError(f"page {nodes.pages[node]} must not be its own ancestor")
            path.add(node)
            node = nodes.parents[node]
        rooted |= path


def _check_states(pool: PagePool, counts: Counter[int]) -> None:
    """Check each page's place and its state, which follows only from ``counts`` of held references."""
    for page, (extent, index) in enumerate(map(pool.place, range(pool.num_pages))):
        if pool._extents[extent][index] != page:
            there = pool._extents[extent][index]
            raise StateError(f"extent {extent} must have page {page} at index {index}, got page {there}")
    parents = pool._parents
    sealed = _sealed(pool)
    awake = list(counts)
    while awake:  # an active page holds its parent
        parent = parents[awake.pop()]
        if parent >= 0:
            counts[parent] += 1
            if counts[parent] == 1:
                awake.append(parent)
    for page, count in enumerate(pool._counts):
        if count != counts[page]:
            raise StateError(f"page {page} must count its {counts[page]} references, got {count}")
    idle = {page for page in range(pool.num_pages) if not counts[page]}
    free, passed, listed = ([*pool._rings.each(ring)] for ring in (FREE, PASSED, IDLE))
    if sorted(free) != sorted(idle - sealed) or len(free) != pool.num_free:
        raise StateError(
            f"the list of free pages must be {sorted(idle - sealed)}, got {sorted(free)}, counted as "
            f"{pool.num_free}"
        )
    listed = passed + listed
    if sorted(listed) != sorted(idle & sealed) or len(listed) != pool.num_evictable:
        raise StateError(
            f"the list of evictable pages must be {sorted(idle & sealed)}, got {sorted(listed)}, counted as "
            f"{pool.num_evictable}"
        )
    for ring, pages in ((FREE, free), (PASSED, passed), (IDLE, listed[len(passed) :])):
        for before, page in pairwise([ring, *pages, ring]):
            if pool._rings.before[page] != before:
                raise StateError(f"{before} must be before {page}, got {pool._rings.before[page]}")
    for page, flags in enumerate(pool._flags):
        if bool(flags & GONE_BY) != (page in passed) or (
            flags & PREFERRED and page not in sealed - {*passed}
        ):
            raise StateError(
                f"page {page} must be flagged as passed only in the list of passed pages, and as preferred "
                f"only if it is sealed and not passed, got flags {flags}"
            )
    visited: set[int] = set()
    for page in listed:
        visited.add(page)
        if parents[page] in visited:
            raise StateError(
                f"page {page} must be evicted before its parent {parents[page]}, got the other order"
            )


def _sealed(pool: PagePool) -> set[int]:
    return {page for page, flags in enumerate(pool._flags) if flags & SEALED}


def _check_worth(pool: PagePool, worth: WorthOrder) -> None:
    """Check that the eviction order has each sealed page, with its parent, children and state."""
    sealed = _sealed(pool)
    ranked = {page: text for page, text in enumerate(worth._sealed) if text >= 0}
    if ranked.keys() != sealed or worth.num_sealed != len(sealed):
        raise StateError(
            f"the eviction order must have the sealed pages {sorted(sealed)}, got {sorted(ranked)}, counted "
            f"as {worth.num_sealed}"
        )
    children = Counter(pool._parents)
    listed = {id(rest) for heap in worth._cells.values() for _, rest in heap}
    texts = worth._texts
    for page, text in ranked.items():
        found = texts.pages[text], texts.parents[text], texts.children[text]
        if found != (page, pool._parents[page], children[page]):
            raise StateError(
                f"the eviction order must have page {page} with parent {pool._parents[page]} and "
                f"{children[page]} children, got page, parent and children {found}"
            )
        rest = texts.rests[text]
        if (rest is not None) != (not pool._counts[page]):
            wanted = "evictable" if rest is None else "active"
            raise StateError(f"page {page} must be {wanted} in the eviction order, got the other")
        if rest is not None and not texts.children[text] and id(rest) not in listed:
            raise StateError(f"page {page} must be evictable in the eviction order, got one that is not")
