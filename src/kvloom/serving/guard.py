"""Checks of every request: keys, sizes, time, and whether the client is still connected."""

import asyncio
import binascii
import hashlib
import hmac
from typing import Any, Final

from starlette.datastructures import Headers

from kvloom.serving.origins import may_ask
from kvloom.serving.refusals import error_reply
from kvloom.serving.settings import Settings, is_loopback

TENANT: Final = "kvloom.tenant"
"""Key of the tenant in a request's ASGI scope, a hash of its API key; requests of one tenant share pages."""

OPEN: Final = "/health"
"""The path that needs no key."""

BROWSED: Final = "/dashboard"
"""Prefix of the paths for browsers, where the key may be the password of Basic authentication."""

_GRACE_SECONDS: Final = 10.0
"""Time for a request that takes too long to answer with an error itself."""


class Guard:
    """ASGI application that checks requests before it passes them to another one.

    It answers 401 without a key, 431 and 413 if something is too large, 408 if something takes too long, and
    400 if the end of a body is given in two ways. If the client disconnects, its request is cancelled.

    Args:
        app: The other application.
        settings: Settings of the server.
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
                "the end of the body must be given by Content-Length or by Transfer-Encoding alone",
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
        if is_ambiguous:  # a proxy may take the bytes that follow for another request
            reply.headers["Connection"] = "close"
        await reply(scope, receive, send)

    def _tenant(self, headers: Headers, browsed: bool) -> str | None:
        """Hash of the request's key; empty if the server has no keys, ``None`` if the key is not valid."""
        if not self._keys:
            return ""
        kind, _, key = headers.get("authorization", "").partition(" ")
        if browsed and kind.lower() == "basic":
            kind, key = "bearer", _password(key)
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        same = [hmac.compare_digest(given, known) for known in self._keys]  # all keys, in constant time
        return given.hex() if any(same) and kind.lower() == "bearer" else None

    async def _body(self, headers: Headers, receive: Any) -> bytes | tuple[int, str]:
        """The body, or status and message of a refusal."""
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
            return await asyncio.Event().wait()  # a disconnect is noticed below

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
    """Whether the ``Host`` of a request is a loopback address.

    A page in a browser can resolve a name of its own to this machine, but ``Host`` then has that name.
    """
    host = headers.get("host", "localhost")
    return is_loopback(host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0])
