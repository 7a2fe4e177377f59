"""Checks before every request: keys, sizes, time, and whether the client is still there."""

import asyncio
import binascii
import hashlib
import hmac
from typing import Any, Final

from starlette.datastructures import Headers

from kvloom.serving.origins import may_ask
from kvloom.serving.replies import error_reply
from kvloom.serving.settings import Settings, is_loopback

TENANT: Final = "kvloom.tenant"
"""Where a request has, in its scope, what its key was hashed to: requests of one key share pages."""

OPEN: Final = "/health"
"""The path that needs no key."""

BROWSED: Final = "/dashboard"
"""The paths that a browser asks for begin so: there a key may be the password of Basic authentication."""

_GRACE_SECONDS: Final = 10.0
"""That a request which takes too long has to say so by itself."""


class Guard:
    """An ASGI application around another.

    It answers 401 without a key, 431 and 413 where something is too large, 408 where it takes too long, and
    400 where the end of a body is told in two ways. When the client goes away, whatever is computed for it is
    cancelled.

    Args:
        app: The other.
        settings: Of the server.
    """

    def __init__(self, app: Any, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, settings = Headers(scope=scope), self._settings
        browsed = scope["path"].startswith(BROWSED)
        tenant = self._tenant(headers, browsed)
        is_ambiguous = _is_ambiguous(scope, headers)
        if is_ambiguous:
            refusal = (
                400,
                "the end of the body must be told by Content-Length or by Transfer-Encoding alone",
            )
        elif sum(len(name) + len(value) for name, value in scope["headers"]) > settings.max_header_bytes:
            refusal = (431, f"headers must be at most {settings.max_header_bytes} bytes")
        elif tenant is None and scope["path"] != OPEN:
            refusal = (401, "a request must have 'Authorization: Bearer KEY' with a key of this server")
        elif not settings.api_keys and not _is_from_here(headers):
            refusal = (403, "without an API key, Host must be a loopback address")
        elif not settings.api_keys and not may_ask(scope, settings.allowed_origins):
            refusal = (
                403,
                "without an API key, no page of another origin may ask: serve --allow-origin ORIGIN",
            )
        else:
            body = await self._body(headers, receive)
            if isinstance(body, bytes):
                await self._run({**scope, TENANT: tenant or ""}, body, receive, send)
                return
            refusal = body
        reply = error_reply(*refusal)
        if refusal[0] == 401:
            reply.headers["WWW-Authenticate"] = 'Basic realm="kvloom"' if browsed else "Bearer"
        if is_ambiguous:  # whoever stands before this server may take what follows for a request
            reply.headers["Connection"] = "close"
        await reply(scope, receive, send)

    def _tenant(self, headers: Headers, browsed: bool) -> str | None:
        """A name for the key; empty if the server has no keys, ``None`` if the request has none of them."""
        if not self._keys:
            return ""
        kind, _, key = headers.get("authorization", "").partition(" ")
        if browsed and kind.lower() == "basic":
            kind, key = "bearer", _password(key)
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        same = [hmac.compare_digest(given, known) for known in self._keys]  # all of them, whatever is found
        return given.hex() if any(same) and kind.lower() == "bearer" else None

    async def _body(self, headers: Headers, receive: Any) -> bytes | tuple[int, str]:
        """The body, or why there is none."""
        most = self._settings.max_body_bytes
        too_large = (413, f"the body must be at most {most} bytes")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > most:
            return too_large
        body = bytearray()

        async def read() -> bool:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                body.extend(message.get("body", b""))
                if not message.get("more_body") or len(body) > most:
                    return True

        try:
            whole = await asyncio.wait_for(read(), self._settings.body_seconds)
        except asyncio.TimeoutError:
            return 408, f"the body must come within {self._settings.body_seconds:g} seconds"
        if not whole:
            return 400, "the body ended too early"
        return too_large if len(body) > most else bytes(body)

    async def _run(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        began = False

        async def replay() -> Any:
            if messages:
                return messages.pop()
            return await asyncio.Event().wait()  # who goes away is seen below

        async def watched(message: Any) -> None:
            nonlocal began
            began = True
            await send(message)

        answer = asyncio.ensure_future(self._app(scope, replay, watched))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            limit = self._settings.max_seconds + _GRACE_SECONDS
            done, _ = await asyncio.wait({answer, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answer.done():
                answer.cancel()
                await asyncio.wait({answer})
        if not answer.cancelled():
            answer.result()
        elif not done and not began:
            await error_reply(408, "the answer took too long")(scope, receive, send)


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _password(credentials: str) -> str:
    """The password of Basic authentication; empty if there is none."""
    try:
        return binascii.a2b_base64(credentials).decode().partition(":")[2]
    except ValueError:
        return ""


def _is_ambiguous(scope: Any, headers: Headers) -> bool:
    """Whether two readers could disagree about where the body ends, RFC 9112, 6.1."""
    return "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0")


def _is_from_here(headers: Headers) -> bool:
    """Whether the server was asked by a name of this machine.

    A page in a browser can give this machine a name of its own, but not take that out of ``Host``.
    """
    host = headers.get("host", "localhost")
    return is_loopback(host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0])
