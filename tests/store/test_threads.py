"""Threads of stores: without one nothing fails or hangs, and they end with their store."""

from __future__ import annotations

import threading

import pytest
from oracles.slow_store import Slow
from store.test_slow import A_WHILE, TEXT, store
from store.test_store import WHOSE, found, save

from kvloom.store import KVStore, catalog

__all__ = ["store"]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of threads of stores that the system does not start."""
    names, start = set[str](), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in names:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return names


def test_a_listing_without_a_thread_finds_nothing_and_the_next_one_all(
    store: tuple[str, Slow], refused: set[str]
) -> None:
    with KVStore(store[0], read="always") as reader:
        refused.add("kvloom-list")
        assert found(reader, TEXT) == 0
        refused.clear()
        reader.refresh(WHOSE)
        assert found(reader, TEXT) == 4


def test_without_a_thread_callers_read_and_nothing_is_written(
    store: tuple[str, Slow], refused: set[str]
) -> None:
    with KVStore(store[0], read="always") as both:
        refused.update(("kvloom-read", "kvloom-store"))
        assert found(both, TEXT) == 4
        save(both, [*TEXT, 5, 6], 4)
        assert both.flush() and found(both, [*TEXT, 5, 6]) == 4
        refused.clear()
        save(both, [*TEXT, 5, 6], 4)
        assert both.flush() and found(both, [*TEXT, 5, 6]) == 6
        assert both.counts["runs_dropped"] == both.counts["runs_saved"] == 1


def test_a_listing_ends_with_its_store_and_begins_again_for_whoever_waits(
    store: tuple[str, Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_SLICE", 0.0)
    monkeypatch.setattr(catalog, "_SHARE", 1e9)  # the thread rests until it is woken
    with KVStore(store[0], read="always") as reader:
        reader.watch(WHOSE)
        thread = reader.tiers[0].catalog._thread
        assert thread is not None
    thread.join(A_WHILE)
    assert not thread.is_alive()
    assert found(reader, TEXT) == 4
