"""Runs that other processes replace while they are looked at are good: none is put aside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from store.test_hostile import written
from store.test_store import WHOSE, found, save

from kvloom.store import KVStore
from kvloom.store.backends import Stored
from kvloom.store.backends.files import Files


def test_a_run_that_another_replaces_while_it_is_listed_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limits removed the run, and it wrote the same one without a text, which is shorter."""
    url = f"file://{tmp_path}"
    with KVStore(url) as store:
        save(store, [1, 2, 3, 4])
    real = Files.list_stored

    def replaced(self: Files, prefix: str = "") -> Iterator[Stored]:
        listed = list(real(self, prefix))
        monkeypatch.setattr(Files, "list_stored", real)
        next(tmp_path.rglob("*.safetensors")).unlink()
        with KVStore(url, keep_text=False) as other:
            save(other, [1, 2, 3, 4])
        yield from listed

    monkeypatch.setattr(Files, "list_stored", replaced)
    with KVStore(url, read="always") as store:
        store.refresh(WHOSE)
        store.refresh(WHOSE)
        assert found(store, [1, 2, 3, 4]) == 4
        assert not store.tiers[0].counts["damaged"]


def test_limits_remove_a_run_that_another_replaced(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    path = written(tmp_path, [1, 2, 3, 4])
    size = path.stat().st_size
    os.utime(path, (0, 0))
    with KVStore(url, max_bytes=200 * size) as store:
        save(store, [5, 6, 7, 8])  # learns what is there
        store.flush()
        path.unlink()
        with KVStore(url, keep_text=False) as other:
            save(other, [1, 2, 3, 4])
        os.utime(path, (0, 0))
        room = store.tiers[0]._room
        room.free(100)
        room._listed = float("-inf")  # as later
        room.free(100)
        assert not path.exists()


def test_one_answer_that_is_wrong_condemns_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object may be replaced by one of other pages between two requests for its ranges."""
    with KVStore(f"file://{tmp_path}", read="always") as store:
        save(store, [1, 2, 3, 4])
        store.flush()
        real = Files.get_ranges

        def wrong(self: Files, name: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
            data = real(self, name, ranges)
            data[-1][-1] ^= 1
            monkeypatch.setattr(Files, "get_ranges", real)
            return data

        monkeypatch.setattr(Files, "get_ranges", wrong)
        assert found(store, [1, 2, 3, 4]) == 4
        assert not store.tiers[0].counts["damaged"]
