"""CPU time of bookkeeping at four sizes of what it grows with, and the exponent that fits: 1 is linear.

Each row is what one call takes whose result does not depend on the size. ``growth.py`` prints them.
"""

import time
from collections.abc import Callable, Sequence
from math import log
from typing import Any

import torch

from kvloom.caches import CacheFormat, PrefixCache, Sequences
from kvloom.paging import PagePool, PrefixTree
from kvloom.store.index import Index, IndexEntry

PAGE = 16
CALLS = 64
Call = Callable[[], object]


def recording(num_pages: int) -> Call:
    """Begin a recording while a text of so many pages is held."""
    pool = PagePool(num_pages)
    tree = PrefixTree(pool, PAGE)
    tree.insert(range(num_pages * PAGE), pool.take(num_pages))
    return tree.record


class Text:
    """A text whose page i has the digest i, as an ``Index`` asks it."""

    def pages(self, size: int, start: int, end: int) -> list[bytes]:
        """Digests of pages."""
        return [i.to_bytes(8, "big") for i in range(start // size, end // size)]

    def digests(self, ends: Sequence[int]) -> list[bytes]:
        """Digests by the ends of pages."""
        return [(end // PAGE - 1).to_bytes(8, "big") for end in ends]


def finding(num_runs: int) -> Call:
    """Find a text of which a store has each page in a run of its own."""
    index, text = Index(), Text()
    for i in range(num_runs):
        index.add(IndexEntry(f"{i}", 100, 10, PAGE * i, PAGE, (i.to_bytes(8, "big"),)))
    return lambda: index.find(text, 0, PAGE * num_runs)  # type: ignore[arg-type]


def prefix_cache(num_pages: int) -> PrefixCache:
    """A small cache of so many pages."""
    form = CacheFormat(page_size=PAGE, max_tokens=num_pages * PAGE)
    return PrefixCache(form, num_layers=1, heads=1, head_dim=8)


def token_of(cache: PrefixCache, sequence: Any, num_tokens: int) -> Call:
    """Append and commit one token more each time, behind ``num_tokens``."""
    new = torch.zeros(num_tokens, 1, 8, dtype=torch.float16)
    cache.append(sequence, 0, new, new)
    cache.commit(sequence)

    def step() -> None:
        cache.extend(sequence, [1])
        cache.append(sequence, 0, new[:1], new[:1])
        cache.commit(sequence)

    return step


def beside(num_sequences: int) -> Call:
    """A token of one sequence among so many that live."""
    cache = prefix_cache(num_sequences + 2 * CALLS)
    sequences = [cache.begin([i]) for i in range(num_sequences)]
    return token_of(cache, sequences[-1], 1)


def behind(num_tokens: int) -> Call:
    """A token behind so many of its sequence; each 16th fills a page."""
    cache = prefix_cache(num_tokens // PAGE + 2 * CALLS)
    return token_of(cache, cache.begin(range(num_tokens)), num_tokens)


def page_table(num_tokens: int) -> Call:
    """A page more in the page table that attention reads."""
    sequences = Sequences(CacheFormat(page_size=PAGE))
    sequences.reserve(1, num_tokens)
    sequences.pages.add_layers([0], 1, (8, 8), torch.float16, torch.device("cpu"))
    sequences.pages.pool.grow(2 * CALLS)

    def step() -> None:
        end = sequences.num_positions + PAGE
        sequences.reserve(1, end)
        sequences.place(0, end, sequences.storages[0], 1)

    return step


def evicting(num_pages: int) -> Call:
    """A page that evicts another, by the policy that learns; texts of one page."""
    pool = PagePool(num_pages, "ours")
    tree, texts = PrefixTree(pool, 1), iter(range(1 << 60))

    def step() -> None:
        [ref] = tree.insert([next(texts)], pool.take(1))
        pool.release(ref)

    for _ in range(2 * num_pages):
        step()
    return step


ROWS: dict[str, tuple[Callable[[int], Call], str, int]] = {
    "begin to record": (recording, "pages held", 1000),
    "find in a store": (finding, "runs of the text", 250),
    "a token beside others": (beside, "live sequences", 160),
    "a token": (behind, "tokens before it", 16_000),
    "a page in its table": (page_table, "tokens before it", 16_000),
    "an eviction": (evicting, "pages", 1000),
}
"""For each row what makes its call, what grows, and the smallest size; each next one is four times that."""


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Slope of the line that fits the logarithms best."""
    xs, ys = [*map(log, sizes)], [*map(log, times)]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def measure(*, is_quick: bool) -> list[dict[str, Any]]:
    """Microseconds of CPU time of a call of each row at each size, best of three means, and exponents."""
    rows = []
    for what, (make, grows, least) in ROWS.items():
        sizes = [least // (16 if is_quick else 1) * 4**i for i in range(2 if is_quick else 4)]
        times = []
        for size in sizes:
            call, means = make(size), list[float]()
            for _ in range(1 if is_quick else 3):
                count = 4 if is_quick else (3 if make in (recording, finding) else CALLS // 3)
                began = time.process_time()
                for _ in range(count):
                    call()
                means.append((time.process_time() - began) / count)
            times.append(max(min(means), 1e-9))
        rows.append(
            {
                "what": what,
                "grows": grows,
                "sizes": sizes,
                "us": [x * 1e6 for x in times],
                "exponent": exponent(sizes, times),
            }
        )
    return rows
