"""A store beside things of others: nothing that kvloom did not write is removed, and it stops nobody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from store.servers import NO_MOTO, NO_REDIS, redis_server, s3_server
from store.test_store import WHOSE, found, save

from kvloom.cli import main
from kvloom.errors import ArgumentError
from kvloom.store import KVStore
from kvloom.store.backends import connect

THEIRS = (
    "photos/cat.jpg",
    "thesis/chapter-1.tex",
    "notes",
    "0123456789abcdef/readme.txt",
    "0123456789abcdef/0-0-0.safetensors",
    "evicted/people.txt",
    "quarantine/list.txt",
)
LIKE_OURS = f"0123456789abcdef/{'0' * 40}-0-16.safetensors"
"""The name of a run, and something else in it."""


def lay(root: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"theirs" * 100)
        os.utime(root / name, (0, 0))


def texts(root: Path, names: tuple[str, ...]) -> list[bytes]:
    return [(root / name).read_bytes() for name in names]


@pytest.mark.parametrize(
    "limits", [{"max_bytes": 2000}, {"max_age": 1.0}, {"max_bytes": 2000, "max_age": 1.0}]
)
def test_limits_remove_what_kvloom_wrote_alone(limits: dict[str, Any], tmp_path: Path) -> None:
    with KVStore(f"file://{tmp_path}") as store:
        save(store, [1, 2])
    ours = next(tmp_path.rglob("*.safetensors"))
    os.utime(ours, (0, 0))
    names = (*THEIRS, LIKE_OURS)
    lay(tmp_path, names)
    before = texts(tmp_path, names)
    with KVStore(f"file://{tmp_path}", **limits) as store:
        for i in range(9):
            save(store, [10 + i, 2, 3, 4])
            store.flush()
    assert not ours.exists()
    assert texts(tmp_path, names) == before


@pytest.mark.parametrize("limit", [("--max-bytes", "0"), ("--max-age", "0.5")])
def test_gc_removes_what_kvloom_wrote_alone(
    limit: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with KVStore(f"file://{tmp_path}") as store:
        save(store, [1, 2])
    ours = next(tmp_path.rglob("*.safetensors"))
    os.utime(ours, (0, 0))
    names = (*THEIRS, LIKE_OURS)
    lay(tmp_path, names)
    before = texts(tmp_path, names)
    assert main(["store", "gc", str(tmp_path), *limit]) == 0
    said = capsys.readouterr()
    assert "1 runs removed" in said.out
    assert f"{LIKE_OURS} is left" in said.err
    assert not ours.exists()
    assert texts(tmp_path, names) == before


def test_limits_are_refused_in_a_folder_of_others(tmp_path: Path) -> None:
    lay(tmp_path, ("photos/cat.jpg",))
    for limits in ({"max_bytes": 1}, {"max_age": 1.0}):
        with pytest.raises(
            ArgumentError, match=r"store must be an empty folder or one of kvloom's .*'photos'"
        ):
            KVStore(f"file://{tmp_path}", **limits)  # type: ignore[arg-type]
    assert main(["store", "gc", str(tmp_path), "--max-bytes", "0"]) == 2
    assert (tmp_path / "photos" / "cat.jpg").exists()
    with KVStore(f"file://{tmp_path}") as store:
        save(store, [1, 2])


@pytest.mark.parametrize("name", [".hidden", "lost+found"])
def test_what_a_new_disk_has_is_no_folder_of_others(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    KVStore(f"file://{tmp_path}", max_bytes=1).close()


@pytest.mark.process
@NO_MOTO
def test_objects_of_others_below_a_prefix_stay() -> None:
    with s3_server() as url:
        backend: Any = connect(url, 5.0)
        import obstore

        names = ["Report FINAL.docx", "photos/cat.jpg", "a/b/c/d"]
        for name in names:
            obstore.put(backend._store, name, b"theirs")
        with KVStore(url, max_bytes=2000, max_age=3600) as store:
            for i in range(5):
                save(store, [10 + i, 2, 3, 4])
                store.flush()
            assert store.tiers[0].counts["runs_evicted"]
        assert {x.name for x in backend.list_stored()} >= set(names)


def refused(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Nobody may open or list a path, as if it were another user's; the superuser may do everything."""
    for name in ("open", "scandir"):
        real = getattr(os, name)

        def call(what: Any, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            if Path(what) == path:
                raise PermissionError(13, "Permission denied", str(path))
            return real(what, *args, **kwargs)

        monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("what", ["lost+found", "run", "folder"])
def test_what_may_not_be_read_is_left_out(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVStore(f"file://{tmp_path}") as store:
        save(store, [1, 2])
        save(store, [7, 8])
        store.flush()
        closed = store.tiers[0].connected()
        (seven,) = [x for x in tmp_path.rglob("*.safetensors") if b"\7\0\0\0\0\0\0\0" in x.read_bytes()]
    del closed
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "fedcba9876543210").mkdir()
    refused(
        monkeypatch,
        {"lost+found": tmp_path / what, "run": seven, "folder": tmp_path / "fedcba9876543210"}[what],
    )
    with KVStore(f"file://{tmp_path}", read="always", max_bytes=1 << 20) as store:
        assert found(store, [1, 2]) == 2
        assert found(store, [7, 8]) == (0 if what == "run" else 2)
        save(store, [3, 4])
        store.flush()
        assert found(store, [3, 4]) == 2
        assert not store.tiers[0].counts["read_errors"]
    assert seven.exists()


def test_a_run_that_others_may_not_read_does_not_stop_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known by an index object, or was readable when it was listed."""
    with KVStore(f"file://{tmp_path}", read="always") as store:
        for tokens in ([1, 2], [7, 8]):
            save(store, tokens)
        store.flush()
        store.refresh(WHOSE)
        (seven,) = [x for x in tmp_path.rglob("*.safetensors") if b"\7\0\0\0\0\0\0\0" in x.read_bytes()]
        with monkeypatch.context() as patch:
            refused(patch, seven)
            assert found(store, [7, 8]) == 0
            assert found(store, [1, 2]) == 2
            assert store.tiers[0].counts["left_out"] == 1
        os.utime(tmp_path / WHOSE.folder, (0, 0))
        store.refresh(WHOSE)
        store.refresh(WHOSE)
        assert found(store, [7, 8]) == 2  # it may be read again
        assert found(store, [1, 2]) == 2


@pytest.mark.parametrize("limits", [{}, {"max_bytes": 1 << 20}])
def test_a_root_that_may_not_be_read_is_no_error(
    limits: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    refused(monkeypatch, tmp_path)
    monkeypatch.setattr(Path, "iterdir", denied)
    with KVStore(f"file://{tmp_path}", read="always", **limits) as store:
        assert found(store, [1, 2]) == 0


@pytest.mark.parametrize("what", ["link", "folder"])
def test_what_took_the_place_of_a_run_does_not_stop_those_behind_it(what: str, tmp_path: Path) -> None:
    with KVStore(f"file://{tmp_path}", read="always") as store:
        for tokens in ([1, 2], [7, 8]):
            save(store, tokens)
        store.flush()
        (seven,) = [x for x in tmp_path.rglob("*.safetensors") if b"\7\0\0\0\0\0\0\0" in x.read_bytes()]
        store.refresh(WHOSE)
        seven.unlink()
        _ = seven.mkdir() if what == "folder" else seven.symlink_to("elsewhere")
        assert found(store, [7, 8]) == 0
        assert found(store, [1, 2]) == 2


@pytest.mark.process
@NO_REDIS
def test_keys_of_other_types_stop_nobody() -> None:
    with redis_server() as url:
        from redis import Redis

        with Redis.from_url(url) as client:
            client.hset("kvloom:sessions", "theirs", 1)
            client.rpush(f"kvloom:{WHOSE.folder}/list", "theirs")
            with KVStore(url, read="always", max_bytes=1 << 20) as store:
                save(store, [1, 2])
                store.flush()
                assert store.tiers[0].counts["runs_written"] == 1
                store.refresh(WHOSE)
                assert found(store, [1, 2]) == 2
            assert client.hget("kvloom:sessions", "theirs") == b"1"
            names = {x.name for x in connect(url, 5.0).list_stored()}
            assert len(names) == 1


def test_files_are_for_those_whom_the_mode_names(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        for mode, folder in ((0o600, 0o700), (0o640, 0o750), (0o660, 0o770), (0o644, 0o755)):
            root = tmp_path / f"{mode:o}" / "inner" / "store"
            with KVStore(f"file://{root}", mode=mode) as store:
                save(store, [1, 2])
            (run,) = root.rglob("*.safetensors")
            assert run.stat().st_mode & 0o777 == mode
            for made in (run.parent, root, root.parent, root.parent.parent):
                assert made.stat().st_mode & 0o777 == folder
    finally:
        os.umask(old)
    with pytest.raises(ArgumentError, match=r"mode must be one of 0o600, .*, got 511"):
        KVStore(f"file://{tmp_path}", mode=0o777)


def test_a_folder_that_all_may_write_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o1777)
    KVStore(f"file://{tmp_path}").close()
    assert "can be written by all users" in caplog.text
    tmp_path.chmod(0o700)
    caplog.clear()
    KVStore(f"file://{tmp_path}").close()
    assert not caplog.text


def test_a_store_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with KVStore(f"file://{tmp_path}/link", read="always") as store:
        save(store, [1, 2])
        store.flush()
        assert not store.tiers[0].counts["write_errors"]
        assert found(store, [1, 2]) == 2
    assert list((tmp_path / "real").rglob("*.safetensors"))


@pytest.mark.parametrize("action", ["ls", "show", "verify", "gc", "why"])
def test_a_store_that_is_not_there_is_not_made(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt"
    prompt.write_text("def ")
    more = {"show": ["x"], "why": [str(prompt)]}.get(action, [])
    assert main(["store", action, str(tmp_path / "TYPO"), *more]) == 2
    assert "store must be a folder that is there, got" in capsys.readouterr().err
    assert not (tmp_path / "TYPO").exists()


def test_brackets_of_a_file_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with KVStore(f"file://{tmp_path}") as store:
        save(store, [1, 2])
    (run,) = tmp_path.rglob("*.safetensors")
    run.write_bytes(run.read_bytes().replace(b"kvloom-run/1", b"[/x][bold]ab"))
    assert main(["store", "ls", str(tmp_path)]) == 0
    assert "[/x]" in capsys.readouterr().out


def test_passwords_are_shown_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with KVStore("redis://reader:hunter2@127.0.0.1:1/0?password=hunter2") as store:
        save(store, [1, 2])
        store.refresh(WHOSE)
        report = store.report()
    shown = f"{caplog.text} {report}"
    assert "hunter2" not in shown
    assert "redis://reader:***@127.0.0.1:1/0?***" in shown
    with pytest.raises(ArgumentError, match="store must be a URL") as refusal:
        KVStore("redi://reader:hunter2@host/0")
    assert "hunter2" not in str(refusal.value)


def test_opening_removes_no_file_of_others(tmp_path: Path) -> None:
    names = (".writing-notes", "thesis/.writing-draft", "thesis/.writing-1-2", "thesis/.writing-1-2-3.bak")
    lay(tmp_path, names)
    before = texts(tmp_path, names)
    KVStore(f"file://{tmp_path}").close()
    assert main(["store", "ls", str(tmp_path)]) == 0
    assert texts(tmp_path, names) == before


def test_limits_hold_where_many_write() -> None:
    """Each knows of the writes of others from listings only, and expects as much of them until the next."""
    limit, sizes = 250_000, list[int]()
    stores = [KVStore("memory://many", max_bytes=limit) for _ in range(12)]
    for token in range(500):
        save(stores[token % 12], [token, 3])
        assert stores[token % 12].flush()
        if token % 10 == 0:
            sizes.append(sum(x.size for x in stores[0].tiers[0].connected().list_stored()))
    for store in stores:
        store.close()
    assert limit // 2 < max(sizes) <= limit
