"""The log of a server, which clients cannot fill: repeated messages are counted."""

import logging
from typing import Final

SECONDS: Final = 60.0
"""Time for which a message from one place in the code is not repeated."""


class Counted(logging.Filter):
    """Filter that passes the first message of each place in the code, and then one every ``SECONDS``.

    A message that passes has the number of messages that were left out before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """As ``logging.Filter.filter``, by the time of the record."""
        place = record.pathname, record.lineno
        shown, count = self._last.get(place, (-SECONDS, 0))
        if record.created - shown < SECONDS:
            self._last[place] = shown, count + 1
            return False
        self._last[place] = record.created, 0
        if count:
            record.msg = f"{record.getMessage()} ({count:,} more since the last line like this)"
            record.args = ()
        return True


_COUNTED: Final = Counted()


def count_repeats() -> None:
    """Add the filter to the loggers of uvicorn, asyncio and transformers that requests can trigger."""
    for name in ("uvicorn.error", "asyncio", "ContinuousBatchingLogger"):
        logging.getLogger(name).addFilter(_COUNTED)
