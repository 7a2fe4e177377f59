"""What is recorded is what happened: states by events are those of the pool, and every miss has its cause."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from oracles.interrupts import interrupted
from paging.world import Walk, World

from kvloom.errors import ArgumentError
from kvloom.paging import CAUSES, Events, Growth, PagePool, PageStates, PageTable, PrefixTree


def kinds(events: Events) -> list[str]:
    return [kind for _, kind, *_ in events]


def misses(events: Events, request: int | None = None) -> list[dict[str, Any]]:
    wanted = events.request if request is None else request
    return [more for _, kind, of, _, more in events if kind == "miss" and of == wanted]


def serve(tree: PrefixTree, pool: PagePool, text: list[int], salt: str = "") -> list[dict[str, Any]]:
    """A request from its lookup to its end; why its pages are missed."""
    refs = tree.match(text, salt)
    missed = misses(pool.events) if pool.events is not None else []
    num_pages = len(text) // tree.page_size
    for ref in tree.insert(text, refs + pool.take(num_pages - len(refs)), salt):
        pool.release(ref)
    return missed


def state_by_events(events: Events) -> PageStates:
    state = PageStates()
    for event in events:
        state.apply(event)
    return state


@pytest.mark.parametrize("capacity", [7, 100_000])
@pytest.mark.parametrize("seed", range(4))
def test_states_by_events_are_those_of_the_pool(seed: int, capacity: int) -> None:
    world = World(30, 3)
    walk = Walk(world, seed, num_requests=6)
    walk.run(60)
    events = world.tree.record(capacity)
    for _ in range(12):
        state = state_by_events(events)
        held = Counter(ref.id for request in world.requests for ref in request.table.pages)
        assert {page: counts.total() for page, counts in state.holders.items()} == held
        assert state.nodes.keys() == {ref.id for ref in world.tree.sealed()}
        assert state.num_pages == world.pool.num_pages and len(events) <= capacity
        walk.run(20)


def test_each_request_holds_what_its_table_has() -> None:
    pool = PagePool(20)
    tree = PrefixTree(pool, 2)
    events = tree.record()
    tables = []
    for text in ([1, 2, 3], [1, 2, 5], [7, 8, 9, 9]):
        table = PageTable(pool, 2)  # made before the lookup, and so told whose it is
        tree.match(text)
        table.request = events.request
        tables.append(table)
    with Growth(tables, [3, 3, 4]).made():
        pass
    twin = tables[0].fork()
    with Growth([twin], [1]).made() as copies:
        assert len(copies) == 1
    holders = state_by_events(events).holders
    for i, table in enumerate(tables, 1):
        assert all(holders[ref.id][i] for ref in table.pages)
    assert kinds(events)[-3:] == ["allocate", "copy", "release"]
    assert list(events)[-2][3] == list(copies[0])


def test_off_is_off_and_a_copy_records_nothing() -> None:
    pool = PagePool(4)
    tree = PrefixTree(pool, 2)
    assert pool.events is None
    tree.record()
    assert copy.copy(pool.events) is None
    pool.events = None
    serve(tree, pool, [1, 2, 3, 4])
    assert tree.num_known([1, 2, 3, 4]) == 2


def test_a_peek_makes_no_event() -> None:
    pool = PagePool(4)
    tree = PrefixTree(pool, 2)
    events = tree.record()
    serve(tree, pool, [1, 2, 3, 4])
    before = list(events)
    assert tree.num_known([1, 2, 3, 4], max_tokens=3) == 1 and list(events) == before


def test_events_of_a_request_in_order() -> None:
    pool = PagePool(3)
    tree = PrefixTree(pool, 2)
    events = tree.record()
    serve(tree, pool, [1, 2, 3, 4])
    serve(tree, pool, [1, 2, 5, 6, 7, 8])
    assert kinds(events) == [
        "grow", "begin", "miss", "miss", "allocate", "seal", "release",
        "begin", "hit", "miss", "miss", "evict", "allocate", "seal", "release",
    ]  # fmt: skip
    _, _, request, pages, _ = list(events)[11]
    assert request == 2 and pages == [1]  # who evicted whom


def cases() -> list[tuple[str, list[dict[str, Any]]]]:
    pool = PagePool(4)
    tree = PrefixTree(pool, 2)
    tree.record()
    never = serve(tree, pool, [1, 2, 3, 4, 5, 6])
    differ = serve(tree, pool, [1, 2, 3, 9])
    inside = serve(tree, pool, [1, 7])
    salted = serve(tree, pool, [1, 2], salt="other")
    again = serve(tree, pool, [1, 2, 3, 4, 5, 6])
    return [("never", never), ("differ", differ), ("inside", inside), ("salted", salted), ("again", again)]


def test_every_cause_of_a_tree() -> None:
    found = dict(cases())
    assert found["never"] == [
        {"cause": "never stored", "first": 0, "num_pages": 1},
        {"cause": "below", "first": 1, "num_pages": 2, "at": 0},
    ]
    assert found["differ"] == [{"cause": "tokens differ", "first": 1, "num_pages": 1, "at": 3}]
    assert found["inside"] == [{"cause": "tokens differ", "first": 0, "num_pages": 1, "at": 1}]
    assert found["salted"] == [{"cause": "other salt", "first": 0, "num_pages": 1}]
    evicted = [x["cause"] for x in found["again"]]
    assert evicted == ["evicted", "evicted"] and {x["by"] for x in found["again"]} <= {3, 4}
    assert all(x["cause"] in CAUSES for _, missed in cases() for x in missed)


def test_a_window_that_passed_is_a_cause() -> None:
    pool = PagePool(8)
    tree = PrefixTree(pool, 2)
    events = tree.record()
    text = [1, 2, 3, 4, 5, 6]
    tree.match(text)
    table = PageTable(pool, 2)
    with Growth([table], [6]).made():
        pass
    table.drop_front(1)
    table.release()
    tree.match(text)
    assert [x["cause"] for x in misses(events)] == ["window passed", "below"]


def conversations(seed: int, count: int = 100) -> list[list[int]]:
    """Texts that begin like earlier ones; a number stands for a token."""
    rng = random.Random(seed)
    made, num_tokens = [[0]], 1
    for _ in range(count):
        begin = rng.choice(made[-30:])
        new = [*accumulate([1] * rng.randint(0, 4), initial=num_tokens)][1:]
        num_tokens += len(new)
        made.append(begin[: rng.randint(1, len(begin))] + new)
    return made


def replay(texts: list[list[int]], num_pages: int, *, records: bool) -> tuple[list[int], list[list[Any]]]:
    """Pages found of each text, and why the others are not."""
    pool = PagePool(num_pages)
    tree = PrefixTree(pool, 1)
    events = tree.record(1_000_000) if records else None
    found, missed = [], []
    for text in texts:
        refs = tree.match(text)
        found.append(len(refs))
        if events is not None:
            missed.append(misses(events))
        refs = tree.insert(text[:num_pages], refs + pool.take(min(len(text), num_pages) - len(refs)))
        if events is not None and len(text) > num_pages:
            events.refuse("", list(tree.packed(text)), num_pages)
        for ref in refs:
            pool.release(ref)
    return found, missed


@pytest.mark.parametrize("num_pages", [1, 3, 8, 30])
@pytest.mark.parametrize("seed", range(3))
def test_so_many_pages_more_keep_a_page_and_one_less_does_not(seed: int, num_pages: int) -> None:
    texts = conversations(seed)
    found, missed = replay(texts, num_pages, records=True)
    evicted = [(i, x) for i, xs in enumerate(missed) for x in xs if x["cause"] == "evicted"]
    assert evicted
    for i, x in random.Random(seed).sample(evicted, min(12, len(evicted))):
        enough, _ = replay(texts[: i + 1], num_pages + x["more"], records=False)
        too_few, _ = replay(texts[: i + 1], num_pages + x["more"] - 1, records=False)
        assert too_few[i] <= x["first"] < enough[i]
    for text, count, xs in zip(texts, found, missed, strict=True):
        pages = [page for x in xs for page in range(x["first"], x["first"] + x["num_pages"])]
        assert pages == [*range(count, len(text))]  # each exactly once


def test_where_what_is_worth_least_goes_nobody_knows_how_many_pages_more_would_keep_it() -> None:
    pool = PagePool(4, "ours")
    tree = PrefixTree(pool, 1)
    tree.record()
    for text in ([1, 2], [3, 4], [5, 6]):
        serve(tree, pool, text)
    for text in ([1, 2], [3, 4], [5, 6]):
        missed = serve(tree, pool, text)
        if missed:
            assert missed[0]["cause"] == "evicted" and missed[0].get("more") is None
            break
    else:
        pytest.fail("six pages were kept in four")


def test_what_is_forgotten_was_never_stored() -> None:
    pool = PagePool(2)
    tree = PrefixTree(pool, 1)
    events = tree.record(max_remembered=8)
    for i in range(200):
        serve(tree, pool, [i, 1000 + i])
        assert len(events.causes.nodes) <= 10
    assert serve(tree, pool, [199, 1199]) == []
    assert [x["cause"] for x in serve(tree, pool, [198, 1198])] == ["evicted", "evicted"]
    assert [x["cause"] for x in serve(tree, pool, [1, 1001])] == ["never stored", "below"]


def test_a_file_has_pages_events_and_no_salt(tmp_path: Path) -> None:
    pool = PagePool(3)
    tree = PrefixTree(pool, 2)
    events = tree.record()
    serve(tree, pool, [65, 66, 67, 68], salt="a secret")
    events.save(tmp_path / "events.jsonl", decode=lambda ids: "".join(map(chr, ids)))
    text = (tmp_path / "events.jsonl").read_text()
    head, *lines = map(json.loads, text.splitlines())
    assert head["format"] == "kvloom-events/1" and head["page_size"] == 2 and "secret" not in text
    nodes = [line for line in lines if "node" in line]
    assert [(x["parent"], x["tokens"], x["text"]) for x in nodes] == [
        (None, [65, 66], "AB"), (0, [67, 68], "CD"),
    ]  # fmt: skip
    assert [line["kind"] for line in lines if "kind" in line] == kinds(events)
    events.save(tmp_path / "bare.jsonl", tokens=False)
    assert "tokens" not in (tmp_path / "bare.jsonl").read_text().splitlines()[1]


@pytest.mark.parametrize("name", ["capacity", "max_remembered"])
def test_bad_arguments_are_named(name: str) -> None:
    tree = PrefixTree(PagePool(1), 1)
    with pytest.raises(ArgumentError, match=f"^{name} must be at least 1, got 0"):
        tree.record(**{name: 0})
    assert tree._pool.events is None


def test_recording_a_held_text_costs_as_much_for_each_page() -> None:
    lines = []
    for num_pages in (200, 400, 600):
        pool = PagePool(num_pages)
        tree = PrefixTree(pool, 1)
        tree.insert(range(num_pages), pool.take(num_pages))
        lines.append(interrupted(0, tree.record))
    assert lines[2] < 3.1 * lines[0]
