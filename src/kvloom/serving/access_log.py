"""A line of the log for each request: what was asked by its path, what came of it, and never what it said."""

import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvloom.serving.answers import Answers

ENTRY: Final = "kvloom.entry"
"""Where the scope of a request has its ``Entry``."""

_LOG: Final = logging.getLogger("kvloom.access")
_MOST_CHARACTERS: Final = 100
"""Of a path; whoever has no key can ask for any."""


@dataclass(slots=True)
class Entry:
    """What is told of a request when it has ended.

    Attributes:
        status: Of the answer; ``None`` if there was none.
        answers: To its prompt; ``None`` if it had none that could be answered.
    """

    status: int | None = None
    answers: "Answers | None" = None


def logged(app: Any) -> Any:
    """An ASGI application each of whose requests is a line on standard error when it has ended.

    It has the time, the method, the path, the status, milliseconds from the headers to the last byte, and
    where a prompt was answered its tokens, those of them that were found, and the new ones. A query, headers,
    and what is said are left out.
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
        entry, began = Entry(), time.perf_counter()

        async def seen(message: Any) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await app({**scope, ENTRY: entry}, receive, seen)
        finally:
            _LOG.info(_line(scope, entry, 1000 * (time.perf_counter() - began)))

    return logging_app


def _line(scope: Any, entry: Entry, milliseconds: float) -> str:
    method, path = (ascii(text)[1:-1] for text in (scope["method"][:20], scope["path"][:_MOST_CHARACTERS]))
    text = f"{method} {path} {entry.status or '-'} {milliseconds:.1f} ms"
    if entry.answers is None:
        return text
    answers = entry.answers
    return f"{text} prompt={answers.num_asked} found={answers.num_found} new={answers.num_new}"
