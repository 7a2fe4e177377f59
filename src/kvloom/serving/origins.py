"""Which pages in a browser may ask a server, by the origin from which the browser has them."""

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware


def may_ask(scope: Any, allowed: Sequence[str]) -> bool:
    """Whether a request is of no page in a browser, of one of this server, or of an ``allowed`` origin.

    A page of another port of this machine has another origin. Browsers tell the origin in ``Origin``, and
    where they leave that out, in ``Sec-Fetch-Site`` whether it is the server's.

    Args:
        scope: Of ASGI.
        allowed: Origins.
    """
    headers = Headers(scope=scope)
    origins = headers.getlist("origin")
    own = f"{scope['scheme']}://{headers.get('host', '')}".lower()
    if origins and all(origin in allowed for origin in origins):
        return True
    return all(origin.lower() == own for origin in origins) and all(
        site in ("none", "same-origin") for site in headers.getlist("sec-fetch-site")
    )


def readable(app: Any, allowed: Sequence[str]) -> Any:
    """An ASGI application whose answers pages of ``allowed`` origins can read; for all others it is ``app``.

    Their browser asks without a key, before anything else, whether it may, and has an answer.
    """
    if not allowed:
        return app
    shared = CORSMiddleware(
        app, allow_origins=allowed, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"]
    )

    async def choose(scope: Any, receive: Any, send: Any) -> None:
        asks = scope["type"] == "http" and Headers(scope=scope).get("origin") in allowed
        await (shared if asks else app)(scope, receive, send)

    return choose
