"""How long a store takes, by its last requests."""

import math
import statistics
import threading
import time
from collections import deque
from typing import Final

_SMALL: Final = 64 << 10
"""Bytes up to which a request takes as long as any."""
_KEPT: Final = 7
_FASTEST: Final = 1e-9
"""Seconds for a byte where nothing larger was read yet."""
_AGAIN: Final = 10.0
"""A store that is too slow is tried again after so many times what it takes, and at least so many tenths."""


class Speed:
    """Medians, so that one slow request does not count. Thread-safe."""

    def __init__(self) -> None:
        self._latencies: deque[float] = deque(maxlen=_KEPT)
        self._rates: deque[float] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._measured = -math.inf

    def note(self, seconds: float, nbytes: int) -> None:
        """Learn from a request that was answered, or waited for so long."""
        with self._lock:
            self._measured = time.monotonic()
            if nbytes <= _SMALL:
                self._latencies.append(seconds)
            else:
                latency = statistics.median(self._latencies) if self._latencies else 0.0
                self._rates.append(max(seconds - latency, 0.0) / nbytes)

    @property
    def seconds_per_byte(self) -> float | None:
        """Beyond the time of any request; ``None`` before something larger was read."""
        with self._lock:
            return statistics.median(self._rates) if self._rates else None

    @property
    def latency(self) -> float | None:
        """Seconds of a small request; ``None`` before the first."""
        with self._lock:
            return statistics.median(self._latencies) if self._latencies else None

    def seconds(self, nbytes: int, num_rounds: int) -> float:
        """How long reading takes.

        Args:
            nbytes: Of all requests.
            num_rounds: Requests one after the other.
        """
        rate = self.seconds_per_byte
        return (self.latency or 0.0) * num_rounds + nbytes * (_FASTEST if rate is None else rate)

    def is_known(self, nbytes: int) -> bool:
        """Whether a request of about so many bytes was measured."""
        return bool(self._rates or (nbytes <= _SMALL and self._latencies))

    def is_due(self, seconds: float) -> bool:
        """Whether to measure again what is thought to take so long."""
        return time.monotonic() - self._measured >= _AGAIN * max(seconds, 0.1)
