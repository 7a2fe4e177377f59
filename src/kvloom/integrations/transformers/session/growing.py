"""Growth of a session's pages: allocated when needed, and tried again later if memory was refused."""

from time import monotonic
from typing import Final

from kvloom.caches import Pages

_FIRST: Final = 64
"""Least number of pages to allocate at once."""
_PAUSE_SECONDS: Final = 1.0
"""Pause after a refusal, since an attempt may copy all tokens before it fails."""


class GrowingPages:
    """Number of pages of a session, and their growth.

    After memory was refused, no more is asked for during one second, or until ``ask_again``. ``max_pages``
    is unchanged by a refusal.

    Args:
        pages: Pages in one extent.
        max_pages: Largest number of pages.
    """

    def __init__(self, pages: Pages, max_pages: int) -> None:
        self.max_pages = max_pages
        self.limit = max_pages
        """Present limit of pages: ``max_pages``, or after a refusal the number of allocated pages."""
        self._pages = pages
        self._next_attempt = 0.0
        self._has_skipped = False

    @property
    def num_room(self) -> int:
        """Number of pages that can still be taken."""
        pool = self._pages.pool
        return self.limit - pool.num_pages + pool.num_free + pool.num_evictable

    @property
    def free_share(self) -> float:
        """``num_room`` as a share of ``limit``."""
        return self.num_room / max(self.limit, 1)

    def grow(self, num_pages: int) -> None:
        """Allocate for ``num_pages`` before findable pages are evicted: half as many again, or just these.

        Pages before their window are evicted before memory is allocated.
        """
        pool = self._pages.pool
        have, short = pool.num_pages, num_pages - self._pages.num_spare
        room = self.max_pages - have
        if short <= 0 or room <= 0:
            return
        if monotonic() < self._next_attempt:
            self._has_skipped = True
            return
        least = min(room, short)
        more = min(room, max(short, have // 2, _FIRST))
        for count in dict.fromkeys((more, least)):
            try:
                for storage in self._pages.storages.values():
                    storage.reserve(1, have + count)
            except (MemoryError, RuntimeError):
                continue
            pool.grow(count)
            self.limit, self._next_attempt, self._has_skipped = self.max_pages, 0.0, False
            return
        self.limit, self._next_attempt = have, monotonic() + _PAUSE_SECONDS
        self._has_skipped = False

    def ask_again(self) -> bool:
        """Let the next ``grow`` ask for memory; returns whether one has skipped it since the last refusal."""
        self._next_attempt = 0.0
        return self._has_skipped
