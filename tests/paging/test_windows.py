"""Trees of layers with a window: a prefix is found when the pages are there that the token behind it sees."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from paging.world import append

from kvloom.errors import ArgumentError, OutOfPages
from kvloom.paging import PagePool, PageRef, PageTable, PrefixTree, check


class Scene:
    """A windowed tree, its tables, and what it should find: a page by salt and all tokens up to its end."""

    def __init__(self, num_pages: int, page_size: int, window: int) -> None:
        self.size, self.window = page_size, window
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(self.pool, page_size, window)
        self.tables: list[tuple[str, list[int], PageTable, int]] = []
        self.contents: dict[PageRef, tuple[str, tuple[int, ...]]] = {}

    def is_there(self, salt: str, tokens: list[int], page: int) -> bool:
        text = salt, tuple(tokens[: (page + 1) * self.size])
        return any(content == text and ref in self.tree.sealed() for ref, content in self.contents.items())

    def longest(self, salt: str, tokens: list[int]) -> int:
        """Pages of the longest prefix of which a query sees all that it may, token by token."""
        for count in range(len(tokens) // self.size, 0, -1):
            end = count * self.size
            seen = {token // self.size for token in range(max(end - self.window + 1, 0), end)}
            seen = seen if self.window else {count - 1}  # the state behind the last token
            is_known = any(
                content[0] == salt and list(content[1][:end]) == tokens[:end]
                for ref, content in self.contents.items()
                if ref in self.tree.sealed()
            )
            if is_known and all(self.is_there(salt, tokens, page) for page in seen):
                return count
        return 0

    def begin(self, salt: str, tokens: list[int]) -> None:
        wanted = self.longest(salt, tokens)
        assert self.tree.num_known(tokens, salt) == wanted
        found = self.tree.match(tokens, salt)
        first = wanted - len(found)
        assert first == self.tree.first_needed(wanted)
        for page, ref in enumerate(found, first):
            assert self.contents[ref] == (salt, tuple(tokens[: (page + 1) * self.size]))
        table = PageTable(self.pool, self.size)
        table.adopt(found)
        try:
            append(table, len(tokens) - wanted * self.size)
        except OutOfPages:
            table.release()
            return
        self.tables.append((salt, tokens, table, first))

    def commit(self, i: int) -> None:
        salt, tokens, table, first = self.tables[i]
        self.tree.seal(table, tokens, salt, first)
        refs = [*table.pages]
        assert self.tree.insert(tokens, refs, salt, first) == refs
        for page, ref in enumerate(refs[: len(tokens) // self.size - first], first):
            self.contents[ref] = salt, tuple(tokens[: (page + 1) * self.size])

    def drop(self, i: int, num_pages: int) -> None:
        salt, tokens, table, first = self.tables[i]
        table.drop_front(num_pages)
        self.tables[i] = salt, tokens, table, first + num_pages

    def check(self) -> None:
        check(self.pool, self.tree, [table for _, _, table, _ in self.tables])


@pytest.mark.parametrize("page_size", [1, 2, 3])
@pytest.mark.parametrize("window", [0, 1, 2, 4, 7, 100])
def test_random_texts_find_what_their_windows_show(page_size: int, window: int) -> None:
    rng = random.Random(10 * page_size + window)
    scene = Scene(14, page_size, window)
    num_found = Counter[bool]()
    for _ in range(250):
        texts = [tokens for _, tokens, _, _ in scene.tables]
        match rng.choice(["begin", "begin", "commit", "drop", "end"]):
            case "begin":
                text = rng.choice(texts)[: rng.randrange(1, 12)] if texts and rng.random() < 0.5 else []
                text = text + rng.choices(range(2), k=rng.randrange(0, 10))
                if text:
                    num_found[scene.longest("", text) > 0] += 1
                    scene.begin(rng.choice(["", "", "b"]), text)
            case "commit" if scene.tables:
                scene.commit(rng.randrange(len(scene.tables)))
            case "drop" if scene.tables:
                i = rng.randrange(len(scene.tables))
                scene.drop(i, rng.randrange(scene.tables[i][2].num_tokens // page_size + 1))
            case "end" if scene.tables:
                scene.tables.pop(rng.randrange(len(scene.tables)))[2].release()
        scene.check()
    assert num_found[True] > 5 and num_found[False] > 5


def committed(scene: Scene, tokens: list[int]) -> None:
    scene.begin("", tokens)
    scene.commit(-1)


def test_what_a_window_passed_goes_before_the_ends_of_older_texts() -> None:
    scene = Scene(8, 2, 3)
    committed(scene, [1, 2, 3, 4])
    scene.tables.pop()[2].release()
    committed(scene, [9, 8, 7, 6, 5, 4, 3, 2])
    scene.drop(-1, 3)
    scene.tables.pop()[2].release()
    assert (scene.pool.num_evictable, scene.pool.num_passed) == (6, 3)
    scene.tree.evict(3)
    assert scene.tree.known([9, 8, 7, 6, 5, 4, 3, 2]) == [False, False, False, True]
    assert scene.longest("", [1, 2, 3, 4]) == scene.tree.num_known([1, 2, 3, 4]) == 2
    scene.check()


def test_what_was_found_is_kept_as_long_as_others() -> None:
    scene = Scene(8, 2, 3)
    text = [9, 8, 7, 6, 5, 4, 3, 2]
    committed(scene, text)
    scene.drop(0, 3)
    scene.begin("", [*text[:4], 1, 1])  # another text parts here, and goes on
    scene.drop(1, 1)
    scene.tables.pop()[2].release()
    assert scene.tree.known(text) == [True] * 4 and scene.pool.num_passed == 2
    scene.tree.evict(2)
    assert scene.tree.known(text) == [False, True, False, True]
    scene.check()


def test_a_state_is_found_at_the_end_of_its_page_alone() -> None:
    scene = Scene(8, 2, 0)
    committed(scene, [1, 2, 3, 4, 5, 6])
    scene.tables.pop()[2].release()
    assert scene.tree.fewest([True, False, True]) == [2, 5, 6]
    assert [scene.tree.first_seen(n) for n in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    [found] = scene.tree.match([1, 2, 3, 4, 9])
    scene.pool.release(found, is_passed=True)
    assert scene.pool.num_passed == 1  # a state that one text went on from is not of more use for it


def test_where_two_texts_part() -> None:
    scene = Scene(8, 2, 0)
    committed(scene, [1, 2, 3, 4, 5, 6])
    assert scene.tree.num_parted([1, 2, 3, 4, 9, 9]) == 2
    assert scene.tree.num_parted([1, 2, 3, 4, 5, 6, 7, 8]) == 0  # it goes on itself
    assert scene.tree.num_parted([1, 2, 3]) == 1
    assert scene.tree.num_parted([9, 9]) == scene.tree.num_parted([1, 2, 3, 4], "other") == 0


def test_a_tree_without_a_window_has_all_pages_of_a_text() -> None:
    pool = PagePool(4)
    tree = PrefixTree(pool, 2)
    with pytest.raises(ArgumentError, match="first must be 0 in a tree without a window, got 1"):
        tree.insert([1, 2, 3, 4], pool.take(1), first=1)


def test_why_names_what_was_evicted_from_a_window() -> None:
    scene = Scene(4, 2, 3)
    events = scene.tree.record()
    committed(scene, [1, 2, 3, 4, 5, 6])
    scene.drop(-1, 2)
    scene.tree.evict(1)
    text = [1, 2, 3, 4, 5, 6]
    known = scene.tree.num_known(text[:4])
    misses = events.explain("", list(scene.tree.packed(text[:4])), known, scene.pool.num_pages)
    assert known == 2 and not misses  # the second page is what the token behind it sees
    scene.tree.evict(1)
    misses = events.explain("", list(scene.tree.packed(text[:4])), 0, scene.pool.num_pages)
    assert [miss.cause for miss in misses] == ["evicted", "evicted"]
