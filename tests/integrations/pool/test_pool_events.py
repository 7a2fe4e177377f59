"""A pool that records: whose its pages are, what its store gives, and why a text would be missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.pool.test_pool import text
from integrations.pool.test_pool_store import commit, damage_the_run, make_pool, opened
from oracles.language_models import make_model

from kvloom.errors import StateError
from kvloom.integrations.transformers import KVPool
from kvloom.paging import PageStates
from kvloom.tracing.recording import causes_of, read_lines, requests_of

pytest.importorskip("xxhash")


def held(pool: KVPool) -> dict[int, set[int]]:
    """Pages of each request, by the events."""
    state, found = PageStates(), dict[int, set[int]]()
    for event in pool.events or ():
        state.apply(event)
    for page, counts in state.holders.items():
        for request in counts:
            found.setdefault(request, set()).add(page)
    return found


def test_pages_are_those_of_the_request_that_began_the_cache() -> None:
    model = make_model()
    pool = make_pool(model, None)
    pool.record()
    tokens = text(20, rows=3)
    with torch.no_grad():
        first, second = pool.begin(tokens[:1]), pool.begin(tokens[1:])
        for cache, rows in ((first, tokens[:1]), (second, tokens[1:])):
            model(rows, past_key_values=cache)
    tables = [*first.sequences[0].tables, *second.sequences[0].tables]
    assert held(pool) == {i: {x.id for x in table.pages} for i, table in enumerate(tables, 1)}
    del first, cache, tables
    assert held(pool).keys() == {2, 3}


def test_what_a_store_gives_is_read_and_what_is_damaged_says_so(tmp_path: Path) -> None:
    model, tokens = make_model(), text(20)
    url = f"file://{tmp_path / 'store'}"
    with opened(url) as store:
        commit(model, make_pool(model, store), tokens)
    with opened(url) as store:
        pool = make_pool(model, store)
        pool.record()
        assert pool.why(tokens) == []
        pool.begin(tokens)
        pool.save_events(tmp_path / "e.jsonl")
        (request,) = requests_of(read_lines(tmp_path / "e.jsonl")).values()
        assert len(request.nodes) == 4 == len(request.read) and not request.misses
    damage_the_run(tmp_path / "store")
    with opened(url) as store:
        pool = make_pool(model, store)
        pool.record()
        pool.begin(tokens)
        assert pool.view(tmp_path / "e.html") == tmp_path / "e.html"
        pool.save_events(tmp_path / "e.jsonl")
        (request,) = requests_of(read_lines(tmp_path / "e.jsonl")).values()
        assert causes_of([request]) == {"damaged": 1, "below": 3} and not request.read
        assert "does not have its checksum" in request.misses[0]["what"]
        assert [x.cause for x in pool.why(tokens)].count("damaged") > 0
    assert (tmp_path / "e.html").read_text().startswith("<!doctype html>")


def test_why_names_another_format(tmp_path: Path) -> None:
    model, tokens = make_model(), text(20)
    url = f"file://{tmp_path}"
    with opened(url) as store:
        commit(model, make_pool(model, store, "int8:g16"), tokens)
    with opened(url) as store:
        pool = make_pool(model, store, "int4:g16")
        pool.record()
        misses = pool.why(tokens)
        assert [x.cause for x in misses] == ["other format"] * 4 and misses[0].what
        assert [x.cause for x in pool.why(text(20, seed=9))] == ["never stored", "below"]


def test_what_is_not_recorded_is_said() -> None:
    pool: Any = make_pool(make_model(), None)
    for call in (lambda: pool.why(text(9)), lambda: pool.save_events("x"), pool.view):
        with pytest.raises(StateError, match=r"^events are not recorded, call record\(\) before"):
            call()
