"""Checks of the origin of a request from a browser."""

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware


def may_ask(scope: Any, allowed: Sequence[str]) -> bool:
    """Whether a request comes from no web page, from a page of this server, or from an ``allowed`` origin.

    A page of another port of this machine has another origin. Browsers send the origin in ``Origin``. If they
    leave it out, ``Sec-Fetch-Site`` tells whether it is the server's.

    Args:
        scope: ASGI scope.
        allowed: Allowed origins.
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
    """ASGI application whose responses pages of ``allowed`` origins can read (CORS); else as ``app``.

    It also answers the preflight requests of their browsers, which have no key.
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
