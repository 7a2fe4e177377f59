"""What a prefix costs a store: requests and bytes, as docs/growth.md reckons with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from store.runs import fingerprint

from kvloom.store import KVStore
from kvloom.store.backends import Stored
from kvloom.store.backends.memory import MemoryBackend
from kvloom.store.format import page_bytes

PAGE, NUM_PAGES, NUM_RUNS = 2, 4, 3
WHOSE = fingerprint()
TOKENS = list(range(PAGE * NUM_PAGES * NUM_RUNS))


class Counted(MemoryBackend):
    """A store in memory that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        self.counts["get"] += 1
        found = super().get_ranges(name, ranges)
        self.counts["read"] += sum(map(len, found))
        return found

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        self.counts["put"] += 1
        self.counts["written"] += sum(map(len, parts))
        return super().put_if_absent(name, parts)

    def list_stored(self, prefix: str = "") -> list[Stored]:
        self.counts["list"] += 1
        return super().list_stored(prefix)

    def taken(self) -> Counter[str]:
        """Counts since the last call."""
        taken, self.counts = self.counts, Counter()
        return taken


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Counted]:
    url = f"memory://{request.node.name}"
    MemoryBackend._shared[url] = made = Counted()
    yield made
    del MemoryBackend._shared[url]


@pytest.fixture
def url(request: pytest.FixtureRequest, backend: Counted) -> str:
    return f"memory://{request.node.name}"


def write(store: KVStore, tokens: list[int]) -> None:
    """Runs of as many pages each."""
    size = PAGE * NUM_PAGES
    for start in range(0, len(tokens), size):
        data = bytearray(2 * NUM_PAGES * page_bytes(WHOSE, PAGE))
        assert store.save(WHOSE, "", tokens[: start + size], start, PAGE, data)
    assert store.flush(10)


def test_a_run_is_one_request_to_write_and_one_to_read(backend: Counted, url: str) -> None:
    with KVStore(url) as writer:
        write(writer, TOKENS)
    wrote = backend.taken()
    assert wrote["put"] == NUM_RUNS and not wrote["list"] and not wrote["get"]
    with KVStore(url) as reader:
        assert reader.find(WHOSE, "", TOKENS) == len(TOKENS)
        listed = backend.taken()
        assert (listed["list"], listed["get"]) == (1, NUM_RUNS)  # the head of each run, once
        assert len(reader.load(WHOSE, "", TOKENS)) == NUM_RUNS
        assert backend.taken() == {"get": NUM_RUNS, "read": wrote["written"]}
        reader.load(WHOSE, "", TOKENS)
        assert backend.taken()["list"] == 0


def test_a_run_of_another_process_costs_each_reader_its_head(backend: Counted, url: str) -> None:
    with KVStore(url) as writer, KVStore(url) as reader:
        reader.find(WHOSE, "", TOKENS)
        backend.taken()
        write(writer, TOKENS)
        backend.taken()
        for _ in range(2):
            reader.refresh(WHOSE)
        asked = backend.taken()
        assert (asked["list"], asked["get"]) == (2, NUM_RUNS)
