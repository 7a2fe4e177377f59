"""How long a store takes, by its last requests, and how long to wait for it instead of computing a prefix."""

import math
import statistics
import threading
import time
from collections import deque
from typing import Final

_SHARE: Final = 0.025
"""Share of the computing time to wait for a store that may have nothing."""
_GLANCE: Final = 0.1
"""Share of that time for a listing, which is unlikely to have something new."""
_UNNOTICED: Final = 0.02
"""Seconds of waiting that are negligible."""
_MARGIN: Final = 2.0
"""Factor by which reading may exceed its last times, and must be faster than computing."""
_SMALL: Final = 64 << 10
"""Bytes up to which the time of a request does not depend on its size."""
_KEPT: Final = 7
_FASTEST: Final = 1e-9
"""Seconds for a byte before anything larger was read."""
_AGAIN: Final = 10.0
"""Multiple of its time, at least 0.1 s, after which a slow store is tried again."""


class Speed:
    """Medians of times, so that one slow request does not matter. Thread-safe."""

    def __init__(self) -> None:
        self._latencies: deque[float] = deque(maxlen=_KEPT)
        self._rates: deque[float] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._measured = -math.inf

    def note(self, seconds: float, nbytes: int) -> None:
        """Record the time of a request, or how long it was waited for."""
        with self._lock:
            self._measured = time.monotonic()
            if nbytes <= _SMALL:
                self._latencies.append(seconds)
            else:
                latency = statistics.median(self._latencies) if self._latencies else 0.0
                self._rates.append(max(seconds - latency, 0.0) / nbytes)

    @property
    def seconds_per_byte(self) -> float | None:
        """Seconds for a byte beyond the latency; ``None`` before anything larger was read."""
        with self._lock:
            return statistics.median(self._rates) if self._rates else None

    @property
    def latency(self) -> float | None:
        """Seconds of a small request; ``None`` before the first."""
        with self._lock:
            return statistics.median(self._latencies) if self._latencies else None

    def seconds(self, nbytes: int, num_rounds: int) -> float:
        """Expected seconds of reading.

        Args:
            nbytes: Bytes of all requests.
            num_rounds: Number of consecutive requests.
        """
        rate = self.seconds_per_byte
        return (self.latency or 0.0) * num_rounds + nbytes * (_FASTEST if rate is None else rate)

    def is_known(self, nbytes: int) -> bool:
        """Whether a request of about ``nbytes`` was measured."""
        return bool(self._rates or (nbytes <= _SMALL and self._latencies))

    def is_due(self, seconds: float) -> bool:
        """Whether to measure again a request that is expected to take ``seconds``."""
        return time.monotonic() - self._measured >= _AGAIN * max(seconds, 0.1)


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
