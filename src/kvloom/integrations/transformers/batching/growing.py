"""Pages are allocated when they are needed; memory that is refused is asked for again later."""

from time import monotonic
from typing import Final

from kvloom.caches import Pages

_FIRST: Final = 64
"""Pages to begin with."""
_PAUSE_SECONDS: Final = 1.0
"""That nothing is asked for after a refusal: an attempt may copy all tokens before it fails."""


class GrowingPages:
    """How many pages a session has, and how they become more.

    A refusal holds for a second, or until ``ask_again``: until then what there is must do. The capacity stays
    what it was.

    Args:
        pages: In one extent.
        max_pages: That there can be.
    """

    def __init__(self, pages: Pages, max_pages: int) -> None:
        self.max_pages = max_pages
        self.limit = max_pages
        """Pages that there can be now: those that there are, once more were refused."""
        self._pages = pages
        self._next_attempt = 0.0
        self._has_skipped = False

    @property
    def num_room(self) -> int:
        """Pages that can still be taken."""
        pool = self._pages.pool
        return self.limit - pool.num_pages + pool.num_free + pool.num_evictable

    @property
    def free_share(self) -> float:
        """``num_room`` as a share of all pages that there can be now."""
        return self.num_room / max(self.limit, 1)

    def grow(self, num_pages: int) -> None:
        """Allocate before anything that can be found is given up: by half, or just ``num_pages``.

        What a window has passed is given up before.
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
        """Let the next ``grow`` ask for memory; returns whether one has not asked since the last refusal."""
        self._next_attempt = 0.0
        return self._has_skipped
