"""``/dashboard``: a page that shows a running session, and the state that it draws."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from kvloom.graphics.html import read_page
from kvloom.serving.endpoints.models import Model

HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
"""Headers of the page, which let it load nothing, and connect to this server alone."""

_SECRET: Final = secrets.token_bytes(16)


def page() -> str:
    """The page as HTML."""
    return read_page("kvloom.serving.endpoints", "dashboard.html")


def state_of(model: Model, models: Sequence[Model]) -> dict[str, Any]:
    """The state that the page draws: counts, and the pages of each request, without texts, tokens and salts.

    Args:
        model: Model to be shown.
        models: All models of the server.

    Returns:
        JSON: ``model`` and ``models``, as names; ``kv``; ``alive``; ``generated``, a number of tokens;
        ``report``, a ``BatchReport``; ``pages``, one letter for each (free, active, shared, kept by the
        session of an agent, evictable); and ``requests``, each with its ``id``, its ``group``, which is the
        same for the same salt, its ``pages``, and ``runs`` as in ``runs_of``.
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
    """Spans of a request's pages by the reason why they were found or computed.

    Args:
        num_prompt: Number of tokens of its prompt.
        num_found: Number of prompt tokens that were found.
        num_tokens: Number of tokens that have a slot.
        page_size: Tokens in a page.

    Returns:
        Kind, first token and end of each span, in order: ``"found"``; ``"unknown"``, the first page that was
        not found; ``"behind"``, pages after it; ``"last"``, a full page with the last token of the prompt,
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
