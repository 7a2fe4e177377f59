"""Every disagreement with the references that are held is reported in a sentence."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence

import pytest
from paging.world import append

from kvloom.errors import StateError
from kvloom.paging import PagePool, PageRef, PageTable, PrefixTree, check
from kvloom.paging.page_states import GONE_BY, PREFERRED, SEALED, TAKEN
from kvloom.paging.rings import FREE, IDLE


class Scene:
    """Two sealed pages and a third of one table, an idle sealed page, and four free ones."""

    def __init__(self) -> None:
        self.pool = PagePool(8)
        self.tree = PrefixTree(self.pool, 2)
        self.table = PageTable(self.pool, 2)
        append(self.table, 5)
        self.table.replace(self.tree.insert([1, 2, 3, 4, 5], self.table.pages))
        idle = self.tree.insert([1, 2, 7, 8], [self.table.pages[0], *self.pool.take(1)])[1]
        self.pool.release(idle)

    def check(self) -> None:
        check(self.pool, self.tree, [self.table])


def test_healthy_scene_passes() -> None:
    Scene().check()


def test_empty_pool_passes() -> None:
    pool = PagePool(0)
    check(pool, PrefixTree(pool, 1), [])


def test_references_outside_of_tables_are_counted() -> None:
    scene = Scene()
    held = scene.tree.match([1, 2, 7, 8])
    check(scene.pool, scene.tree, [scene.table], held)
    with pytest.raises(StateError, match="page 0 must count its 2 references, got 4"):
        scene.check()


def add_count(scene: Scene, page: int, more: int) -> None:
    scene.pool._counts[page] += more


def rekey(scene: Scene, page: int, parent: int, tokens: bytes) -> None:
    """Move the node of a page, with all that follows from its key but its salt."""
    nodes = scene.tree._nodes
    node, salt = nodes.node_of(page), nodes.salt(nodes.node_of(page))
    nodes._leave(node)
    nodes.num_children[nodes.parents[node]] -= 1
    nodes._last[nodes.parents[node]] = -1
    if parent < len(nodes.pages):
        [twin] = nodes.extend(parent, [tokens], salt)
        nodes._leave(twin)
        nodes.parents[twin] = -1
    nodes.parents[node], nodes._tokens[node], nodes._hashes[node] = parent, tokens, hash((parent, tokens))
    entry = nodes._entry(nodes._hashes[node])
    nodes._next[node], nodes._table[entry] = nodes._table[entry], node


def add_node(scene: Scene, page: int) -> None:
    nodes = scene.tree._nodes
    [node] = nodes.extend(None, [TWO], "other")
    nodes.pages[node] = page
    nodes.num_pages += page >= 0


def set_flag(scene: Scene, page: int, flag: int) -> None:
    scene.pool._flags[page] |= flag


def swap(items: MutableSequence[int], one: int, other: int) -> None:
    items[one], items[other] = items[other], items[one]


def node_of(scene: Scene, page: int) -> int:
    return scene.tree._nodes.node_of(page)


TWO = b"12345678" * 2
DAMAGE: dict[str, Callable[[Scene], object]] = {
    "page 2 must count its 1 references, got 2": lambda s: add_count(s, 2, 1),
    "page 1 must count its 1 references, got 0": lambda s: add_count(s, 1, -1),
    "page 3 must count its 0 references, got 1": lambda s: add_count(s, 3, 1),
    "page 7 must count its 0 references, got 1": lambda s: add_count(s, 7, 1),
    r"free pages must be \[4, 5, 6, 7\], got \[5, 6, 7\]": lambda s: s.pool._rings.pop(FREE, 1),
    r"free pages must be \[4, 5, 6, 7\], got \[2, 4, 5, 6, 7\]": lambda s: s.pool._rings.add(FREE, [2]),
    r"free pages must be \[4, 5, 6, 7\], got \[4, 5, 6, 7\], counted as 5": lambda s: setattr(
        s.pool, "num_free", 5
    ),
    "extent 0 must have page 0 at index 0, got page 7": lambda s: s.pool._extents[0].reverse(),
    r"evictable pages must be \[3\], got \[\]": lambda s: s.pool._rings.remove([3]),
    r"evictable pages must be \[3\], got \[1, 3\]": lambda s: s.pool._rings.add(IDLE, [1]),
    r"evictable pages must be \[3\], got \[3\], counted as 0": lambda s: setattr(s.pool, "num_evictable", 0),
    "5 must be before 4, got 1": lambda s: s.pool._rings.before.__setitem__(4, 1),
    r"the tree must have the sealed pages \[0, 1, 2, 3\], got": lambda s: set_flag(s, 2, SEALED),
    r"the tree must have the sealed pages \[0, 1\], got": lambda s: s.pool._flags.__setitem__(3, TAKEN),
    r"the tree must have the sealed pages \[0, 1, 3\], got \[0, 0, 1, 3\]": lambda s: add_node(s, 0),
    "node 5 must have a page, got none; it has 0 children": lambda s: add_node(s, -1),
    "must count its 2 children, got 3": lambda s: s.tree._nodes.num_children.__setitem__(node_of(s, 0), 3),
    "must have a parent or be the root of a salt, got neither": lambda s: s.tree._nodes._roots.clear(),
    "page 7 must be flagged as passed .*, got flags 8": lambda s: set_flag(s, 7, PREFERRED),
    "page 3 must be flagged as passed .*, got flags 7": lambda s: set_flag(s, 3, GONE_BY),
    "page 1 must lead to its node 2, got node 3": lambda s: swap(s.tree._nodes._node_of, 1, 3),
    "page 3 must have 2 tokens, got 3 bytes": lambda s: rekey(s, 3, node_of(s, 0), b"odd"),
    "page 3 must have the hash of its tokens, got that of others": lambda s: (
        s.tree._nodes._tokens.__setitem__(node_of(s, 3), TWO)
    ),
    r"the table of hashes must have the nodes \[1, 2, 3\], got \[1, 2\]": lambda s: s.tree._nodes._leave(
        node_of(s, 3)
    ),
    "node 1 must have found one of its children last, got 1": lambda s: s.tree._nodes._last.__setitem__(1, 1),
    "page 3 must hold its parent 0, got 1": lambda s: s.pool._parents.__setitem__(3, 1),
    "page 3 must have a parent in the tree, got node 9": lambda s: rekey(s, 3, 9, TWO),
    "page 3 must have the salt of its parent 0, got another": lambda s: s.tree._nodes._root_of.__setitem__(
        node_of(s, 3), 3
    ),
    r"references must be to pages in \[0, 8\), got PageRef\(id=8": lambda s: s.table._held().__setitem__(
        2, PageRef(8, 0)
    ),
    "references must be valid, got .*generation=1.* where the page is .*generation=0": lambda s: (
        s.table._held().__setitem__(2, PageRef(2, 1))
    ),
    "table 0 must have 4 pages for 7 tokens, got 3": lambda s: setattr(s.table, "_num_tokens", 7),
    "table 0 must have 2 pages for 4 tokens, got 3": lambda s: setattr(s.table, "_num_tokens", 4),
    "table 0 must have distinct pages": lambda s: s.table._held().__setitem__(2, s.table.pages[0]),
    "table 0 must have the page_size of the tree, 2, got 3": lambda s: setattr(s.table, "page_size", 3),
    "table 0 must be of the pool, got a table of another": lambda s: setattr(s.table, "_pool", PagePool(8)),
    "tree must be of the pool, got a tree of another": lambda s: setattr(s.tree, "_pool", PagePool(8)),
    "a table must not be used after release": lambda s: s.table.release(),
}


@pytest.mark.parametrize(("sentence", "damage"), DAMAGE.items(), ids=DAMAGE)
def test_damage_is_reported(sentence: str, damage: Callable[[Scene], object]) -> None:
    scene = Scene()
    damage(scene)
    with pytest.raises(StateError, match=sentence):
        scene.check()


def test_parent_listed_before_its_child_is_reported() -> None:
    scene = Scene()
    scene.table.release()
    check(scene.pool, scene.tree, [])
    scene.pool._rings.remove([3])
    scene.pool._rings.add(IDLE, [3])
    with pytest.raises(StateError, match="page 3 must be evicted before its parent 0, got the other order"):
        check(scene.pool, scene.tree, [])


def test_page_that_is_its_own_ancestor_is_reported() -> None:
    scene = Scene()
    scene.pool._parents[0] = 1
    rekey(scene, 0, node_of(scene, 1), TWO)
    with pytest.raises(StateError, match="must not be its own ancestor"):
        scene.check()
