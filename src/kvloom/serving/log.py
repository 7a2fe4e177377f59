"""The log of a server, which nobody can fill: what repeats is counted."""

import logging
from typing import Final

SECONDS: Final = 60.0
"""For which a message of one place in the code is not repeated."""


class Counted(logging.Filter):
    """Lets the first message of each place in the code through, and another every ``SECONDS``.

    It tells how many were left out in the meantime.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """The same as ``logging.Filter.filter``; the time is the record's."""
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
    """Whatever requests can make uvicorn, asyncio and transformers log goes through one ``Counted``."""
    for name in ("uvicorn.error", "asyncio", "ContinuousBatchingLogger"):
        logging.getLogger(name).addFilter(_COUNTED)
