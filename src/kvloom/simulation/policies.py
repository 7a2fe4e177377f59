"""General cache policies for independent blocks, to compare pool and tree with."""

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import Final, TypeAlias

from kvloom.simulation.trace import Request

Blocks: TypeAlias = "OrderedDict[int, None]"
"""Queue from which any block can be removed, in order of insertion."""


class Policy(ABC):
    """Cache of a fixed number of blocks, with its own order of eviction."""

    @abstractmethod
    def __contains__(self, block: object) -> bool:
        """Whether a block is cached."""

    @abstractmethod
    def _use(self, block: int) -> None: ...

    def use(self, blocks: Iterable[int]) -> None:
        """Use blocks one after the other: read cached ones, insert the others."""
        for block in blocks:
            self._use(block)


class Fifo(Policy):
    """First in, first out: evicts the block that was inserted first.

    Args:
        capacity: Number of blocks.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: Blocks = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def _use(self, block: int) -> None:
        if block not in self._blocks:
            if len(self._blocks) == self._capacity:
                self._blocks.popitem(last=False)
            self._blocks[block] = None


class Ranked(Policy):
    """Evicts the block with the smallest rank, even if it was just used.

    Args:
        capacity: Number of blocks.
        rank: Function of a block that is used and the number of this use, counted from 0 over all blocks.
    """

    def __init__(self, capacity: int, rank: Callable[[int, int], tuple[float, int]]) -> None:
        self._capacity = capacity
        self._rank = rank
        self._ranks: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], int]] = []  # with outdated ranks
        self._num_uses = 0

    def __contains__(self, block: object) -> bool:
        return block in self._ranks

    def _use(self, block: int) -> None:
        self._ranks[block] = rank = self._rank(block, self._num_uses)
        self._num_uses += 1
        heappush(self._heap, (rank, block))

    def use(self, blocks: Iterable[int]) -> None:
        """Use blocks, as ``Policy.use``; evicts after all blocks of the request have been used."""
        super().use(blocks)
        while len(self._ranks) > self._capacity:
            rank, last = heappop(self._heap)
            if self._ranks.get(last) == rank:
                del self._ranks[last]


def lfu(capacity: int) -> Ranked:
    """Least frequently used; of several, the least recently used."""
    counts: Counter[int] = Counter()

    def rank(block: int, number: int) -> tuple[float, int]:
        counts[block] += 1
        return counts[block], number

    return Ranked(capacity, rank)


def optimum(capacity: int, requests: Iterable[Request]) -> Ranked:
    """Optimum (Belady 1966): evicts the block whose next use is farthest, given all requests."""
    later: dict[int, list[int]] = {}
    for number, request in enumerate(requests):
        for block in request.hash_ids:
            later.setdefault(block, []).append(number)
    for numbers in later.values():
        numbers.reverse()

    def rank(block: int, number: int) -> tuple[float, int]:
        numbers = later[block]
        numbers.pop()
        return (-numbers[-1] if numbers else -inf), number

    return Ranked(capacity, rank)


class Slru(Policy):
    """Segmented LRU: blocks that were used again are protected from those that were not (Karedla 1994).

    Args:
        capacity: Number of blocks, of which four fifths may be protected.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_protected = capacity * 4 // 5
        self._new: Blocks = OrderedDict()
        self._protected: Blocks = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._new or block in self._protected

    def _use(self, block: int) -> None:
        if block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._new and self._num_protected:
            del self._new[block]
            self._protected[block] = None
            if len(self._protected) > self._num_protected:
                self._new[self._protected.popitem(last=False)[0]] = None
        else:
            self._new[block] = None
            self._new.move_to_end(block)
            if len(self._new) + len(self._protected) > self._capacity:
                self.evict()

    @property
    def next(self) -> int:
        """Block to evict next."""
        return next(iter(self._new or self._protected))

    def evict(self) -> int:
        """Evict a block, and return it."""
        return (self._new or self._protected).popitem(last=False)[0]


class Arc(Policy):
    """Adaptive replacement cache (Megiddo 2003): adapts the share of blocks that were used once.

    Args:
        capacity: Number of blocks.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # number of blocks used once
        self._once: Blocks = OrderedDict()
        self._often: Blocks = OrderedDict()
        self._once_gone: Blocks = OrderedDict()
        self._often_gone: Blocks = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._once or block in self._often

    def _use(self, block: int) -> None:
        once, often, once_gone, often_gone = self._once, self._often, self._once_gone, self._often_gone
        if block in once:
            del once[block]
            often[block] = None
        elif block in often:
            often.move_to_end(block)
        elif block in once_gone:
            self._target = min(self._capacity, self._target + max(1.0, len(often_gone) / len(once_gone)))
            self._evict(False)
            del once_gone[block]
            often[block] = None
        elif block in often_gone:
            self._target = max(0.0, self._target - max(1.0, len(once_gone) / len(often_gone)))
            self._evict(True)
            del often_gone[block]
            often[block] = None
        else:
            if len(once) + len(once_gone) == self._capacity:
                if len(once) < self._capacity:
                    once_gone.popitem(last=False)
                    self._evict(False)
                else:
                    once.popitem(last=False)
            elif len(once) + len(often) + len(once_gone) + len(often_gone) >= self._capacity:
                if len(once) + len(often) + len(once_gone) + len(often_gone) == 2 * self._capacity:
                    often_gone.popitem(last=False)
                self._evict(False)
            once[block] = None

    def _evict(self, is_gone_of_often: bool) -> None:
        if len(self._once) + len(self._often) < self._capacity:
            return
        count = len(self._once)
        if count and (
            count > self._target or (is_gone_of_often and count == self._target) or not self._often
        ):
            self._once_gone[self._once.popitem(last=False)[0]] = None
        else:
            self._often_gone[self._often.popitem(last=False)[0]] = None


class S3Fifo(Policy):
    """S3-FIFO (Yang 2023): new blocks pass a small queue, and stay only if they were used again.

    Args:
        capacity: Number of blocks, of which a tenth are new ones.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_small = max(1, capacity // 10)
        self._small: Blocks = OrderedDict()
        self._main: Blocks = OrderedDict()
        self._gone: Blocks = OrderedDict()
        self._counts: dict[int, int] = {}  # uses of a block since its insertion, at most 3

    def __contains__(self, block: object) -> bool:
        return block in self._counts

    def _use(self, block: int) -> None:
        if block in self._counts:
            self._counts[block] = min(3, self._counts[block] + 1)
            return
        while len(self._counts) >= self._capacity:
            self._evict()
        if block in self._gone:
            del self._gone[block]
            self._main[block] = None
        else:
            self._small[block] = None
        self._counts[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._num_small or not self._main:
            block, _ = self._small.popitem(last=False)
            if self._counts[block] > 1:
                self._counts[block] = 0
                self._main[block] = None
                return
            self._gone[block] = None
            if len(self._gone) > self._capacity - self._num_small:
                self._gone.popitem(last=False)
        else:
            block, _ = self._main.popitem(last=False)
            if self._counts[block]:
                self._counts[block] -= 1
                self._main[block] = None
                return
        del self._counts[block]


class WTinyLfu(Policy):
    """W-TinyLFU (Einziger 2017): a small LRU, then a segmented one, entered by replacing a less used block.

    Uses are counted exactly, and halved after ten times the number of blocks.

    Args:
        capacity: Number of blocks, of which a hundredth are in the small LRU.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_window = max(1, capacity // 100)
        self._window: Blocks = OrderedDict()
        self._main = Slru(capacity - self._num_window)
        self._num_main = 0
        self._counts: Counter[int] = Counter()
        self._num_uses = 0

    def __contains__(self, block: object) -> bool:
        return block in self._window or block in self._main

    def _use(self, block: int) -> None:
        self._counts[block] += 1
        self._num_uses += 1
        if self._num_uses == 10 * self._capacity:
            self._num_uses = 0
            self._counts = Counter({x: n // 2 for x, n in self._counts.items() if n > 1})
        if block in self._main:
            self._main._use(block)
            return
        self._window[block] = None
        self._window.move_to_end(block)
        if len(self._window) > self._num_window:
            self._admit(self._window.popitem(last=False)[0])

    def _admit(self, block: int) -> None:
        if self._num_main < self._capacity - self._num_window:
            self._num_main += 1
        elif not self._num_main or self._counts[block] <= self._counts[self._main.next]:
            return
        else:
            self._main.evict()
        self._main._use(block)


GENERAL: Final[dict[str, Callable[[int], Policy]]] = {
    "fifo": Fifo,
    "lfu": lfu,
    "slru": Slru,
    "arc": Arc,
    "s3-fifo": S3Fifo,
    "w-tinylfu": WTinyLfu,
}
"""Policies that need only a capacity in blocks, by name."""
