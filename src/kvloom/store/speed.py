"""Speed of a store, estimated from its last requests."""

import math
import statistics
import threading
import time
from collections import deque
from typing import Final

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
