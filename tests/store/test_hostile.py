"""Objects that nobody should have written, full disks, processes that end or fork: a miss at most."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracles.slow_store import slow_store
from store.runs import fingerprint, make_run, rewritten, with_tests
from store.test_store import WHOSE, content, found, save

from kvloom.store import KVStore
from kvloom.store.backends import Stored
from kvloom.store.backends.files import Files
from kvloom.store.backends.memory import MemoryBackend
from kvloom.store.format import MAX_HEADER, DamagedRun, read_head
from kvloom.store.survey import look_at


def written(root: Path, tokens: list[int]) -> Path:
    """A store with one run."""
    with KVStore(f"file://{root}") as store:
        save(store, tokens)
    (path,) = root.rglob("*.safetensors")
    return path


def header(text: bytes) -> bytes:
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def spelled(path: Path, old: bytes, new: bytes) -> bytes:
    """A file whose header has other bytes, of the same length or not."""
    file = path.read_bytes()
    (size,) = struct.unpack_from("<Q", file)
    return header(file[8 : 8 + size].rstrip().replace(old, new)) + file[8 + size :]


def huge(count: int) -> bytes:
    """A header of so many empty lists."""
    return header(b"[" + b"[]," * count + b"[]]")


FORGED: dict[str, Callable[[Path], bytes]] = {
    "infinite position": lambda path: spelled(path, b'"first":"0"', b'"first":1e999'),
    "fractional page": lambda path: spelled(path, b'"page_size":"2"', b'"page_size":1e999'),
    "number of many digits": lambda path: spelled(path, b'"first":"0"', b'"first":"' + b"9" * 9000 + b'"'),
    "lists": lambda path: huge(1000),
    "more lists than a header has bytes": lambda path: huge(MAX_HEADER // 3 + 1),
    "deep lists": lambda path: header(b"[" * 100_000),
    "infinite heads": lambda path: spelled(path, b'\\"heads\\":2', b'\\"heads\\":1e999'),
    "nothing": lambda path: b"",
}


@pytest.mark.parametrize("kind", FORGED)
def test_what_no_run_begins_with_is_put_aside(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, [1, 2])
    path.write_bytes(FORGED[kind](path))
    with KVStore(f"file://{tmp_path}", read="always") as store:
        for _ in range(2):
            assert found(store, [1, 2]) == 0
        assert store.tiers[0].counts["damaged"] == 1
        save(store, [1, 2])
        store.flush()
        assert found(store, [1, 2]) == 2


def test_a_digest_that_stands_twice_is_damage(tmp_path: Path) -> None:
    run, data = make_run([1, 2, 3, 4])
    twice = rewritten(run, digests=(run.digests[-1],) * 2)
    file = twice.head() + data
    with pytest.raises(DamagedRun, match="a digest occurs twice"):
        read_head(file, len(file))
    path = written(tmp_path, [1, 2, 3, 4])
    path.write_bytes(file)
    with KVStore(f"file://{tmp_path}", read="always") as store:
        assert found(store, [1, 2, 3, 4]) == 0
        store.refresh(WHOSE)
        assert store.tiers[0].counts["damaged"] == 1


@pytest.mark.parametrize("size", [2 << 30, 900 << 30])
def test_sparse_files_cost_no_memory_and_are_not_copied(size: int, tmp_path: Path) -> None:
    path = written(tmp_path, [1, 2])
    os.truncate(path, size)
    tracemalloc.start()
    try:
        with KVStore(f"file://{tmp_path}", read="always") as store:
            assert found(store, [1, 2]) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    (moved,) = (tmp_path / "quarantine").iterdir()
    assert moved.stat().st_size == size
    assert moved.stat().st_blocks < 1000
    assert look_at(Files(tmp_path), Stored(f"quarantine/{moved.name}", size, 0.0), is_thorough=True).problem


def test_a_pipe_in_place_of_a_run_lets_nobody_wait(tmp_path: Path) -> None:
    path = written(tmp_path, [1, 2])
    with KVStore(f"file://{tmp_path}", read="always") as store:
        store.refresh(WHOSE)
        path.unlink()
        os.mkfifo(path)
        assert found(store, [1, 2]) == 0
    with KVStore(f"file://{tmp_path}", read="always") as store:
        assert found(store, [1, 2]) == 0


def test_runs_with_and_without_text_are_good_to_all(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    with KVStore(url, read="always") as one, KVStore(url, read="always", keep_text=False) as other:
        for first, second in ((one, other), (other, one)):
            tokens = [3, 4, 5, 6] if first is one else [7, 8, 9, 10]
            save(first, tokens)
            first.flush()
            save(second, tokens)
            second.flush()
            for reader in (second, first):
                reader.refresh(WHOSE)
                assert found(reader, tokens) == 4
                assert not reader.tiers[0].counts["damaged"]


def test_a_full_disk_gets_room_where_limits_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of three runs, under a limit of a hundred."""
    path = written(tmp_path, [1, 2])
    size, real = path.stat().st_size, os.write

    def write(file: int, data: Any) -> int:
        if sum(x.stat().st_size for x in tmp_path.rglob("*") if x.is_file()) + len(data) > 3 * size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    with KVStore(f"file://{tmp_path}", max_bytes=100 * size, read="always") as store:
        for token in range(3, 20):
            save(store, [token, 2])
            store.flush()
            assert found(store, [token, 2]) == 2
        assert not store.tiers[0].counts["write_errors"]


def test_limits_hold_before_something_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [1, 2])
    limit = 3 * path.stat().st_size
    largest, real = 0, os.fsync

    def fsync(file: int) -> None:
        nonlocal largest
        real(file)
        largest = max(largest, sum(x.stat().st_size for x in tmp_path.rglob("*") if x.is_file()))

    monkeypatch.setattr(os, "fsync", fsync)
    with KVStore(f"file://{tmp_path}", max_bytes=limit) as store:
        for token in range(3, 20):
            save(store, [token, 2])
        store.flush()
    assert 0 < largest <= limit


def test_what_is_larger_than_the_limit_removes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, [1, 2])
    with KVStore(f"file://{tmp_path}", max_bytes=path.stat().st_size, read="always") as store:
        save(store, list(range(40)))
        store.flush()
        assert found(store, [1, 2]) == 2
        assert found(store, list(range(40))) == 0


LIMITED = """
import sys
from store.test_store import save
from kvloom.store import KVStore
with KVStore(sys.argv[1], max_bytes=int(sys.argv[2])) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for token in range(60):
        save(store, [int(sys.argv[3]), token])
        store.flush()
"""


@pytest.mark.process
@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_hold_one_limit_together(num_processes: int, tmp_path: Path) -> None:
    size = written(tmp_path, [1, 2]).stat().st_size
    limit = 20 * size
    environment = with_tests()
    command = [sys.executable, "-c", LIMITED, f"file://{tmp_path}", str(limit)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(i)], env=environment, **pipes) for i in range(num_processes)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    largest = 0
    while any(process.poll() is None for process in processes):
        objects = list(Files(tmp_path).list_stored())
        largest = max(largest, sum(x.size for x in objects if "writing" not in x.name))
        time.sleep(0.01)
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0] * num_processes
    assert largest <= limit + num_processes * size  # one that each is about to write
    assert sum(x.size for x in Files(tmp_path).list_stored()) <= limit


def test_what_is_damaged_and_cannot_be_moved_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, [1, 2])
    file = bytearray(path.read_bytes())
    file[-1] ^= 1
    path.write_bytes(file)

    def refuse(self: Files, name: str, to: str) -> None:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(Files, "rename", refuse)
    with KVStore(f"file://{tmp_path}", read="always") as store:
        for _ in range(3):
            assert found(store, [1, 2]) == 0
            os.utime(path.parent, (0, 0))  # another listing
            store.refresh(WHOSE)
        assert store.tiers[0].counts["damaged"] == 1


def test_opening_takes_no_file_from_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is opened between the moments at which a temporary file is made and locked."""
    import fcntl

    files, real, opened = Files(tmp_path), fcntl.flock, []

    def flock(file: int, how: int) -> None:
        if how == fcntl.LOCK_EX and len(opened) < 3:
            opened.append(Files(tmp_path))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert files.put_if_absent("a/b", [b"x"])
    assert len(opened) == 3
    assert files.get_ranges("a/b", [(0, 1)]) == [b"x"]


FORKED = """
import os, sys, threading
from store.test_store import found, save
from kvloom.store import KVStore
from kvloom.store.backends.files import Files
store = KVStore(sys.argv[1], read="always")
found(store, [9, 9])
real, is_forked = Files.put_if_absent, threading.Event()
Files.put_if_absent = lambda *args: is_forked.wait(20) and real(*args)
save(store, [1, 2])
child = os.fork()
is_forked.set()
if not child:
    assert store.flush(20)
    save(store, [3, 4])
    assert found(store, [9, 9]) == 0
    assert store.flush(20)
    assert store.close(20)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
save(store, [5, 6])
assert store.flush(20) and store.close(20)
with KVStore(sys.argv[1], read="always") as again:
    assert [found(again, x) for x in ([1, 2], [3, 4], [5, 6])] == [2, 2, 2]
"""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_process_has_a_store_of_its_own(tmp_path: Path) -> None:
    environment = with_tests()
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FORKED, f"file://{tmp_path}"],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def test_a_store_that_was_away_gets_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*args: object) -> bool:
        raise OSError("away")

    with slow_store("near") as (near, _), slow_store("far") as (far, _):
        with KVStore(near, far, read="always") as store:
            with monkeypatch.context() as patch:
                patch.setattr(MemoryBackend._shared[far], "put_if_absent", away)
                save(store, [1, 2])
                store.flush()
            prefixes = store.prefixes(WHOSE, "", [1, 2])
            assert not store.missing(WHOSE, prefixes, range(2, 3))  # it is left alone for a while
            store.tiers[1]._down_until["write"] = 0.0
            assert store.missing(WHOSE, prefixes, range(2, 3)) == [2]
            save(store, [1, 2])
            store.flush()
            assert not store.missing(WHOSE, prefixes, range(2, 3))
            assert store.tiers[0].counts["runs_written"] == 1
        with KVStore(far, read="always") as store:
            assert found(store, [1, 2]) == 2


def test_closing_waits_as_long_as_it_may(caplog: pytest.LogCaptureFixture) -> None:
    with slow_store("closing") as (url, backend):
        store = KVStore(url)
        backend.is_free.clear()
        for token in range(3):
            save(store, [token, 2])
        assert not store.close(0.05)
        assert "3 runs were not written in 0.05 seconds" in caplog.text
        backend.is_free.set()
        assert store.close(None)
        assert len(backend._objects) == 3


def test_a_store_that_its_own_threads_collect_is_closed(tmp_path: Path) -> None:
    """Python ends what nobody has any more in whichever thread it likes."""
    path = tmp_path / "store"
    with KVStore(f"file://{path}") as store:
        errors: list[BaseException] = []

        def close(*_: object) -> bool:
            try:
                store._closing()
            except BaseException as error:
                errors.append(error)
            return True

        for name in ("put", "agrees"):  # by the thread that writes, and by the one that lists
            setattr(store.tiers[0], name, close)
            save(store, [1, 2])
            store.watch(WHOSE, wait=10.0)
            assert store.flush(10.0)
        assert not errors


def test_a_lookup_without_memory_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, [1, 2])
    with KVStore(f"file://{tmp_path}", read="always") as store:
        store.refresh(WHOSE)
        real = Files.get_ranges

        def scarce(self: Files, name: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
            raise MemoryError

        monkeypatch.setattr(Files, "get_ranges", scarce)
        assert found(store, [1, 2]) == 0
        monkeypatch.setattr(Files, "get_ranges", real)
        assert found(store, [1, 2]) == 2


def test_threads_look_up_and_write_at_once(tmp_path: Path) -> None:
    texts = [[i, i + 1, i + 2, i + 3] for i in range(20)]
    problems: list[object] = []
    with KVStore(f"file://{tmp_path}", read="always") as store:

        def work(start: int) -> None:
            try:
                for i in range(20):
                    tokens = texts[(start + i) % 20]
                    if found(store, tokens) < 4:
                        save(store, tokens)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(5 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.flush()
        store.refresh(fingerprint())
        assert not problems
        assert [found(store, x) for x in texts] == [4] * 20
        assert content(texts[0])
