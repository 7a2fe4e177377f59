"""Every disagreement with the references that are held is reported in a sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from paging.world import append

from kvloom.errors import StateError
from kvloom.paging import PagePool, PageRef, PageTable, PrefixTree, check
from kvloom.paging.nodes import Node


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


def rekey(scene: Scene, page: int, salt: str, parent: Node | None, tokens: bytes) -> None:
    tree = scene.tree
    node = tree._pages[page]
    del tree._nodes[node.key]
    for above, change in ((node.key[1], -1), (parent, 1)):
        if above is not None:
            above.num_children += change
    node.key = (salt, parent, tokens)
    tree._nodes[node.key] = node


def add_node(scene: Scene, page: PageRef | None, parent: Node | None = None) -> None:
    node = scene.tree._add(("other", parent, TWO))
    node.page = page


TWO = b"12345678" * 2
DAMAGE: dict[str, Callable[[Scene], object]] = {
    "page 2 has count 2, and 1 references": lambda s: add_count(s, 2, 1),
    "page 1 has count 0, and 1 references": lambda s: add_count(s, 1, -1),
    "page 3 has count 1, and 0 references": lambda s: add_count(s, 3, 1),
    "page 7 has count 1, and 0 references": lambda s: add_count(s, 7, 1),
    r"free are \[4, 5, 6, 7\], listed as free \[5, 6, 7\]": lambda s: s.pool._free.popitem(),
    r"page 0 is at \(0, 0\), but extent 0 has page 7 there": lambda s: s.pool._extents[0].reverse(),
    r"free are \[4, 5, 6, 7\], listed as free \[2, 4, 5, 6, 7\]": lambda s: s.pool._free.update({2: None}),
    r"evictable are \[3\], listed \[\]": lambda s: s.pool._evictable.clear(),
    r"evictable are \[3\], listed \[1, 3\]": lambda s: s.pool._evictable.update({1: None}),
    r"sealed are \[0, 1, 2, 3\], in the tree": lambda s: s.pool._parents.update({2: 1}),
    r"sealed are \[0, 1\], in the tree": lambda s: s.pool._parents.pop(3),
    r"sealed are \[0, 1, 3\], in the tree \[.*id=0.*id=0": lambda s: add_node(s, s.pool.ref(0)),
    "a node of 0 children has no page": lambda s: add_node(s, None),
    "has 2 children, and counts 3": lambda s: setattr(s.tree._pages[0], "num_children", 3),
    "preferred are .*, of which some": lambda s: s.pool._preferred.add(7),
    r"the key of .*id=1.* leads to .*id=3": lambda s: s.tree._pages.update(
        {3: s.tree._pages[1], 1: s.tree._pages[3]}
    ),
    "id=3.* is found by 3 bytes of tokens": lambda s: rekey(s, 3, "", s.tree._pages[0], b"odd"),
    "the parent of page 3 is None, but it holds 0": lambda s: rekey(s, 3, "", None, TWO),
    "id=3.* is sealed under .*, which is not in the tree": lambda s: rekey(
        s, 3, "", Node(("", None, TWO)), TWO
    ),
    "id=3.* and its parent .*id=0.* have two salts": lambda s: rekey(s, 3, "other", s.tree._pages[0], TWO),
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
    scene.pool._evictable.move_to_end(3)
    with pytest.raises(StateError, match="page 3 would be evicted after its parent 0"):
        check(scene.pool, scene.tree, [])


def test_page_that_is_its_own_ancestor_is_reported() -> None:
    scene = Scene()
    scene.pool._parents[0] = 1
    rekey(scene, 0, "", scene.tree._pages[1], TWO)
    rekey(scene, 1, "", scene.tree._pages[0], TWO)
    with pytest.raises(StateError, match="is its own ancestor"):
        scene.check()
