"""A store is used for a fingerprint only where the probe beside its runs is that of the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from store.test_store import WHOSE, found, save

from kvloom.cli import main
from kvloom.store import KVStore
from kvloom.store.backends.files import Files
from kvloom.store.fingerprint import Probe
from kvloom.store.names import ObjectKind, kind_of, probe_name

TEXT = [1, 2, 3, 4]
NAME = probe_name(WHOSE.folder)


def probe(data: bytes = b"what a model computes") -> Probe:
    return Probe(data, lambda theirs: "" if theirs == data else f"{theirs!r} is not {data!r}")


def asked(url: str, mine: Probe | None, is_saving: bool = False, **options: Any) -> int:
    """Tokens that a process finds whose model computes this; ``None`` believes the fingerprint."""
    with KVStore(url, read="always", **options) as store:
        if mine is not None:
            store.expect(WHOSE, mine)
        num_found = found(store, TEXT)
        if is_saving:
            save(store, TEXT)
            store.flush()
        return num_found


def test_the_first_probe_is_kept_and_others_are_compared_with_it(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert asked(url, probe(), is_saving=True) == 0
    assert [asked(url, x) for x in (probe(), None)] == [4, 4]
    assert caplog.messages == []
    other = probe(b"what b model computes")
    assert asked(url, other, is_saving=True) == 0
    (line,) = caplog.messages
    assert line.endswith("b'what a model computes' is not b'what b model computes'")
    assert asked(url, probe()) == 4


def test_a_model_that_computes_something_else_writes_nothing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    assert asked(url, probe()) == 0
    assert asked(url, probe(b"other"), is_saving=True) == 0
    assert [x.name for x in Files(tmp_path).list_stored()] == [NAME]


@pytest.mark.parametrize("data", [b"", b"what a model comp", b"what a model computes, and more"])
def test_a_probe_that_is_damaged_is_none_of_anybody(tmp_path: Path, data: bytes) -> None:
    url = f"file://{tmp_path}"
    asked(url, probe(), is_saving=True)
    (tmp_path / NAME).write_bytes(data)
    assert asked(url, probe()) == 0


def test_who_may_not_write_reads_what_others_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}"
    asked(url, None, is_saving=True)

    def refuse(self: Files, name: str, parts: Any) -> bool:
        raise PermissionError(13, "read only", name)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "put_if_absent", refuse)
        assert asked(url, probe()) == 4
    assert asked(url, probe(b"the first that writes")) == 4
    assert asked(url, probe()) == 0


def test_a_store_that_was_away_is_compared_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}"
    asked(url, probe(b"other"), is_saving=True)
    with KVStore(url, read="always") as store:
        store.tiers[0]._retry = store.tiers[0].catalog.refresh_seconds = 0.0
        store.expect(WHOSE, probe())
        with monkeypatch.context() as patch:
            patch.setattr(Files, "get_ranges", lambda *args: (_ for _ in ()).throw(OSError("away")))
            assert found(store, TEXT) == 0
        assert found(store, TEXT) == 0
    assert asked(url, probe(b"other")) == 4


def test_probes_go_after_all_runs_and_are_no_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}"
    asked(url, probe(), is_saving=True)
    assert main(["store", "verify", str(tmp_path)]) == 0
    assert "probe" not in capsys.readouterr().out
    asked(url, probe(), is_saving=True, max_age=0.0)
    (left,) = [x.name for x in Files(tmp_path).list_stored() if kind_of(x.name) is ObjectKind.PROBE]
    assert left == NAME
    assert caplog.messages == []


def test_a_changed_expectation_forgets_what_was_agreed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with KVStore(f"file://{tmp_path}", read="always") as store:
        store.expect(WHOSE, probe())
        save(store, TEXT)
        store.flush()
        assert found(store, TEXT) == 4
        with caplog.at_level(logging.WARNING):
            store.expect(WHOSE, probe(b"other"))
            assert found(store, TEXT) == 0
        store.expect(WHOSE, probe())
        assert found(store, TEXT) == 4
