"""Time to wait for a store instead of computing a prefix."""

import math
import time
from typing import Final

_SHARE: Final = 0.025
"""Share of the computing time to wait for a store that may have nothing."""
_GLANCE: Final = 0.1
"""Share of that time for a listing, which is unlikely to have something new."""
_UNNOTICED: Final = 0.02
"""Seconds of waiting that are negligible."""
_MARGIN: Final = 2.0
"""Factor by which reading may exceed its last times, and must be faster than computing."""


class Patience:
    """Time limits of one look-up, from now on.

    Args:
        seconds_per_token: Time to compute a token; ``None`` if unknown.
        num_tokens: Number of tokens that would be computed.
        max_wait: Maximum seconds; ``None`` to weigh reading against computing, or for no limit if the
            computing time is unknown.
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
        """Seconds left for a request that may give nothing; ``None`` for no limit."""
        return _until(self._deadline)

    @property
    def glance(self) -> float | None:
        """Seconds left for a listing; ``None`` for no limit."""
        return _until(self._glance_deadline)

    def pays(self, num_tokens: int, seconds: float) -> bool:
        """Whether to read tokens instead of computing them, if reading takes ``seconds``."""
        return _MARGIN * seconds < max(self._seconds_per_token * num_tokens, _UNNOTICED)

    def wait(self, num_tokens: int, seconds: float, is_known: bool) -> float | None:
        """Seconds to wait for tokens that are read; ``None`` for no limit.

        Args:
            num_tokens: Number of tokens to read.
            seconds: Expected time.
            is_known: Whether that time was measured.
        """
        left = self.left
        if left is None or self._is_bounded or not is_known:
            return left
        return max(left, min(_MARGIN * seconds, self._seconds_per_token * num_tokens))


def _until(deadline: float) -> float | None:
    return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
