"""A store beside folders and files of other users: what may not be done there is done elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from store.runs import fingerprint
from store.test_others import lay, refused
from store.test_store import WHOSE, content, found, save

from kvloom.store import KVStore
from kvloom.store.backends.files import Files
from kvloom.store.fingerprint import Probe
from kvloom.store.names import probe_name


@pytest.mark.parametrize("limits", [{}, {"max_bytes": 1 << 20}])
def test_what_may_not_be_done_in_one_folder_is_done_in_others(
    limits: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of another model, whose probe and runs another user made."""
    other = fingerprint(config="another")
    probe = Probe(b"computed", lambda theirs: "")
    with KVStore(f"file://{tmp_path}", read="always", **limits) as store:
        for whose in (WHOSE, other):
            store.expect(whose, probe)
        save(store, [1, 2])
        store.flush()
        (tmp_path / other.folder).mkdir()
        (tmp_path / probe_name(other.folder)).write_bytes(probe.data)
        refused(monkeypatch, tmp_path / probe_name(other.folder))
        assert found(store, [5, 6], whose=other) == 0
        store.save(other, "", [5, 6], 0, 2, content([5, 6]))
        save(store, [3, 4])
        store.flush()
        assert [found(store, x) for x in ([1, 2], [3, 4])] == [2, 2]
        tier = store.tiers[0]
        assert (tier.is_down(other), tier.is_down(WHOSE)) == (True, False)
    assert len(caplog.messages) == 2
    assert all(other.folder in line and WHOSE.folder not in line for line in caplog.messages)


def test_files_whose_sizes_nobody_may_see_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a folder that may be read and not entered."""
    lay(tmp_path, ("photos/cat",))
    with KVStore(f"file://{tmp_path}", read="always") as store:
        save(store, [1, 2])
    real = os.scandir

    @contextmanager
    def scandir(path: Any) -> Iterator[Iterator[Any]]:
        with real(path) as entries:
            yield iter([Closed(x.name) if Path(path).name == "photos" else x for x in entries])

    monkeypatch.setattr(os, "scandir", scandir)
    with KVStore(f"file://{tmp_path}", read="always", max_bytes=1 << 20) as store:
        save(store, [3, 4])
        store.flush()
        assert [found(store, x) for x in ([1, 2], [3, 4])] == [2, 2]


class Closed:
    """An entry of a folder, of which the system says the kind and no more."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_file(self, *, follow_symlinks: bool) -> bool:
        return True

    def stat(self, *, follow_symlinks: bool) -> os.stat_result:
        raise PermissionError(13, "Permission denied", self.name)


def test_limits_hold_where_marks_are_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVStore(f"file://{tmp_path}") as store:
        save(store, [1, 2])
    (run,) = tmp_path.rglob("*.safetensors")
    real = Files.delete

    def delete(self: Files, name: str) -> None:
        if name.startswith("evicted/"):
            raise PermissionError(13, "Permission denied", name)
        real(self, name)

    monkeypatch.setattr(Files, "delete", delete)
    with KVStore(f"file://{tmp_path}", max_bytes=run.stat().st_size, read="always") as store:
        save(store, [3, 4])
        store.flush()
        assert found(store, [3, 4]) == 2
        assert not run.exists()
