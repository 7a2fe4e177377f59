"""``Account``: whether the assistant saves more time than it takes."""

from typing import Final

_STEPS: Final = 32
"""Number of steps with drafts after which what they saved is compared with what they took."""
_READING: Final = 1 / 8
"""Weight of a step in which texts were only read, since this takes a fraction of a step."""
_PAUSE: Final = 64
"""Number of steps of the first pause; each next one is twice as long, until drafts pay again."""
_IDLE: Final = 64
"""Number of steps in which no draft seemed to pay after which this is tried again; then twice as many."""


class Account:
    """Seconds that an assistant saved and took; when it took more, it is not asked for a while.

    Pauses double, so that an assistant that never pays takes a share of the time that vanishes.
    """

    def __init__(self) -> None:
        self._saved = self._taken = self._steps = 0.0
        self._left, self._next = 0, _PAUSE
        self._idle, self._next_idle = 0, _IDLE

    def is_open(self) -> bool:
        """Whether the assistant may be asked in the next step; to be called once for each step."""
        self._left = max(self._left - 1, 0)
        return self._left == 0

    def is_to_be_measured(self) -> bool:
        """Whether to forget what drafts seem to take; for each step in which none seems to pay."""
        self._idle += 1
        if self._idle < self._next_idle:
            return False
        self._idle, self._next_idle = 0, 2 * self._next_idle
        return True

    def note(self, saved: float, taken: float, has_drafted: bool) -> None:
        """Add a step.

        Args:
            saved: Seconds that the tokens of its drafts would have taken.
            taken: Seconds that the assistant, and verifying its drafts, took.
            has_drafted: Whether there were drafts; else texts were only read.
        """
        self._saved, self._taken = self._saved + saved, self._taken + taken
        self._steps += 1.0 if has_drafted else _READING
        if self._steps < _STEPS:
            return
        if self._saved < self._taken:
            self._left, self._next = self._next, 2 * self._next
        else:
            self._next, self._next_idle = _PAUSE, _IDLE
        self._saved = self._taken = self._steps = 0.0
