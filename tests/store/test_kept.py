"""What is kept in memory between reads, heads and digests, is what would be read or computed anew."""

from __future__ import annotations

import os
import random
import threading
import time
from itertools import product
from pathlib import Path

import pytest
from oracles.interrupts import interrupted
from store.runs import fingerprint, make_run
from store.test_store import WHOSE, found, save

from kvloom.core.text import Text
from kvloom.store import KVStore
from kvloom.store.digests import TextDigests, digests_of, salt_digest
from kvloom.store.format import DamagedRun
from kvloom.store.index import Index, IndexEntry
from kvloom.store.sums import PLAIN, checksum
from kvloom.store.tiers.heads import Heads

TEXT = list(range(40))


def test_a_head_that_changes_after_it_was_read_is_damaged(tmp_path: Path) -> None:
    with KVStore(f"file://{tmp_path}", read="always") as store:
        save(store, [1, 2, 3, 4])
        store.flush()
        (path,) = tmp_path.rglob("*.safetensors")
        assert [found(store, [1, 2, 3, 4]) for _ in range(3)] == [4, 4, 4]
        file = bytearray(path.read_bytes())
        file[200] ^= 1
        path.write_bytes(file)
        assert found(store, [1, 2, 3, 4]) == 0
        assert store.tiers[0].counts["damaged"] == 1
        assert [x.parent.name for x in tmp_path.rglob("*.safetensors")] == ["quarantine"]


def test_every_byte_that_changes_after_a_read_is_a_miss(tmp_path: Path) -> None:
    with KVStore(f"file://{tmp_path}", read="always") as store:
        save(store, [1, 2])
        store.flush()
        assert found(store, [1, 2]) == 2
        (path,) = tmp_path.rglob("*.safetensors")
        good = path.read_bytes()
        for at in range(0, len(good), 3):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            store.tiers[0].catalog.forget(WHOSE)
            assert found(store, [1, 2]) == 0
            for x in (tmp_path / "quarantine").iterdir():
                x.unlink()


@pytest.mark.parametrize("change", ["name", "size", "byte"])
def test_a_known_head_is_checked_again_where_anything_differs(change: str) -> None:
    heads, (run, data) = Heads(), make_run(TEXT)
    head, size = run.head(), len(run.head()) + len(data)
    assert heads.read(run.name, head, size) == run
    assert heads.read(run.name, head, size) is heads.read(run.name, head, size)
    other = bytearray(head)
    other[-1] ^= change == "byte"
    with pytest.raises(DamagedRun):
        heads.read(run.name + "x" * (change == "name"), bytes(other), size + (change == "size"))
    assert heads.read(run.name, head, size) == run


def test_heads_are_kept_within_their_bytes() -> None:
    runs = [make_run(TEXT[: 2 * n])[0] for n in range(1, 20)]
    size = len(runs[-1].head())
    heads = Heads(max_bytes=3 * size)
    for run in runs * 2:
        heads.keep(run.head(), run)
        assert heads._num_bytes == sum(len(head) for head, _ in heads._kept.values()) <= 3 * size
    assert runs[-1].name in heads._kept
    heads.keep(bytes(4 * size), runs[0])
    assert not heads._kept and not heads._num_bytes


def test_digests_that_a_text_keeps_are_those_of_its_prefixes() -> None:
    rng, whose = random.Random(0), (WHOSE.digest, fingerprint(rope="x").digest)
    for _ in range(100):
        text = Text(TEXT)
        for _ in range(20):
            part = text[: rng.randint(0, len(text))]
            model, salt = rng.choice(whose), salt_digest(rng.choice("ab"))
            ends = sorted(rng.sample(range(len(part) + 1), min(len(part), 4)))
            kept = digests_of(model, salt, part)
            assert kept.digests(ends) == TextDigests(model, salt, list(part)).digests(ends)
            size = rng.choice((1, 3, 4))
            assert kept.pages(size, 0, len(part)) == tuple(kept.digests(range(size, len(part) + 1, size)))
            assert digests_of(model, salt, part) is kept


def test_a_copy_of_digests_goes_on_with_another_text() -> None:
    whose = WHOSE.digest, salt_digest("")
    for num_hashed, num_kept in product((0, 7, 40), (0, 7, 40)):
        first = TextDigests(*whose, TEXT)
        first.digests(range(num_hashed + 1))
        other = first.copy(num_kept)
        other.extend([5, 6, 7])
        wanted = TextDigests(*whose, [*TEXT[:num_kept], 5, 6, 7])
        ends = range(num_kept + 4)
        assert other.digests(ends) == wanted.digests(ends)
        assert first.digests(range(41)) == TextDigests(*whose, TEXT).digests(range(41))


@pytest.mark.parametrize("sizes", [(2,), (1,), (2, 3), (2, 4, 8), (3, 5, 2, 4)])
def test_runs_are_followed_as_far_as_they_reach(sizes: tuple[int, ...]) -> None:
    """Overlapping runs of this text and of others that begin as it does, against every way to go on."""
    rng = random.Random(sum(sizes))
    for _ in range(300):
        index = Index()
        for _ in range(rng.randint(1, 6)):
            size = rng.choice(sizes)
            first = size * rng.randint(0, 12 // size)
            tokens = TEXT[: first + size * rng.randint(1, 12 // size)]
            if rng.random() < 0.4:
                tokens[rng.randrange(len(tokens))] = 99
            index.add(IndexEntry.of(make_run(tokens, first, page_size=size)[0], 0))
        start, num_tokens = rng.randint(0, 12), rng.randint(1, 24)
        prefixes = TextDigests(WHOSE.digest, salt_digest(""), TEXT[:num_tokens])
        segments = index.find(prefixes, start, num_tokens)
        reached, reachable = start, []
        for x in index.entries.values():
            ends = range(x.first + x.page_size, num_tokens + 1, x.page_size)
            good = [
                end
                for end, digest in zip(ends, x.digests, strict=False)
                if digest == prefixes.digests([end])[0]
            ]
            reachable += [(x.first, end) for end in good]
        while further := [end for first, end in reachable if first <= reached < end]:
            reached = max(further)
        assert (segments[-1].end if segments else start) == reached
        for segment, before in zip(segments, [start, *(x.end for x in segments)], strict=False):
            assert segment.start == before < segment.end and segment.entry.first <= before


def test_runs_of_one_text_are_found_in_time_that_each_adds_alike() -> None:
    index, lines = Index(), list[int]()
    prefixes = TextDigests(WHOSE.digest, salt_digest(""), range(1200))
    for num_pages in range(1, 301):
        index.add(IndexEntry.of(make_run(range(4 * num_pages), 4 * num_pages - 4, page_size=4)[0], 0))
        if not num_pages % 100:
            assert len(index.find(prefixes, 0, 1200)) == num_pages
            lines.append(interrupted(0, lambda: index.find(prefixes, 0, 1200)))
    assert lines[2] < 3.1 * lines[0]


def test_pages_have_the_digests_of_their_ends() -> None:
    prefixes = TextDigests(WHOSE.digest, salt_digest(""), TEXT)
    for size, first, end in product((1, 3, 4), (0, 3, 5, 8), (8, 12, 40)):
        ends = range(first + size, end + 1, size)
        assert prefixes.pages(size, first, end) == tuple(prefixes.digests(ends))


def test_a_store_is_told_of_uses_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    with KVStore(f"file://{tmp_path}", read="always") as store:
        save(store, [1, 2])
        store.flush()
        (path,) = tmp_path.rglob("*.safetensors")
        for passed, is_told in (
            (0.0, True),
            (0.5, False),
            (0.9, False),
            (1.1, True),
            (1.2, False),
            (-5.0, True),
        ):
            now = round(now) + passed
            os.utime(path, (1, 1))
            assert found(store, [1, 2]) == 2
            assert (path.stat().st_mtime > 1) == is_told
            now -= passed


def test_threads_share_what_is_kept() -> None:
    text, problems = Text(TEXT), []
    wanted = TextDigests(WHOSE.digest, salt_digest(""), TEXT).digests(range(41))

    def work() -> None:
        for i in range(300):
            end = i % 41
            if digests_of(WHOSE.digest, salt_digest(""), text[:end]).digests([end]) != [wanted[end]]:
                problems.append(end)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


@pytest.mark.parametrize("size", [1, 16, 240, 241, 1000, 8512])
@pytest.mark.parametrize("rest", [0, 1])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_sums_are_those_of_each_piece(size: int, rest: int, kind: type) -> None:
    data = random.Random(size).randbytes(5 * size + rest * (size - 1))
    wanted = b"".join(checksum(data[at : at + size]) for at in range(0, len(data), size))
    assert PLAIN.checksums(memoryview(kind(data)), size) == wanted
