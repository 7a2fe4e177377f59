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
        raise StateError("the tree is of another pool")
    holders = [*held]
    for i, table in enumerate(tables):
        if table._pool is not pool:
            raise StateError(f"table {i} is of another pool")
        _check_table(i, table, tree.page_size)
        if any(ref.id not in _sealed(pool) for ref in table.pages[: table.num_sealed]):
            raise StateError(f"table {i} has {table.num_sealed} sealed pages, of which some are not sealed")
        holders += table.pages
    for ref in holders:
        if not 0 <= ref.id < pool.num_pages:
            raise StateError(f"a reference is to page {ref.id} of {pool.num_pages}")
        if pool.ref(ref.id) != ref:
            raise StateError(f"{ref} is held and stale: the page is now {pool.ref(ref.id)}")
    _check_tree(pool, tree)
    _check_states(pool, Counter(ref.id for ref in holders))
    if pool.worth is not None:
        _check_worth(pool, pool.worth)


def _check_table(i: int, table: PageTable, size: int) -> None:
    """Check that a table has ((pages - 1) * size, pages * size] tokens, and no page twice."""
    pages = table.pages
    if table.page_size != size:
        raise StateError(f"table {i} has pages of {table.page_size} tokens, the tree of {size}")
    if not (len(pages) - 1) * size < table.num_tokens <= len(pages) * size:
        raise StateError(f"table {i} has {table.num_tokens} tokens in {len(pages)} pages of {size}")
    if table.num_sealed > table.num_tokens // size:
        raise StateError(f"table {i} has {table.num_sealed} sealed pages, and {table.num_tokens} tokens")
    if len(set(pages)) != len(pages):
        raise StateError(f"table {i} has a page twice: {list(pages)}")


def _check_tree(pool: PagePool, tree: PrefixTree) -> None:
    """Check that each sealed page has one node, whose parents lead to a root under one salt."""
    nodes, parents, is_chain = tree._nodes, pool._parents, tree.window is None
    sealed = sorted(_sealed(pool))
    there = sorted(nodes.pages[node] for node in nodes if nodes.pages[node] >= 0)
    if there != sealed or nodes.num_pages != len(there):
        raise StateError(f"sealed are {sealed}, in the tree {there} and {nodes.num_pages} counted")
    children = Counter(nodes.parents[node] for node in nodes)
    for node in [*nodes, *nodes._salts]:
        page, parent = nodes.pages[node], nodes.parents[node]
        if nodes.num_children[node] != children[node]:
            raise StateError(
                f"node {node} has {children[node]} children, and counts {nodes.num_children[node]}"
            )
        if parent < 0:
            if page >= 0 or nodes._roots.get(nodes._salts.get(node, "")) != node:
                raise StateError(f"node {node} of page {page} has no parent, and is the root of no salt")
            continue
        if not 0 <= parent < len(nodes.parents) or (nodes.parents[parent] < 0 and parent not in nodes._salts):
            raise StateError(f"page {page} is sealed under node {parent}, which is not in the tree")
        if nodes._root_of[node] != nodes._root_of[parent]:
            raise StateError(f"page {page} and its parent {nodes.pages[parent]} have two salts")
        if page < 0 and (is_chain or not children[node]):
            raise StateError(f"a node of {children[node]} children has no page")
        if len(nodes.tokens(node)) != 8 * tree.page_size:
            raise StateError(f"page {page} is found by {len(nodes.tokens(node))} bytes of tokens")
        if nodes._last[node] >= 0 and nodes.parents[nodes._last[node]] != node:
            raise StateError(f"node {node} has no child {nodes._last[node]}, which was found last")
        if nodes._hashes[node] != hash((parent, nodes.tokens(node))):
            raise StateError(f"page {page} is found by other tokens than {nodes.tokens(node)!r}")
        if page >= 0 and nodes.node_of(page) != node:
            raise StateError(f"page {page} of node {node} leads to node {nodes.node_of(page)}")
        if page >= 0 and parents[page] != (nodes.pages[parent] if is_chain else -1):
            raise StateError(
                f"the parent of page {page} is {nodes.pages[parent]}, but it holds {parents[page]}"
            )
    entered = list[int]()
    for first in nodes._table:
        while first >= 0 and len(entered) <= len(nodes.pages):
            entered.append(first)
            first = nodes._next[first]
    if sorted(entered) != [*nodes]:
        raise StateError(f"nodes are {[*nodes]}, in the table {sorted(entered)}")
    rooted: set[int] = set()
    for node in nodes:
        path: set[int] = set()
        while node >= 0 and node not in rooted:
            if node in path:
                raise StateError(f"page {nodes.pages[node]} is its own ancestor")
            path.add(node)
            node = nodes.parents[node]
        rooted |= path


def _check_states(pool: PagePool, counts: Counter[int]) -> None:
    """Check each page's place and its state, which follows from ``counts`` of held references alone."""
    for page, (extent, index) in enumerate(map(pool.place, range(pool.num_pages))):
        if pool._extents[extent][index] != page:
            there = pool._extents[extent][index]
            raise StateError(
                f"page {page} is at {(extent, index)}, but extent {extent} has page {there} there"
            )
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
            raise StateError(f"page {page} has count {count}, and {counts[page]} references")
    idle = {page for page in range(pool.num_pages) if not counts[page]}
    free, passed, listed = ([*pool._rings.each(ring)] for ring in (FREE, PASSED, IDLE))
    if sorted(free) != sorted(idle - sealed) or len(free) != pool.num_free:
        raise StateError(
            f"free are {sorted(idle - sealed)}, listed as free {sorted(free)}, counted {pool.num_free}"
        )
    listed = passed + listed
    if sorted(listed) != sorted(idle & sealed) or len(listed) != pool.num_evictable:
        raise StateError(
            f"evictable are {sorted(idle & sealed)}, listed {sorted(listed)}, counted {pool.num_evictable}"
        )
    for ring, pages in ((FREE, free), (PASSED, passed), (IDLE, listed[len(passed) :])):
        for before, page in pairwise([ring, *pages, ring]):
            if pool._rings.before[page] != before:
                raise StateError(f"{pool._rings.before[page]} is before {page}, which comes after {before}")
    for page, flags in enumerate(pool._flags):
        if bool(flags & GONE_BY) != (page in passed) or (
            flags & PREFERRED and page not in sealed - {*passed}
        ):
            raise StateError(f"preferred is page {page}, which has been passed or is gone: flags {flags}")
    visited: set[int] = set()
    for page in listed:
        visited.add(page)
        if parents[page] in visited:
            raise StateError(f"page {page} would be evicted after its parent {parents[page]}")


def _sealed(pool: PagePool) -> set[int]:
    return {page for page, flags in enumerate(pool._flags) if flags & SEALED}


def _check_worth(pool: PagePool, worth: WorthOrder) -> None:
    """Check that the eviction order has each sealed page, with its parent, children and state."""
    sealed = _sealed(pool)
    ranked = {page: text for page, text in enumerate(worth._sealed) if text >= 0}
    if ranked.keys() != sealed or worth.num_sealed != len(sealed):
        raise StateError(f"sealed are {sorted(sealed)}, ranked {sorted(ranked)}, counted {worth.num_sealed}")
    children = Counter(pool._parents)
    listed = {id(rest) for heap in worth._cells.values() for _, rest in heap}
    texts = worth._texts
    for page, text in ranked.items():
        found = texts.pages[text], texts.parents[text], texts.children[text]
        if found != (page, pool._parents[page], children[page]):
            raise StateError(
                f"page {page} has parent {pool._parents[page]} and {children[page]} children, "
                f"ranked as page, parent and children {found}"
            )
        rest = texts.rests[text]
        if (rest is not None) != (not pool._counts[page]):
            raise StateError(f"page {page} is ranked as if it were {'not ' * (rest is None)}evictable")
        if rest is not None and not texts.children[text] and id(rest) not in listed:
            raise StateError(f"page {page} has no children, and can never go")
