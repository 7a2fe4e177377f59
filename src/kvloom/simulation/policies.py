"""General caches, of blocks that know nothing of each other: what pool and tree are compared with."""

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import Final, TypeAlias

from kvloom.simulation.trace import Request

Blocks: TypeAlias = "OrderedDict[int, None]"
"""A queue from which any block can be taken; first comes the one that came first."""


class Policy(ABC):
    """A cache of so many blocks, which decides by itself which of them it evicts."""

    @abstractmethod
    def __contains__(self, block: object) -> bool:
        """Whether a block is there."""

    @abstractmethod
    def _use(self, block: int) -> None: ...

    def use(self, blocks: Iterable[int]) -> None:
        """Read the blocks that are there, and put the others there, one after the other."""
        for block in blocks:
            self._use(block)


class Fifo(Policy):
    """Evicts the block that came first.

    Args:
        capacity: Blocks.
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
    """Evicts the block of the smallest rank, be it one that was just used.

    Args:
        capacity: Blocks.
        rank: Of a block that is used, and the number of that use of any block, from 0.
    """

    def __init__(self, capacity: int, rank: Callable[[int, int], tuple[float, int]]) -> None:
        self._capacity = capacity
        self._rank = rank
        self._ranks: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], int]] = []  # with ranks that blocks have no more
        self._num_uses = 0

    def __contains__(self, block: object) -> bool:
        return block in self._ranks

    def _use(self, block: int) -> None:
        self._ranks[block] = rank = self._rank(block, self._num_uses)
        self._num_uses += 1
        heappush(self._heap, (rank, block))

    def use(self, blocks: Iterable[int]) -> None:
        """The same as ``Policy.use``; blocks are evicted once all of the request's have been used."""
        super().use(blocks)
        while len(self._ranks) > self._capacity:
            rank, last = heappop(self._heap)
            if self._ranks.get(last) == rank:
                del self._ranks[last]


def lfu(capacity: int) -> Ranked:
    """Evicts the block that was used least often; of several, the one that was not used for longest."""
    counts: Counter[int] = Counter()

    def rank(block: int, number: int) -> tuple[float, int]:
        counts[block] += 1
        return counts[block], number

    return Ranked(capacity, rank)


def optimum(capacity: int, requests: Iterable[Request]) -> Ranked:
    """Evicts the block whose next use is farthest (Belady 1966), which takes knowing the requests to come."""
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
        capacity: Blocks, of which four fifths may be protected.
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
        """The block to evict next."""
        return next(iter(self._new or self._protected))

    def evict(self) -> int:
        """Evict it, and return it."""
        return (self._new or self._protected).popitem(last=False)[0]


class Arc(Policy):
    """Adaptive replacement: as many blocks used once as those that it just evicted ask for (Megiddo 2003).

    Args:
        capacity: Blocks.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # of blocks used once
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
    """Three queues: new blocks pass a small one first, and stay if they were used again (Yang 2023).

    Args:
        capacity: Blocks, of which a tenth are new ones.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_small = max(1, capacity // 10)
        self._small: Blocks = OrderedDict()
        self._main: Blocks = OrderedDict()
        self._gone: Blocks = OrderedDict()
        self._counts: dict[int, int] = {}  # uses since a block came, at most 3

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
    """A small LRU before a segmented one, which a block enters if it is used more often than who goes for it.

    Einziger 2017. Uses are counted exactly, and halved after ten times as many as there are blocks.

    Args:
        capacity: Blocks, of which a hundredth are in the LRU.
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
"""By name, those that need to know no more than a capacity in blocks."""
