"""Stores in a row, with limits, in threads and processes: what is found is what was saved, or nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from campaign import times
from store.runs import fingerprint, make_run, with_tests

from kvloom.errors import ArgumentError
from kvloom.store import Fingerprint, KVStore
from kvloom.store.backends.files import Files
from kvloom.store.digests import DIGEST_BYTES, TextDigests, salt_digest
from kvloom.store.format import page_bytes
from kvloom.store.index import Index, IndexEntry
from kvloom.store.store import open_store

NUM_LOOKUPS = times(400)
NUM_SALTS = times(20_000)
WHOSE = fingerprint()
SIZE = 2


def content(tokens: list[int], first: int = 0) -> bytearray:
    """The pages of a text: of each head, what its tokens say."""
    nbytes = page_bytes(WHOSE, SIZE)
    return bytearray(
        b"".join(
            random.Random(f"{head} {tokens[: at + SIZE]}").randbytes(nbytes)
            for head in range(2)
            for at in range(first, len(tokens), SIZE)
        )
    )


def save(store: KVStore, tokens: list[int], first: int = 0, salt: str = "") -> None:
    store.save(WHOSE, salt, tokens, first, SIZE, content(tokens, first))


def found(store: KVStore, tokens: list[int], salt: str = "", whose: Fingerprint = WHOSE) -> int:
    """Tokens that are found, each of them checked to be what was saved."""
    pieces = store.load(whose, salt, tokens)
    at = 0
    for piece in pieces:
        assert piece.segment.start == at
        pages, at = piece.segment.pages, piece.segment.end
        first = piece.run.first + pages.start * SIZE
        assert piece.data == content(tokens[:at], first)
    return at


def test_what_is_saved_is_found_in_every_kind_of_store(url: str) -> None:
    with KVStore(url, read="always") as store:
        save(store, [1, 2, 3, 4])
        save(store, [1, 2, 3, 4, 5, 6], first=4)
        assert store.flush()
        assert found(store, [1, 2, 3, 4, 5, 6, 7]) == 6
    with KVStore(url, read="always") as store:
        assert [found(store, list(range(1, end))) for end in range(1, 9)] == [0, 0, 2, 2, 4, 4, 6, 6]
        assert found(store, [1, 2, 9, 4]) == 2
        assert found(store, [1, 2, 3, 4], "salt") == 0
        assert found(store, [1, 2, 3, 4], whose=fingerprint(weights="x")) == 0


def test_a_store_that_is_open_finds_what_another_writes(url: str) -> None:
    with KVStore(url) as first, KVStore(url) as second:
        assert found(second, [1, 2]) == 0
        save(first, [1, 2])
        first.flush()
        for tier in second.tiers:
            tier.catalog.refresh_seconds = 0.0
        assert found(second, [1, 2]) == 2


def test_what_is_listed_is_found_without_reading(url: str) -> None:
    with KVStore(url, "memory://found-behind") as first:
        save(first, [1, 2, 3, 4])
        save(first, [1, 2, 3, 4, 5, 6], first=4)
        assert first.flush()
        tokens = [1, 2, 3, 4, 5, 6, 7]
        assert [first.find(WHOSE, "", tokens, start) for start in (0, 1, 4, 6, 7)] == [6, 6, 6, 6, 7]
        assert first.find(WHOSE, "salt", tokens) == 0
        assert first.find(WHOSE, "", [1, 2, 9]) == 2
        assert "bytes_read" not in first.tiers[0].counts


def test_refreshing_finds_at_once_what_another_wrote(url: str) -> None:
    with KVStore(url) as first, KVStore(url) as second:
        assert second.find(WHOSE, "", [1, 2]) == 0
        save(first, [1, 2])
        first.flush()
        assert second.find(WHOSE, "", [1, 2]) == 0
        second.refresh(WHOSE)
        assert second.find(WHOSE, "", [1, 2]) == 2


def test_what_another_process_removed_is_a_miss(tmp_path: Path) -> None:
    with KVStore(f"file://{tmp_path}") as store:
        save(store, [1, 2, 3, 4])
        store.flush()
        for path in tmp_path.rglob("*.safetensors"):
            path.unlink()
        assert found(store, [1, 2, 3, 4]) == 0
        assert not store.tiers[0].counts["read_errors"]


def test_a_damaged_head_is_a_miss_when_a_store_is_opened(tmp_path: Path) -> None:
    with KVStore(f"file://{tmp_path}") as store:
        save(store, [1, 2, 3, 4])
        save(store, [5, 6])
    for path in sorted(tmp_path.rglob("*.safetensors")):
        path.write_bytes(path.read_bytes()[:-1])
    with KVStore(f"file://{tmp_path}") as store:
        assert (found(store, [1, 2, 3, 4]), found(store, [5, 6])) == (0, 0)
        assert store.tiers[0].counts["damaged"] == 2
        save(store, [5, 6])
        store.flush()
        assert found(store, [5, 6]) == 2


def test_a_damaged_run_that_cannot_be_moved_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KVStore(f"file://{tmp_path}") as store:
        save(store, [1, 2])
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])

    def is_read_only(*args: object) -> bool:
        raise OSError("read-only")

    monkeypatch.setattr(Files, "put_if_absent", is_read_only)
    with KVStore(f"file://{tmp_path}") as store:
        for tier in store.tiers:
            tier.catalog.refresh_seconds = 0.0
        assert [found(store, [1, 2]) for _ in range(3)] == [0, 0, 0]
        assert store.tiers[0].counts["damaged"] == 1


def test_another_format_is_left_alone(tmp_path: Path) -> None:
    run, data = make_run([1, 2])
    path = tmp_path / run.name
    path.parent.mkdir(parents=True)
    file = (run.head() + bytes(data)).replace(b"kvloom-run/1", b"kvloom-run/2")
    path.write_bytes(file)
    with KVStore(f"file://{tmp_path}") as store:
        assert found(store, [1, 2]) == 0
        assert not store.tiers[0].counts["damaged"]
    assert path.read_bytes() == file


def test_limits_of_bytes_keep_what_is_used(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    with KVStore(url) as store:
        save(store, [1, 2])
    size = next(tmp_path.rglob("*.safetensors")).stat().st_size
    limit = 3 * size + 2 * DIGEST_BYTES  # an evicted run leaves the digest of its page
    with KVStore(url, max_bytes=limit) as store:
        for token in (3, 5, 7, 9):
            assert found(store, [1, 2]) == 2
            save(store, [token, token])
            store.flush()
        assert [found(store, [token, token]) for token in (3, 5, 7, 9)] == [0, 0, 2, 2]
        assert found(store, [1, 2]) == 2
        assert store.tiers[0].counts["runs_evicted"] == 2
    assert sum(x.stat().st_size for x in tmp_path.rglob("*") if x.is_file()) <= limit


def test_limits_hold_after_a_restart(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    with KVStore(url) as store:
        for token in range(5):
            save(store, [token, token])
    for i, path in enumerate(sorted(tmp_path.rglob("*.safetensors"))):
        os.utime(path, (i, i))
    with KVStore(url, max_age=86400.0) as store:
        save(store, [9, 9])
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    with KVStore(f"file://{tmp_path}", max_queued=10) as store:
        save(store, [1, 2])
        store.flush()
        assert found(store, [1, 2]) == 0
        assert store.report()["runs_dropped"] == 1


def test_closing_writes_what_is_queued_and_then_no_more(tmp_path: Path) -> None:
    store = KVStore(f"file://{tmp_path}")
    for token in range(20):
        save(store, [token, token])
    store.close()
    save(store, [99, 99])
    store.close()
    assert [found(store, [token, token]) for token in (0, 19, 99)] == [2, 2, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is that of the process")
def test_what_writes_behind_leaves_processors_to_others(tmp_path: Path) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with KVStore(f"file://{tmp_path}") as store:
        before = set(threading.enumerate())
        save(store, [1, 2])
        (writer,) = set(threading.enumerate()) - before
        store.flush()
        assert writer.native_id is not None
        assert os.getpriority(os.PRIO_PROCESS, writer.native_id) == 19
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


@pytest.mark.process
def test_the_end_of_a_process_waits_for_what_is_queued(tmp_path: Path) -> None:
    code = "from store.test_store import *; s = KVStore(sys.argv[1]); [save(s, [i, i]) for i in range(20)]"
    subprocess.run(
        [sys.executable, "-c", code, f"file://{tmp_path}"],
        check=True,
        env=with_tests(),
    )
    assert len(list(tmp_path.rglob("*.safetensors"))) == 20


def texts() -> list[list[int]]:
    return [[text % 3, text % 5, text, text][: 2 + text % 3 // 2 * 2] for text in range(30)]


def look_and_save(url: str, seed: int, num_lookups: int) -> None:
    """Look for texts, each checked, and save them, in two threads."""

    def work(rng: random.Random) -> None:
        for i in range(num_lookups):
            if i % 100 == 0:
                stores[0] = KVStore(url, read="always", max_bytes=20_000)
            tokens = rng.choice(texts())
            if found(stores[0], tokens) < len(tokens) // 2 * 2 or rng.random() < 0.1:
                save(stores[0], tokens)

    stores = [KVStore(url, read="always")]
    problems: list[BaseException] = []
    threads = []

    def run(thread: int) -> None:
        try:
            work(random.Random(f"{seed} {thread}"))
        except BaseException as problem:
            problems.append(problem)

    for thread in range(2):
        threads.append(threading.Thread(target=run, args=(thread,)))
        threads[-1].start()
    for started in threads:
        started.join()
    if problems:
        raise problems[0]


@pytest.mark.campaign
@pytest.mark.process
def test_readers_beside_writers_find_what_was_saved_or_nothing(tmp_path: Path) -> None:
    """Two processes of two threads, while limits remove what was saved."""
    code = "from store.test_store import *; look_and_save(sys.argv[1], *map(int, sys.argv[2:]))"
    environment = with_tests()
    command = [sys.executable, "-c", code, f"file://{tmp_path}"]
    processes = [subprocess.Popen([*command, str(i), str(NUM_LOOKUPS)], env=environment) for i in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert not [x for x in tmp_path.rglob("*") if "writing" in x.name or x.parent.name == "quarantine"]
    with KVStore(f"file://{tmp_path}", read="always") as store:
        for tokens in texts():
            found(store, tokens)
        assert not store.tiers[0].counts["damaged"]


@pytest.mark.campaign
def test_no_other_salt_or_model_is_ever_found() -> None:
    index = Index()
    tokens = list(range(20))
    for salt in ("", "a", "tenant"):
        run, _ = make_run(tokens, salt=salt)

        index.add(IndexEntry.of(run, 0))
    rng = random.Random(0)
    for i in range(NUM_SALTS):
        prefixes = TextDigests(WHOSE.digest, salt_digest(f"{i}"), tokens)
        assert not index.find(prefixes, 0, rng.randint(2, 20))
    assert not index.find(TextDigests(fingerprint(rope="x").digest, salt_digest(""), tokens), 0, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"read": "never"}, "read must be 'cheaper' or 'always', got 'never'"),
        ({"max_bytes": -1}, "max_bytes must be at least 0, got -1"),
        ({"max_age": float("nan")}, "max_age must be at least 0, got nan"),
    ],
)
def test_what_is_not_allowed_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        KVStore("memory://", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (5, "store must be a KVStore, a URL or a list of URLs, got 5"),
        (b"memory://", "store must be a KVStore, a URL or a list of URLs, got b'memory://'"),
        (["memory://", 5], "store must be one URL or more, got 5"),
        ([], "store must be one URL or more, got none"),
    ],
)
def test_what_is_no_store_is_named(store: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        open_store(store)


@pytest.mark.parametrize("token", [2**63, 1.5, None])
def test_a_token_that_is_no_int64_is_named(token: int) -> None:
    with (
        KVStore("memory://") as store,
        pytest.raises(ArgumentError, match=rf"^tokens must be signed 64-bit integers, got {token}$"),
    ):
        store.find(WHOSE, "", [1, 2, token])
