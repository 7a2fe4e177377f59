"""Local folders: whole files or none, whatever fails and whenever the process ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from campaign import times

from kvloom.store.backends.files import Files

NUM_KILLS = times(10)
CALLS = ("open", "write", "fsync", "close")
DATA = [b"x" * 5000, b"y" * 3000]


def everything(root: Path) -> list[str]:
    return sorted(x.relative_to(root).as_posix() for x in root.rglob("*") if x.is_file())


def test_folders_and_files_are_their_owners_alone(tmp_path: Path) -> None:
    files = Files(tmp_path / "new" / "store")
    files.put_if_absent("a/b", [b"x"])
    assert (tmp_path / "new" / "store").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "store" / "a").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "store" / "a" / "b").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "name", ["../x", "a/../b", "/etc/passwd", "a/b/c", "", "a/.b", "A/b", "a//b", "a/b\n"]
)
def test_no_name_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    files = Files(tmp_path / "store")
    for call in (lambda x: files.get_ranges(x, [(0, 1)]), files.delete):
        with pytest.raises(OSError, match="no name of this store"):
            call(name)
    with pytest.raises(OSError, match="no name of this store"):
        files.put_if_absent(name, [b"x"])


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    files = Files(tmp_path / "store")
    (tmp_path / "store" / "a").mkdir()
    (tmp_path / "store" / "a" / "b").symlink_to(tmp_path / "secret")
    (tmp_path / "store" / "c").symlink_to(tmp_path, target_is_directory=True)
    assert not list(files.list_stored())
    with pytest.raises(OSError, match=r"[Ss]ymbolic|links"):
        files.get_ranges("a/b", [(0, 6)])


@pytest.mark.parametrize("ranges", [[(0, 8000)], [(0, 10), (10, 7000)], [(3, 9), (20, 90)], [(9, 9999)], []])
def test_reads_that_give_less_are_continued(
    ranges: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, real = Files(tmp_path), os.preadv
    files.put_if_absent("a/b", [*DATA])
    monkeypatch.setattr(os, "preadv", lambda file, data, start: real(file, [data[0][:999]], start))
    assert files.get_ranges("a/b", ranges) == [b"".join(DATA)[start:end] for start, end in ranges]


def test_a_file_that_shrinks_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path)
    files.put_if_absent("a/b", [*DATA])
    monkeypatch.setattr(os, "preadv", lambda file, data, start: 0)
    with pytest.raises(OSError, match="file ends early"):
        files.get_ranges("a/b", [(0, 8)])


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EIO, "short"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_leaves_all_or_nothing(
    call: str, problem: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th call fails, for every n until none does."""
    real = getattr(os, call)
    for n in range(100):
        root = tmp_path / f"{n}"
        files, count, failed = Files(root), 0, False

        def fails(*args: Any, n: int = n, **kwargs: Any) -> Any:
            nonlocal count, failed
            count += 1
            if count != n + 1:
                return real(*args, **kwargs)
            failed = True
            if problem == "short" and call == "write":
                return real(args[0], args[1][:100])
            if call == "close":
                real(*args)
            raise OSError(errno.EIO if problem == "short" else problem, "planted")

        monkeypatch.setattr(os, call, fails)
        try:
            is_written = files.put_if_absent("a/b", list(DATA))
        except OSError:
            is_written = False
        monkeypatch.setattr(os, call, real)
        assert set(everything(root)) <= {"a/b"}
        again = Files(root)
        assert set(everything(root)) <= {"a/b"}
        if list(again.list_stored()):
            assert again.get_ranges("a/b", [(0, 9000)]) == [b"".join(DATA)]
        else:
            assert not is_written
            assert again.put_if_absent("a/b", list(DATA))
        if not failed:
            assert n > 0
            return
    pytest.fail("some call fails for ever")


WRITER = """
import sys
from pathlib import Path
from kvloom.store.backends.files import Files
files = Files(Path(sys.argv[1]))
for i in range(100_000):
    files.put_if_absent(f"a/{i}", [bytes([i % 256]) * 20_000])
    sys.stdout.write(f"{i}\\n")
    sys.stdout.flush()
"""


@pytest.mark.campaign
@pytest.mark.process
def test_a_killed_writer_loses_nothing_acknowledged(tmp_path: Path) -> None:
    for run in range(NUM_KILLS):
        root = tmp_path / str(run)
        with subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            acknowledged = [process.stdout.readline() for _ in range(run % 7 + 1)]
            process.send_signal(signal.SIGKILL)
            acknowledged += process.stdout.readlines()
        files = Files(root)
        there = everything(root)
        assert not [name for name in there if "writing" in name]
        for line in acknowledged:
            if line.endswith(b"\n"):
                assert f"a/{int(line)}" in there
        for name in there:
            assert files.get_ranges(name, [(0, 30_000)]) == [bytes([int(name[2:]) % 256]) * 20_000]


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    import fcntl

    Files(tmp_path).put_if_absent("a/b", [b"x"])
    path = tmp_path / "a" / ".writing-1-1-1"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Files(tmp_path)
        assert path.exists()
    Files(tmp_path)
    assert not path.exists()


def test_a_file_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path)
    calls: list[str] = []
    (tmp_path / "a").mkdir()

    def noted(name: str, real: Any) -> Any:
        return lambda *args: (calls.append(name), real(*args))[1]

    for owner, name in ((os, "write"), (os, "fsync"), (Path, "rename")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    files.put_if_absent("a/b", list(DATA))
    assert calls == ["write", "write", "fsync", "rename", "fsync"]
