"""Recurrent states in a recording, and on its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from browsers import opened, wait
from integrations.pool.test_pool_states import FAMILIES, GRID, asked, pool_of, text
from oracles.stateful_models import stateful_model

from kvloom.integrations.transformers.models.layer_specs import StatefulLayer
from kvloom.paging import PageStates
from kvloom.store import KVStore
from kvloom.tracing.page import write_page
from kvloom.tracing.recording import read_lines

pytestmark = pytest.mark.skipif(
    StatefulLayer is type(None), reason="this transformers has no recurrent states in its caches"
)
SIZE = 8


def recorded(store: Any = None, num_states: int = 2, capacity: int = 100_000) -> Any:
    """A pool with room for two states: one text, and then, recorded, another, more of it, and a third."""
    model: Any = stateful_model("lfm2" if "lfm2" in FAMILIES else FAMILIES[0])
    nbytes = pool_of(model).report()["states"]["nbytes"]
    pool = pool_of(model, page_size=SIZE, max_state_bytes=num_states * nbytes, store=store)
    asked(model, pool, text(GRID + 5, 9))
    pool.record(capacity)
    first = text(GRID + 5)
    for ids in (first, torch.cat([first, text(GRID, 1)], 1), text(GRID + 5, 2)):
        asked(model, pool, ids)
    return pool


def told(pool: Any, path: Path) -> list[tuple[int, str, int]]:
    """Of each event of states: the request, what became of them, and tokens of their text."""
    pool.save_events(path)
    lines = read_lines(path)
    parents = {line["node"]: line["parent"] for line in lines if "node" in line}

    def length(node: int | None) -> int:
        return 0 if node is None else SIZE + length(parents[node])

    states = (line for line in lines if line.get("kind") == "states")
    return [(x["request"], x["what"], length(node)) for x in states for node in x["nodes"]]


def test_events_say_behind_which_texts_states_are(tmp_path: Path) -> None:
    pool = recorded()
    assert told(pool, tmp_path / "events.jsonl") == [
        (0, "kept", GRID),
        (1, "kept", GRID),
        (2, "found", GRID),
        (2, "evicted", GRID),  # of the text before
        (2, "kept", 2 * GRID),
        (3, "evicted", GRID),  # which the second went on from
        (3, "kept", GRID),
    ]
    states = PageStates()
    for event in pool.events:
        states.apply(event)
    assert len(states.states) == pool.report()["states"]["evictable"] == 2


def test_states_are_known_behind_what_a_ring_has_dropped() -> None:
    pool, states = recorded(capacity=3), PageStates()
    assert pool.events.num_dropped
    for event in pool.events:
        states.apply(event)
    assert len(states.states) == 2


def test_states_that_a_store_gave_are_read(tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    model: Any = stateful_model("lfm2" if "lfm2" in FAMILIES else FAMILIES[0])
    ids = text(GRID + 5)
    with KVStore(f"file://{tmp_path}/store", read="always") as store:
        asked(model, pool := pool_of(model, store=store), ids)
        assert pool.flush()
    with KVStore(f"file://{tmp_path}/store", read="always") as store:
        pool = pool_of(model, store=store)
        pool.record()
        assert pool.begin(ids).get_seq_length() == GRID
        assert told(pool, tmp_path / "events.jsonl") == [(1, "read", GRID), (1, "found", GRID)]


@pytest.mark.browser
def test_the_page_marks_pages_with_states_behind_them(tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    write_page(recorded().events.lines(), tmp_path / "page.html")
    with opened(tmp_path) as browser:
        browser.get((tmp_path / "page.html").as_uri())

        def shown(name: str) -> str:
            return str(browser.find_element(By.ID, name).text)

        wait(lambda: shown("count-states") == "recurrent states after it (dot) 2")
        wait(lambda: shown("tree").count(", 1 state") == 2)
        [second] = [x for x in browser.find_elements(By.CSS_SELECTOR, "#requests button") if x.text == "#2"]
        second.click()
        wait(lambda: "Request 2" in shown("detail"))
        assert f"Recurrent states after {GRID} tokens are found for request 2." in shown("detail")
        assert f"Recurrent states after {2 * GRID} tokens are kept for request 2." in shown("detail")
        browser.execute_script("seek(0)")
        wait(lambda: shown("count-states") == "recurrent states after it (dot) 0")
        assert not browser.get_log("browser")
