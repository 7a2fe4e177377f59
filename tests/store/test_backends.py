"""Every kind of store behaves as the protocol says."""

from __future__ import annotations

import threading
import time

import pytest

from kvloom.errors import ArgumentError
from kvloom.store.backends import Backend, connect


@pytest.fixture
def backend(url: str) -> Backend:
    return connect(url, 60.0)  # a server on a busy machine may take long


def read(backend: Backend, name: str, *ranges: tuple[int, int]) -> list[bytes]:
    return [bytes(x) for x in backend.get_ranges(name, [*ranges])]


def test_what_is_put_is_there_and_is_read_in_ranges(backend: Backend) -> None:
    assert not list(backend.list_stored())
    assert backend.put_if_absent("a/b.x", [b"0123", bytearray(b"456789")])
    assert read(backend, "a/b.x", (0, 10)) == [b"0123456789"]
    assert read(backend, "a/b.x", (2, 3), (7, 9), (0, 1)) == [b"2", b"78", b"0"]
    assert read(backend, "a/b.x", (0, 4), (4, 10)) == [b"0123", b"456789"]
    assert read(backend, "a/b.x", (3, 5), (3, 5)) == [b"34", b"34"]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(0, 20)], [b"0123456789"]),
        ([(8, 12), (14, 16)], [b"89", b""]),
        ([(0, 2), (1 << 40, (1 << 40) + 5)], [b"01", b""]),
        ([(20, 30)], [b""]),
        ([(0, 0), (4, 6)], [b"", b"45"]),
        ([(3, 3)], [b""]),
        ([], []),
    ],
)
def test_what_lies_behind_the_end_is_left_out(
    ranges: list[tuple[int, int]], expected: list[bytes], backend: Backend
) -> None:
    backend.put_if_absent("a/b", [b"0123456789"])
    assert read(backend, "a/b", *ranges) == expected


def test_what_is_read_is_no_way_to_change_what_is_stored(backend: Backend) -> None:
    backend.put_if_absent("a/b", [b"head", bytearray(b"pages")])
    backend.put_if_absent("a/c", [memoryview(bytearray(b"of more"))[3:]])
    for name, size in (("a/b", 9), ("a/c", 4)):
        before = read(backend, name, (0, size))
        for ranges in ([(0, 4), (4, 9)], [(1, 3)], [(0, 9)]):
            for x in backend.get_ranges(name, ranges):
                if not x.readonly:
                    x[:] = bytes(len(x))
        assert read(backend, name, (0, size)) == before


def test_the_first_that_is_put_stays(backend: Backend) -> None:
    assert backend.put_if_absent("a/b", [b"first"])
    assert not backend.put_if_absent("a/b", [b"second"])
    assert read(backend, "a/b", (0, 5)) == [b"first"]


def test_what_is_not_there_is_told_apart(backend: Backend) -> None:
    with pytest.raises(FileNotFoundError):
        backend.get_ranges("a/none", [(0, 1)])
    backend.delete("a/none")
    backend.put_if_absent("a/b", [b"x"])
    backend.delete("a/b")
    assert not list(backend.list_stored())
    with pytest.raises(FileNotFoundError):
        backend.get_ranges("a/b", [(0, 1)])


def test_a_listing_has_names_sizes_and_times(backend: Backend) -> None:
    assert not list(backend.list_stored())
    for name in ("a/1", "a/2", "b/1"):
        backend.put_if_absent(name, [b"x" * int(name[-1])])
    found = backend.list_stored("a/")
    assert sorted((x.name, x.size) for x in found) == [("a/1", 1), ("a/2", 2)]
    assert all(abs(x.used - time.time()) < 100 for x in found)
    assert len(list(backend.list_stored())) == 3
    assert not list(backend.list_stored("c/"))


def test_what_is_touched_counts_as_used(backend: Backend) -> None:
    backend.put_if_absent("a/b", [b"x"])
    (before,) = backend.list_stored()
    backend.touch("a/b")
    backend.touch("a/none")
    (after,) = backend.list_stored()
    assert after.used >= before.used - 1
    assert after[:2] == before[:2]


def test_a_listing_is_no_use(backend: Backend, url: str) -> None:
    for name in ("a/old", "a/new"):
        backend.put_if_absent(name, [b"x"])
    time.sleep(0.05)  # file systems count times in ticks of the kernel
    backend.touch("a/old")
    for _ in range(2):
        used = {x.name: x.used for x in backend.list_stored()}
        is_remembered = not url.startswith("s3")
        assert (used["a/old"] > used["a/new"]) == is_remembered


def test_many_threads_put_one_name_once(backend: Backend) -> None:
    won: list[bool] = []
    threads = [
        threading.Thread(target=lambda i=i: won.append(backend.put_if_absent("a/b", [bytes([i]) * 1000])))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(won)
    assert len(set(*read(backend, "a/b", (0, 1000)))) == 1


@pytest.mark.parametrize("bad", ["folder", "ftp://x", "file://host/x", "file://relative", "file:///x?y", ""])
def test_what_names_no_store_is_refused(bad: str) -> None:
    with pytest.raises(ArgumentError, match="store must be"):
        connect(bad, 1.0)
