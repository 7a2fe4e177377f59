"""Index of a store's runs by the digests of their pages, to find those that continue a text."""

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from kvloom.store.digests import TextDigests
from kvloom.store.fingerprint import Fingerprint
from kvloom.store.format import MAX_HEAD, Run, page_bytes


class IndexEntry(NamedTuple):
    """A run that can be read.

    Attributes:
        name: Name of its object.
        size: Bytes of the object.
        head_size: Bytes of its head.
        first: Position of the first token.
        page_size: Tokens in a page.
        digests: Digests of the text up to the end of each page.
    """

    name: str
    size: int
    head_size: int
    first: int
    page_size: int
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, run: Run, head_size: int) -> "IndexEntry":
        """Entry of a run."""
        size = head_size + run.data_bytes
        return cls(run.name, size, head_size, run.first, run.page_size, run.digests)

    def may_be_of(self, fingerprint: Fingerprint) -> bool:
        """Whether these sizes are possible for a run of a fingerprint."""
        pages = fingerprint.num_heads * len(self.digests) * page_bytes(fingerprint, self.page_size)
        return self.head_size <= MAX_HEAD and self.head_size + pages == self.size


Entry = IndexEntry
"""Its name in earlier releases."""


class Segment(NamedTuple):
    """Pages of one run that continue a text, from the page with token ``start`` to token ``end``."""

    entry: IndexEntry
    start: int
    end: int

    @property
    def pages(self) -> range:
        """Numbers of the pages in the run."""
        first, size = self.entry.first, self.entry.page_size
        return range((self.start - first) // size, (self.end - first) // size)


class Index:
    """Runs of one fingerprint, by the digest at the end of each page. Not thread-safe."""

    def __init__(self) -> None:
        self.entries: dict[str, IndexEntry] = {}
        self._ends: dict[bytes, tuple[tuple[str, int], ...]] = {}  # runs with each digest, and its page
        self._page_sizes: dict[int, int] = {}
        self._single = Counter[int]()  # ends of pages of one token, which are few and at the end of texts

    def __contains__(self, digest: bytes) -> bool:
        """Whether a page ends with this digest."""
        return digest in self._ends

    def add(self, entry: IndexEntry) -> None:
        """Add a run."""
        if entry.name in self.entries:
            return
        self.entries[entry.name] = entry
        self._page_sizes[entry.page_size] = self._page_sizes.get(entry.page_size, 0) + 1
        self._single.update(_single_ends(entry))
        for i, digest in enumerate(entry.digests, 1):
            place = (entry.name, entry.first + i * entry.page_size)
            self._ends[digest] = (*self._ends.get(digest, ()), place)

    def remove(self, name: str) -> None:
        """Remove a run, if it is known."""
        entry = self.entries.pop(name, None)
        if entry is None:
            return
        self._page_sizes[entry.page_size] -= 1
        self._single -= Counter(_single_ends(entry))
        for digest in entry.digests:
            others = tuple(place for place in self._ends.pop(digest, ()) if place[0] != name)
            if others:
                self._ends[digest] = others

    def find(self, prefixes: TextDigests, start: int, num_tokens: int) -> list[Segment]:
        """Fewest consecutive segments that reach furthest from ``start``.

        Args:
            prefixes: Digests of the text.
            start: Number of tokens that are available already.
            num_tokens: Number of tokens of the text.
        """
        sizes = [size for size, count in self._page_sizes.items() if count and size != 1]
        reached: dict[str, int] = {}  # end reached by each run that has a page of this text
        digests, i = _digests(prefixes, sizes, start, num_tokens), 0
        while i < len(digests):
            runs = self._ends.get(digests[i], ())
            if not runs and len(sizes) == 1:
                break  # no run has this page, so none reaches beyond it
            reached.update(runs)
            i += 1
            if len(runs) == len(sizes) == 1:
                i += self._follow(reached, runs[0][0], digests, i)
        for digest in prefixes.digests(sorted(end for end in self._single if start < end <= num_tokens)):
            reached.update(self._ends.get(digest, ()))
        return self._chain(reached, start)

    def _chain(self, reached: dict[str, int], start: int) -> list[Segment]:
        """Fewest segments of runs, given the end that each reaches, without a gap from ``start`` on."""
        found, entries = list[Segment](), self.entries
        at, best, end = start, None, start
        for entry in sorted(map(entries.__getitem__, reached), key=attrgetter("first")):
            if entry.first > at and best is not None:
                found.append(Segment(best, at, end))
                at, best = end, None
            if entry.first > at:
                return found
            if reached[entry.name] > end:
                best, end = entry, reached[entry.name]
        return found if best is None else [*found, Segment(best, at, end)]

    def _follow(self, reached: dict[str, int], name: str, digests: Sequence[bytes], i: int) -> int:
        """Reach the end of a run that alone has the page before ``i``, if the text continues with all of it.

        Returns:
            Number of pages. Runs that begin within these and end before the last reach no further.
        """
        entry = self.entries[name]
        rest = entry.digests[(reached[name] - entry.first) // entry.page_size :]
        if not rest or digests[i : i + len(rest)] != rest:
            return 0
        reached[name] = entry.first + len(entry.digests) * entry.page_size
        return len(rest)


def _single_ends(entry: IndexEntry) -> range:
    """Ends of the pages of a run whose pages have one token; else empty."""
    return range(entry.first + 1, entry.first + len(entry.digests) + 1 if entry.page_size == 1 else 0)


def _digests(prefixes: TextDigests, sizes: list[int], start: int, num_tokens: int) -> Sequence[bytes]:
    """Digests of prefixes that end after ``start`` with a page of one of these sizes, ascending."""
    if len(sizes) == 1:
        return prefixes.pages(sizes[0], start // sizes[0] * sizes[0], num_tokens)
    ends = {end for size in sizes for end in range(size, num_tokens + 1, size) if end > start}
    return prefixes.digests(sorted(ends))
