"""Pages of a session: allocated when needed, and tried again later if memory was refused."""

from collections.abc import Sequence
from time import monotonic
from typing import Final

from kvloom.caches import CacheFormat, Pages
from kvloom.caches.rows.pages import enlarged
from kvloom.errors import OutOfPages
from kvloom.paging import Growth

_FIRST: Final = 64
"""Least number of pages to allocate at once."""
_PAUSE_SECONDS: Final = 1.0
"""Pause after a refusal, since an attempt may copy all tokens before it fails."""


class GrowingPages(Pages):
    """Pages that grow before findable pages are evicted, up to ``format.max_tokens``.

    After memory was refused, no more is asked for during one second, or until ``ask_again``.

    Args:
        format: Format of the tokens, with ``max_tokens``.
        policy: Eviction policy, as of ``Pages``.

    Attributes:
        max_pages: Largest number of pages; a refusal does not change it.
        limit: Present limit of pages: ``max_pages``, or after a refusal the number of allocated pages.
    """

    def __init__(self, format: CacheFormat, policy: str = "lru") -> None:
        super().__init__(format, policy=policy)
        self.limit = self.max_pages = format.max_pages or 0
        self._next_attempt, self._has_skipped = 0.0, False

    @property
    def num_room(self) -> int:
        """Number of pages that can still be taken."""
        return self.limit - self.pool.num_active

    def make_room(self, num_pages: int) -> None:
        """Allocate for ``num_pages`` before findable pages are evicted: as ``Pages`` grows, or just these.

        Pages before their window are evicted before memory is allocated.
        """
        have, short = self.pool.num_pages, num_pages - self.num_spare
        room = self.max_pages - have
        if short <= 0 or room <= 0:
            return
        if monotonic() < self._next_attempt:
            self._has_skipped = True
            return
        more = enlarged(self.pool, self.format.page_size, short) - have
        for count in dict.fromkeys((min(room, max(more, _FIRST)), min(room, short))):
            try:
                self._grow(have + count, 1)
            except (MemoryError, RuntimeError):
                continue
            self.limit, self._next_attempt, self._has_skipped = self.max_pages, 0.0, False
            return
        self.limit, self._next_attempt = have, monotonic() + _PAUSE_SECONDS
        self._has_skipped = False

    def ask_again(self) -> bool:
        """Let the next ``make_room`` ask for memory; whether one has skipped it since the last refusal."""
        self._next_attempt = 0.0
        return self._has_skipped

    def _num_pages_for(self, growth: Growth, num_tokens: Sequence[int]) -> int:
        self.make_room(growth.num_pages)
        if growth.num_pages > self.num_room:
            raise OutOfPages(f"{growth.num_pages} more pages are needed, and {self.num_room} can be taken")
        return self.pool.num_pages
