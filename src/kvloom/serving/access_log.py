"""Access log: one line for each request with path, status, time and token counts, but no text."""

import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvloom.serving.answering.answers import Answers

ENTRY: Final = "kvloom.entry"
"""Key of a request's ``LogEntry`` in its ASGI scope."""

_LOG: Final = logging.getLogger("kvloom.access")
_MOST_CHARACTERS: Final = 100
"""Largest number of characters of a path in the log, since clients without a key can send any path."""


@dataclass(slots=True)
class LogEntry:
    """Facts about a request for its line of the log.

    Attributes:
        status: Status of the response; ``None`` if there was none.
        answers: Answers to its prompts; ``None`` if none began.
    """

    status: int | None = None
    answers: "Answers | None" = None


def logged(app: Any) -> Any:
    """ASGI application that writes a line on standard error at the end of each request.

    The line has the time, method, path, status, and milliseconds from the headers to the last byte. If a
    prompt was answered, it has the numbers of prompt tokens, found tokens and new tokens. Queries, headers
    and texts are left out.
    """
    if not _LOG.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        _LOG.addHandler(handler)
        _LOG.setLevel(logging.INFO)
        _LOG.propagate = False

    async def logging_app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        entry, began = LogEntry(), time.perf_counter()

        async def seen(message: Any) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await app({**scope, ENTRY: entry}, receive, seen)
        finally:
            _LOG.info(_line(scope, entry, 1000 * (time.perf_counter() - began)))

    return logging_app


def _line(scope: Any, entry: LogEntry, milliseconds: float) -> str:
    method, path = (ascii(text)[1:-1] for text in (scope["method"][:20], scope["path"][:_MOST_CHARACTERS]))
    text = f"{method} {path} {entry.status or '-'} {milliseconds:.1f} ms"
    if entry.answers is None:
        return text
    answers = entry.answers
    return f"{text} prompt={answers.num_asked} found={answers.num_found} new={answers.num_new}"
