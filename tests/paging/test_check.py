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
    with pytest.raises(StateError, match="page 0 has count 4, and 2 references"):
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
    "page 2 has count 2, and 1 references": lambda s: add_count(s, 2, 1),
    "page 1 has count 0, and 1 references": lambda s: add_count(s, 1, -1),
    "page 3 has count 1, and 0 references": lambda s: add_count(s, 3, 1),
    "page 7 has count 1, and 0 references": lambda s: add_count(s, 7, 1),
    r"free are \[4, 5, 6, 7\], listed as free \[5, 6, 7\]": lambda s: s.pool._rings.pop(FREE, 1),
    r"free are \[4, 5, 6, 7\], listed as free \[2, 4, 5, 6, 7\]": lambda s: s.pool._rings.add(FREE, [2]),
    r"free are \[4, 5, 6, 7\], listed as free \[4, 5, 6, 7\], counted 5": lambda s: setattr(
        s.pool, "num_free", 5
    ),
    r"page 0 is at \(0, 0\), but extent 0 has page 7 there": lambda s: s.pool._extents[0].reverse(),
    r"evictable are \[3\], listed \[\]": lambda s: s.pool._rings.remove([3]),
    r"evictable are \[3\], listed \[1, 3\]": lambda s: s.pool._rings.add(IDLE, [1]),
    r"evictable are \[3\], listed \[3\], counted 0": lambda s: setattr(s.pool, "num_evictable", 0),
    "1 is before 4, which comes after 5": lambda s: s.pool._rings.before.__setitem__(4, 1),
    r"sealed are \[0, 1, 2, 3\], in the tree": lambda s: set_flag(s, 2, SEALED),
    r"sealed are \[0, 1\], in the tree": lambda s: s.pool._flags.__setitem__(3, TAKEN),
    r"sealed are \[0, 1, 3\], in the tree \[0, 0, 1, 3\]": lambda s: add_node(s, 0),
    "a node of 0 children has no page": lambda s: add_node(s, -1),
    "has 2 children, and counts 3": lambda s: s.tree._nodes.num_children.__setitem__(node_of(s, 0), 3),
    "is the root of no salt": lambda s: s.tree._nodes._roots.clear(),
    "preferred is page 7": lambda s: set_flag(s, 7, PREFERRED),
    "preferred is page 3, which has been passed": lambda s: set_flag(s, 3, GONE_BY),
    "page 1 of node 2 leads to node 3": lambda s: swap(s.tree._nodes._node_of, 1, 3),
    "page 3 is found by 3 bytes of tokens": lambda s: rekey(s, 3, node_of(s, 0), b"odd"),
    "page 3 is found by other tokens": lambda s: s.tree._nodes._tokens.__setitem__(node_of(s, 3), TWO),
    r"nodes are \[1, 2, 3\], in the table \[1, 2\]": lambda s: s.tree._nodes._leave(node_of(s, 3)),
    "node 1 has no child 1, which was found last": lambda s: s.tree._nodes._last.__setitem__(1, 1),
    "the parent of page 3 is 0, but it holds 1": lambda s: s.pool._parents.__setitem__(3, 1),
    "page 3 is sealed under node 9, which is not in the tree": lambda s: rekey(s, 3, 9, TWO),
    "page 3 and its parent 0 have two salts": lambda s: s.tree._nodes._root_of.__setitem__(node_of(s, 3), 3),
    "a reference is to page 8 of 8": lambda s: s.table._held().__setitem__(2, PageRef(8, 0)),
    "generation=1.* is held and stale": lambda s: s.table._held().__setitem__(2, PageRef(2, 1)),
    "table 0 has 7 tokens in 3 pages of 2": lambda s: setattr(s.table, "_num_tokens", 7),
    "table 0 has 4 tokens in 3 pages of 2": lambda s: setattr(s.table, "_num_tokens", 4),
    "table 0 has a page twice": lambda s: s.table._held().__setitem__(2, s.table.pages[0]),
    "table 0 has pages of 3 tokens, the tree of 2": lambda s: setattr(s.table, "page_size", 3),
    "table 0 is of another pool": lambda s: setattr(s.table, "_pool", PagePool(8)),
    "the tree is of another pool": lambda s: setattr(s.tree, "_pool", PagePool(8)),
    "this table was released": lambda s: s.table.release(),
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
    with pytest.raises(StateError, match="page 3 would be evicted after its parent 0"):
        check(scene.pool, scene.tree, [])


def test_page_that_is_its_own_ancestor_is_reported() -> None:
    scene = Scene()
    scene.pool._parents[0] = 1
    rekey(scene, 0, node_of(scene, 1), TWO)
    with pytest.raises(StateError, match="is its own ancestor"):
        scene.check()
