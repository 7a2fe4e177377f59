"""Recomputes the state of every page from its references, and compares it with pool, tree and tables."""

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
    """Check every invariant, in time linear in the pages and in the references to them.

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
        holders += table.pages
    for ref in holders:
        if not 0 <= ref.id < pool.num_pages:
            raise StateError(f"a reference is to page {ref.id} of {pool.num_pages}")
        if pool._refs[ref.id] != ref:
            raise StateError(f"{ref} is held and stale: the page is now {pool._refs[ref.id]}")
    _check_tree(pool, tree)
    _check_states(pool, Counter(ref.id for ref in holders))
    if pool.worth is not None:
        _check_worth(pool, pool.worth)


def _check_table(i: int, table: PageTable, size: int) -> None:
    """A table's length in tokens is in ((pages - 1) * size, pages * size], and no page comes twice."""
    pages = table.pages
    if table.page_size != size:
        raise StateError(f"table {i} has pages of {table.page_size} tokens, the tree of {size}")
    if not (len(pages) - 1) * size < table.num_tokens <= len(pages) * size:
        raise StateError(f"table {i} has {table.num_tokens} tokens in {len(pages)} pages of {size}")
    if len(set(pages)) != len(pages):
        raise StateError(f"table {i} has a page twice: {list(pages)}")


def _check_tree(pool: PagePool, tree: PrefixTree) -> None:
    """Each sealed page has one key, and its parents lead to a root under one salt."""
    keys, parents = tree._keys, pool._parents
    if keys.keys() != parents.keys() or len(tree._refs) != len(keys):
        raise StateError(f"sealed are {sorted(parents)}, in the tree {sorted(tree._refs.values())}")
    for page, key in keys.items():
        salt, parent, tokens = key
        if tree._refs.get(key) != pool._refs[page]:
            raise StateError(f"the key of {pool._refs[page]} leads to {tree._refs.get(key)}")
        if len(tokens) != 8 * tree.page_size:
            raise StateError(f"page {page} is found by {len(tokens)} bytes of tokens")
        if parents[page] != (None if parent is None else parent.id):
            raise StateError(f"the parent of page {page} is {parent}, but it holds {parents[page]}")
        if parent is not None and (parent.id not in keys or pool._refs[parent.id] != parent):
            raise StateError(f"page {page} is sealed under {parent}, which is not in the tree")
        if parent is not None and keys[parent.id][0] != salt:
            raise StateError(f"page {page} and its parent {parent.id} have two salts")
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
    """Each page has its place, and is free, active or evictable, by its references alone, held ``counts``."""
    for page, (extent, index) in enumerate(pool._places):
        if pool._extents[extent][index] != page:
            there = pool._extents[extent][index]
            raise StateError(
                f"page {page} lies at {(extent, index)}, but extent {extent} has page {there} there"
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
    if pool._evictable.keys() != idle & sealed.keys():
        raise StateError(f"evictable are {sorted(idle & sealed.keys())}, listed {sorted(pool._evictable)}")
    visited: set[int | None] = set()
    for page in pool._evictable:
        visited.add(page)
        if sealed[page] in visited:
            raise StateError(f"page {page} would be evicted after its parent {sealed[page]}")


def _check_worth(pool: PagePool, worth: WorthOrder) -> None:
    """The order of what goes knows each sealed page, its parent and children, and if it is evictable."""
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
        if (text.rest is not None) != (page in pool._evictable):
            raise StateError(f"page {page} is ranked as if it were {'not ' * (text.rest is None)}evictable")
        if text.rest is not None and not text.children and id(text.rest) not in listed:
            raise StateError(f"page {page} has no children, and can never go")
