"""A store that is slow, hangs, or holds much: a lookup waits a small part of what computing takes."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracles.slow_store import Slow, slow_store
from store.runs import make_run
from store.test_store import SIZE, WHOSE, content, found, save

from kvloom.store import KVStore
from kvloom.store.index import IndexEntry, write_index
from kvloom.store.names import ObjectKind, index_name, kind_of
from kvloom.store.sums import PLAIN
from kvloom.store.tiers.patience import Patience, Speed

TEXT = [1, 2, 3, 4]
A_WHILE = 60.0
"""Seconds of computing, so that a test that hangs is told from one that waits."""


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[tuple[str, Slow]]:
    """A store that has ``TEXT``."""
    with slow_store(request.node.name) as (url, backend):
        with KVStore(url) as writer:
            save(writer, TEXT)
        yield url, backend


def load(store: KVStore, tokens: list[int], seconds_per_token: float = 0.001) -> int:
    """Tokens that are found by someone who could compute each in so many seconds."""
    pieces = store.load(WHOSE, "", tokens, seconds_per_token=seconds_per_token)
    return pieces[-1].segment.end if pieces else 0


def listed(store: KVStore) -> None:
    """Wait until the store is listed."""
    store.watch(WHOSE, wait=A_WHILE)


def test_whoever_computes_does_not_wait_for_a_listing(store: tuple[str, Slow]) -> None:
    url, backend = store
    backend.is_free.clear()
    with KVStore(url) as reader:
        for _ in range(3):
            assert load(reader, TEXT) == 0
        assert backend.num_requests <= 2  # one to write, one to list
        backend.is_free.set()
        listed(reader)
        assert found(reader, TEXT) == 4


def test_whoever_computes_does_not_wait_for_pages(store: tuple[str, Slow]) -> None:
    url, backend = store
    with KVStore(url) as reader:
        listed(reader)
        backend.is_free.clear()
        assert load(reader, TEXT) == 0
        assert reader.counts["tokens_too_late"] == 4
        backend.is_free.set()


def test_pages_that_come_in_time_are_used(store: tuple[str, Slow]) -> None:
    url, backend = store
    with KVStore(url) as reader:
        listed(reader)
        backend.seconds = 0.05
        assert load(reader, TEXT, seconds_per_token=A_WHILE) == 4


def test_always_waits_however_long_it_takes(store: tuple[str, Slow]) -> None:
    url, backend = store
    backend.seconds = 0.1
    with KVStore(url, read="always") as reader:
        assert found(reader, TEXT) == 4


def test_a_wait_that_was_chosen_holds_whatever_computing_takes(store: tuple[str, Slow]) -> None:
    url, backend = store
    backend.is_free.clear()
    with KVStore(url, max_wait=0.01) as reader:
        assert load(reader, TEXT, seconds_per_token=A_WHILE) == 0
        assert found(reader, TEXT) == 0
        backend.is_free.set()
    with KVStore(url, max_wait=A_WHILE) as reader:
        assert load(reader, TEXT, seconds_per_token=0.0) == 4


def test_one_slow_read_does_not_count_and_many_do() -> None:
    speed = Speed()
    for seconds in (0.001, 9.0, 0.001):
        speed.note(seconds, 0)
        speed.note(seconds, 1 << 20)
    assert speed.seconds(1 << 20, 1) < 0.01
    for _ in range(7):
        speed.note(9.0, 1 << 20)
    assert speed.seconds(1 << 20, 1) > 8


def test_what_was_too_slow_is_measured_again(
    store: tuple[str, Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = store
    with KVStore(url) as reader:
        listed(reader)
        speed = reader.tiers[0].speed
        for _ in range(7):
            speed.note(5.0, 0)
        assert load(reader, TEXT) == 0
        assert reader.counts["tokens_not_worth_reading"] == 4
        later = time.monotonic() + 100
        monkeypatch.setattr("kvloom.store.tiers.patience.time.monotonic", lambda: later)
        for _ in range(1000):  # each reads once behind whoever computes
            if load(reader, TEXT) == 4:
                break
            later += 100
            time.sleep(0.01)
        assert load(reader, TEXT) == 4


def test_nobody_waits_for_pages_that_take_longer_than_the_wait(store: tuple[str, Slow]) -> None:
    """30 seconds by the small requests that were measured, where a large one may be waited for for 6."""
    url, backend = store
    with KVStore(url) as reader:
        listed(reader)
        speed = reader.tiers[0].speed
        for _ in range(7):
            speed.note(30.0, 0)
        speed.is_known = lambda nbytes: False  # type: ignore[method-assign]
        backend.is_free.clear()
        assert load(reader, TEXT, seconds_per_token=A_WHILE) == 0
        assert reader.counts["tokens_too_late"] == 4
        assert list(speed._latencies) == [30.0] * 7  # nobody waited, who would have noted it
        while backend.num_requests < 2:  # it is measured behind them
            time.sleep(0.01)
        backend.is_free.set()


def test_what_takes_as_long_as_small_requests_is_known_by_these() -> None:
    speed = Speed()
    assert not speed.is_known(1)
    speed.note(0.1, 0)
    assert speed.is_known(64 << 10) and not speed.is_known(1 << 20)
    speed.note(0.1, 1 << 20)
    assert speed.is_known(1 << 20)


@pytest.mark.parametrize(
    ("per_token", "max_wait", "expected"),
    [(None, None, None), (1.0, None, 2.5), (0.0, None, 0.02), (1.0, 3.0, 3.0)],
)
def test_patience_is_a_part_of_computing(per_token: Any, max_wait: Any, expected: Any) -> None:
    left = Patience(per_token, 100, max_wait).left
    assert left == expected or 0 < expected - left < 1


@pytest.mark.parametrize(
    ("per_token", "max_wait", "expected"),
    [
        (None, None, None),
        (1.0, None, 2.5),
        (1e-4, None, 0.001),
        (0.0, None, 0.0),
        (1e-4, 3.0, 3.0),
        (None, 3.0, 3.0),
    ],
)
def test_a_list_is_waited_for_no_longer_than_a_tenth_of_computing(
    per_token: Any, max_wait: Any, expected: Any
) -> None:
    glance = Patience(per_token, 100, max_wait).glance
    assert glance == expected or 0 <= expected - glance < 1


def test_short_prompts_do_not_wait_for_a_list(
    store: tuple[str, Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that took 10 ms, which a prompt of 4 ms would notice."""
    url, backend = store
    with KVStore(url) as reader:
        listed(reader)
        catalog, waits = reader.tiers[0].catalog, list[Any]()
        folder = catalog._folder(WHOSE)
        folder.began, folder.ended = -0.01, 0.0
        monkeypatch.setattr(catalog, "_listed", lambda *args: waits.append(args))
        num_requests = backend.num_requests
        assert load(reader, [9, 9, 9, 9]) == 0
        assert not waits
        while backend.num_requests == num_requests:  # it is there for the next one
            time.sleep(0.01)


def test_reading_may_take_what_it_took_of_late_and_no_longer_than_computing() -> None:
    patience = Patience(1.0, 100, None)
    assert patience.wait(100, 40.0, is_known=True) == pytest.approx(80.0, abs=1)
    assert patience.wait(100, 90.0, is_known=True) == pytest.approx(100.0, abs=1)
    assert patience.wait(100, 40.0, is_known=False) == pytest.approx(2.5, abs=1)
    assert patience.pays(100, 49.0)
    assert not patience.pays(100, 51.0)


def fill(backend: Slow, count: int, start: int = 0) -> list[list[int]]:
    """Runs of texts of their own."""
    texts = [[1000 + i, 7, i, 8] for i in range(start, start + count)]
    for tokens in texts:
        run, _ = make_run(tokens)
        data = content(tokens)
        run = run.with_checksums(memoryview(data))
        backend._objects[run.name] = [run.head(), data], time.time()
    return texts


def objects(backend: Slow) -> list[str]:
    return [name for name in backend._objects if kind_of(name) is ObjectKind.INDEX]


def test_heads_are_read_once_by_all(store: tuple[str, Slow]) -> None:
    url, backend = store
    texts = fill(backend, 300)
    with KVStore(url, read="always") as first:
        first.refresh(WHOSE)
        assert len(objects(backend)) == 1
    before = backend.num_requests
    with KVStore(url, read="always") as second:
        second.refresh(WHOSE)
        assert backend.num_requests - before <= 5  # listings, and one object
        assert [found(second, x) for x in texts[::50]] == [4] * 6


def test_an_index_that_is_damaged_costs_heads_and_no_run(store: tuple[str, Slow]) -> None:
    url, backend = store
    texts = fill(backend, 200)
    with KVStore(url) as first:
        first.refresh(WHOSE)
    (name,) = objects(backend)
    data = bytearray().join(backend._objects[name][0])
    for at in (0, 17, 40, len(data) // 2, len(data) - 1):
        changed = bytes(data[:at]) + bytes([data[at] ^ 1]) + bytes(data[at + 1 :])
        backend._objects = {x: y for x, y in backend._objects.items() if kind_of(x) is ObjectKind.RUN}
        backend._objects[name] = [changed], time.time()
        with KVStore(url, read="always") as second:
            assert [found(second, x) for x in texts[::50]] == [4] * 4
            assert second.tiers[0].counts["damaged"] == 1
        assert not [x for x in backend._objects if x.endswith("safetensors") and "quarantine" in x]


def test_an_index_that_says_what_is_not_so_costs_no_run(store: tuple[str, Slow]) -> None:
    """Under a seal that is right: heads of another size, and digests of another text."""
    url, backend = store
    run, _ = make_run(TEXT)
    right = IndexEntry.of(run, len(run.head()))
    for wrong in (
        right._replace(head_size=right.head_size + 8),
        right._replace(digests=(b"x" * 32, right.digests[-1])),
        right._replace(digests=right.digests[-1:], first=0),
    ):
        spelled = write_index([wrong], PLAIN, lambda: None)
        name = index_name(WHOSE.folder, PLAIN.checksum(spelled))
        backend._objects[name] = [spelled], time.time()
        with KVStore(url, read="always") as reader:
            assert found(reader, TEXT) in (0, 4)
            assert not reader.tiers[0].counts["damaged"]
        del backend._objects[name]
    with KVStore(url, read="always") as reader:
        assert found(reader, TEXT) == 4


def test_an_index_lets_nobody_read_a_head_that_no_run_has(tmp_path: Path) -> None:
    """A sparse file and an index that agree, of a text that is asked for."""
    size = 1 << 30
    with KVStore(f"file://{tmp_path}") as writer:
        save(writer, TEXT)
    (path,) = tmp_path.rglob("*.safetensors")
    os.truncate(path, size)
    run, _ = make_run(TEXT)
    spelled = write_index([IndexEntry.of(run, size - run.data_bytes)], PLAIN, lambda: None)
    (tmp_path / index_name(WHOSE.folder, PLAIN.checksum(spelled))).write_bytes(spelled)
    tracemalloc.start()
    try:
        with KVStore(f"file://{tmp_path}", read="always") as reader:
            assert found(reader, TEXT) == 0
            assert reader.tiers[0].counts["damaged"] == 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_run_that_an_index_hides_is_found_once_it_is_saved_again(is_listed: bool, tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    with KVStore(url) as writer:
        save(writer, TEXT)
    run, _ = make_run(TEXT)
    right = IndexEntry.of(run, len(run.head()))
    hidden = right.digests[-1][:20] + b"x" * 12
    spelled = write_index([right._replace(digests=(b"x" * 32, hidden))], PLAIN, lambda: None)
    (tmp_path / index_name(WHOSE.folder, PLAIN.checksum(spelled))).write_bytes(spelled)
    for path in (tmp_path / WHOSE.folder, *(tmp_path / WHOSE.folder).iterdir()):
        os.utime(path, (0, 0))  # a folder that did not change of late is not listed again
    with KVStore(url, read="always") as reader:
        if is_listed:
            assert found(reader, TEXT) == 0
        save(reader, TEXT)
        reader.flush()
        reader.refresh(WHOSE)
        assert found(reader, TEXT) == 4


def test_an_index_of_a_later_format_is_left_alone(store: tuple[str, Slow]) -> None:
    url, backend = store
    name = index_name(WHOSE.folder, b"x" * 16)
    backend._objects[name] = [b"kvloom-index/2\n\0 and something"], time.time()
    with KVStore(url, read="always") as reader:
        assert found(reader, TEXT) == 4
        reader.refresh(WHOSE)
        assert not reader.tiers[0].counts["damaged"]
        assert reader.tiers[0].counts["left_out"]
    assert name in backend._objects


def test_the_one_index_that_is_left_of_many_stays(store: tuple[str, Slow]) -> None:
    """Those of which no run is left go; what the new one says may be what an old one says."""
    url, backend = store
    fill(backend, 200)
    with KVStore(url, read="always") as reader:
        reader.refresh(WHOSE)
        (kept,) = objects(backend)
        for i in range(9):
            gone = IndexEntry(f"{i}", 9, 9, 0, 2, (bytes([i]) * 32,))
            spelled = write_index([gone], PLAIN, lambda: None)
            backend._objects[index_name(WHOSE.folder, PLAIN.checksum(spelled))] = [spelled], time.time()
        with KVStore(url, read="always") as other:
            other.refresh(WHOSE)
        assert objects(backend) == [kept]


def test_many_small_indexes_become_few(store: tuple[str, Slow]) -> None:
    url, backend = store
    with KVStore(url, read="always") as first:
        for start in range(0, 3000, 200):
            texts = fill(backend, 200, start)
            first.refresh(WHOSE)
        assert 1 <= len(objects(backend)) <= 9
        gone = fill(backend, 3000)
        for tokens in gone[10:]:
            del backend._objects[make_run(tokens)[0].name]
        first.refresh(WHOSE)
        first.refresh(WHOSE)
        assert len(objects(backend)) <= 9
    with KVStore(url, read="always") as second:
        assert [found(second, x) for x in gone[:3]] == [4] * 3
        assert found(second, texts[-1]) == 0


def test_runs_that_were_written_during_a_listing_stay_known(store: tuple[str, Slow]) -> None:
    url, backend = store
    with KVStore(url, read="always") as both:
        both.refresh(WHOSE)
        backend.seconds = 0.1
        both.tiers[0].catalog.look_again(make_run(TEXT)[0])
        save(both, [5, 6])
        both.flush()
        backend.seconds = 0.0
        both.refresh(WHOSE)
        assert found(both, [5, 6]) == SIZE
