"""How long whoever could compute a prefix waits for a store."""

import math
import time
from typing import Final

_SHARE: Final = 0.025
"""Of what computing takes, for which a store may let wait that gives nothing."""
_GLANCE: Final = 0.1
"""Of what computing takes, for which a store may be listed: that the list has something new is not likely."""
_UNNOTICED: Final = 0.02
"""Seconds that count as none."""
_MARGIN: Final = 2.0
"""By which reading may take longer than it did of late, and must be quicker than computing."""


class Patience:
    """The wait of one lookup, from now on.

    Args:
        seconds_per_token: How long computing takes; ``None`` if nobody knows.
        num_tokens: That would be computed.
        max_wait: Seconds at most; ``None`` to weigh reading against computing, or to wait for ever where
            nobody knows what computing takes.
    """

    def __init__(self, seconds_per_token: float | None, num_tokens: int, max_wait: float | None) -> None:
        self._seconds_per_token = math.inf if seconds_per_token is None else seconds_per_token
        self._is_bounded = max_wait is not None
        if max_wait is None:
            max_wait = max(_SHARE * self._seconds_per_token * num_tokens, _UNNOTICED)
        glance = (
            max_wait if self._is_bounded else min(max_wait, _GLANCE * self._seconds_per_token * num_tokens)
        )
        self._deadline, self._glance_deadline = (time.monotonic() + x for x in (max_wait, glance))

    @property
    def left(self) -> float | None:
        """Seconds for what may give nothing; ``None`` for ever."""
        return _until(self._deadline)

    @property
    def glance(self) -> float | None:
        """Seconds for a listing; ``None`` for ever."""
        return _until(self._glance_deadline)

    def pays(self, num_tokens: int, seconds: float) -> bool:
        """Whether to read tokens rather than to compute them, if that takes so long."""
        return _MARGIN * seconds < max(self._seconds_per_token * num_tokens, _UNNOTICED)

    def wait(self, num_tokens: int, seconds: float, is_known: bool) -> float | None:
        """Seconds to wait for tokens that are read; ``None`` for ever.

        Args:
            num_tokens: That are read.
            seconds: How long that takes.
            is_known: Whether it was measured.
        """
        left = self.left
        if left is None or self._is_bounded or not is_known:
            return left
        return max(left, min(_MARGIN * seconds, self._seconds_per_token * num_tokens))


def _until(deadline: float) -> float | None:
    return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
