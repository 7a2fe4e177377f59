"""Invariant check: recomputes the state of every page, and compares it with pool, tree and tables."""

from collections import Counter
from collections.abc import Iterable

from kvloom.errors import StateError
from kvloom.paging.pool import PagePool, PageRef
from kvloom.paging.prefix import PrefixTree
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
        if any(ref.id not in pool._parents for ref in table.pages[: table.num_sealed]):
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
    pages, parents, is_chain = tree._pages, pool._parents, tree.window is None
    there = sorted(node.page for node in tree._nodes.values() if node.page is not None)
    if pages.keys() != parents.keys() or len(there) != len(pages):
        raise StateError(f"sealed are {sorted(parents)}, in the tree {there}")
    for key, node in tree._nodes.items():
        salt, parent, tokens = key
        if node.key != key:
            raise StateError(f"the key of {node.page} is {node.key[2]!r}, and it is found by {tokens!r}")
        if len(tokens) != 8 * tree.page_size:
            raise StateError(f"{node.page} is found by {len(tokens)} bytes of tokens")
        if parent is not None and tree._nodes.get(parent.key) is not parent:
            raise StateError(f"{node.page} is sealed under {parent.page}, which is not in the tree")
        if parent is not None and parent.key[0] != salt:
            raise StateError(f"{node.page} and its parent {parent.page} have two salts")
        if node.page is None and (is_chain or not node.num_children):
            raise StateError(f"a node of {node.num_children} children has no page")
    children = Counter(id(node.key[1]) for node in tree._nodes.values())
    for node in tree._nodes.values():
        if node.num_children != children[id(node)]:
            raise StateError(f"{node.page} has {children[id(node)]} children, and counts {node.num_children}")
    for page, node in pages.items():
        if node.page != pool.ref(page) or tree._nodes.get(node.key) is not node:
            raise StateError(f"the key of {pool.ref(page)} leads to {node.page}")
        above = node.key[1].page if is_chain and node.key[1] is not None else None
        if parents[page] != (None if above is None else above.id):
            raise StateError(f"the parent of page {page} is {above}, but it holds {parents[page]}")
    rooted: set[int] = set()
    for page in parents:
        path: set[int] = set()
        step: int | None = page
        while step is not None and step not in rooted:
            if step in path:
                raise StateError(f"page {step} is its own ancestor")
            path.add(step)
            step = parents[step]
        rooted |= path


def _check_states(pool: PagePool, counts: Counter[int]) -> None:
    """Check each page's place and its state, which follows from ``counts`` of held references alone."""
    for page, (extent, index) in enumerate(map(pool.place, range(pool.num_pages))):
        if pool._extents[extent][index] != page:
            there = pool._extents[extent][index]
            raise StateError(
                f"page {page} is at {(extent, index)}, but extent {extent} has page {there} there"
            )
    sealed = pool._parents
    awake = list(counts)
    while awake:  # an active page holds its parent
        parent = sealed.get(awake.pop())
        if parent is not None:
            counts[parent] += 1
            if counts[parent] == 1:
                awake.append(parent)
    for page, count in enumerate(pool._counts):
        if count != counts[page]:
            raise StateError(f"page {page} has count {count}, and {counts[page]} references")
    idle = {page for page in range(pool.num_pages) if not counts[page]}
    if sorted(pool._free) != sorted(idle - sealed.keys()):
        raise StateError(f"free are {sorted(idle - sealed.keys())}, listed as free {sorted(pool._free)}")
    listed = [*pool._passed, *pool._evictable]
    if sorted(listed) != sorted(idle & sealed.keys()):
        raise StateError(f"evictable are {sorted(idle & sealed.keys())}, listed {sorted(listed)}")
    if not pool._preferred <= sealed.keys() or pool._preferred & pool._passed.keys():
        raise StateError(
            f"preferred are {sorted(pool._preferred)}, of which some have been passed or are gone"
        )
    visited: set[int | None] = set()
    for page in listed:
        visited.add(page)
        if sealed[page] in visited:
            raise StateError(f"page {page} would be evicted after its parent {sealed[page]}")


def _check_worth(pool: PagePool, worth: WorthOrder) -> None:
    """Check that the eviction order has each sealed page, with its parent, children and state."""
    sealed = pool._parents
    if worth._sealed.keys() != sealed.keys():
        raise StateError(f"sealed are {sorted(sealed)}, ranked {sorted(worth._sealed)}")
    children = Counter(sealed.values())
    listed = {id(rest) for heap in worth._cells.values() for _, rest in heap}
    for page, text in worth._sealed.items():
        if (text.page, text.parent, text.children) != (page, sealed[page], children[page]):
            raise StateError(
                f"page {page} has parent {sealed[page]} and {children[page]} children, ranked as page "
                f"{text.page} with parent {text.parent} and {text.children}"
            )
        if (text.rest is not None) != (page in pool._evictable or page in pool._passed):
            raise StateError(f"page {page} is ranked as if it were {'not ' * (text.rest is None)}evictable")
        if text.rest is not None and not text.children and id(text.rest) not in listed:
            raise StateError(f"page {page} has no children, and can never go")
