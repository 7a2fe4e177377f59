"""``Costs``: seconds of steps by their number of tokens, as measured."""

from typing import Final

_FADING: Final = 0.97
"""Weight of earlier steps, relative to the step after them."""
_SLOWER: Final = 4.0
"""Largest time of a step that counts, as a multiple of the expected one; others were interrupted."""
_FREE: Final = 15.0
"""Number of tokens that are believed to take as long as what does not depend on tokens."""
_DOUBT: Final = 0.5
"""Weight of this belief, as a variance of the numbers of tokens."""


class Costs:
    """A line through the times of recent steps, ``fixed + token * n`` for n tokens; 0 before the first."""

    def __init__(self) -> None:
        self._count = self._tokens = self._seconds = self._squares = self._products = 0.0
        self.fixed = self.token = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Add a step, after which ``fixed`` and ``token`` are renewed."""
        if self._count > 1:
            seconds = min(seconds, _SLOWER * (self.fixed + self.token * num_tokens))
        self._count = self._count * _FADING + 1
        self._tokens = self._tokens * _FADING + num_tokens
        self._seconds = self._seconds * _FADING + seconds
        self._squares = self._squares * _FADING + num_tokens * num_tokens
        self._products = self._products * _FADING + num_tokens * seconds
        tokens, mean = self._tokens / self._count, self._seconds / self._count
        believed = mean / (tokens + _FREE)
        spread = max(self._squares / self._count - tokens * tokens, 0.0)
        common = self._products / self._count - tokens * mean
        slope = (common + _DOUBT * believed) / (spread + _DOUBT)
        self.token = min(max(slope, believed / _FREE), mean / tokens)
        self.fixed = mean - self.token * tokens
