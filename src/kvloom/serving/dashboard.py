"""``/dashboard``: a page that shows a session while it runs, and the state that it draws."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from kvloom.graphics.html import read_page
from kvloom.serving.models import Model

HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
"""Of the page: it loads nothing, and talks to this server alone."""

_SECRET: Final = secrets.token_bytes(16)


def page() -> str:
    """The page, in HTML."""
    return read_page("kvloom.serving", "dashboard.html")


def state_of(model: Model, models: Sequence[Model]) -> dict[str, Any]:
    """The state that the page draws: counts, and the pages of each request. No text, no tokens, no salts.

    Args:
        model: Whose.
        models: All of the server.

    Returns:
        JSON: ``model``, and ``models``, by their names; ``kv``, ``alive``; ``generated`` tokens; ``report``,
        a ``BatchReport``; ``pages``, one letter for each (free, active, shared, kept by the session of an
        agent, evictable); and ``requests``, each with its ``id``, its ``group``, which those of one salt have
        in common, its ``pages``, and ``runs`` as of ``runs_of``.
    """
    session = model.session
    found = session.manager.page_map()
    report = session.report()
    return {
        "model": model.name,
        "models": [other.name for other in models],
        "kv": report.kv,
        "alive": session.alive,
        "generated": session.num_new,
        "report": asdict(report),
        "pages": "".join(state[0] for state in found.states),
        "requests": [
            {
                "id": x.request_id,
                "group": _group_of(x.salt),
                "pages": x.pages,
                "runs": runs_of(x.num_prompt, x.num_found, x.num_tokens, report.page_size),
            }
            for x in found.requests
        ],
    }


def _group_of(salt: str) -> str:
    return hashlib.blake2b(salt.encode(), key=_SECRET, digest_size=2).hexdigest()


def runs_of(num_prompt: int, num_found: int, num_tokens: int, page_size: int) -> list[tuple[str, int, int]]:
    """Why each page of a request was found or computed.

    Args:
        num_prompt: Tokens of its prompt.
        num_found: Those of them that were found.
        num_tokens: Tokens that have their place.
        page_size: Tokens in a page.

    Returns:
        Kind, first token and end of each run, in order: ``"found"``; ``"unknown"``, the first page that
        nobody left behind; ``"behind"`` it; ``"last"``, a full page with the last token of the prompt,
        which is always computed; ``"partial"``, a page that the prompt does not fill; ``"new"`` tokens.
    """
    tail = (num_prompt - 1) // page_size * page_size
    ends = [
        ("found", num_found),
        ("unknown", min(num_found + page_size, tail)),
        ("behind", tail),
        ("last" if num_prompt - tail == page_size else "partial", num_prompt),
        ("new", num_tokens),
    ]
    runs, start = [], 0
    for kind, end in ends:
        end = min(end, num_tokens)
        if end > start:
            runs.append((kind, start, end))
            start = end
    return runs
