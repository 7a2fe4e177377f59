"""The application, and the process that runs it."""

import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvloom.errors import KVError
from kvloom.serving import Refused, dashboard
from kvloom.serving.access_log import logged
from kvloom.serving.endpoints import Endpoint
from kvloom.serving.guard import Guard
from kvloom.serving.log import count_repeats
from kvloom.serving.metrics import Metrics
from kvloom.serving.origins import readable
from kvloom.serving.replies import error_reply
from kvloom.serving.responses import Responses
from kvloom.serving.session import Session
from kvloom.serving.settings import Settings
from kvloom.serving.tokens import Tokens

_HEAD_BYTES: Final = 64 << 10
"""Of a request's first line, and of headers that are a little too large, so that they are told."""

_LINE_BYTES: Final = 5
"""Of a header's line for each byte of its name and value, at most: ``a: `` and the end of the line."""


def application(session: Session, names: tuple[str, ...], settings: Settings) -> Any:
    """The ASGI application of a session; the session runs from its startup to its shutdown.

    Args:
        session: That answers.
        names: Of the model, the first of which is given out.
        settings: Of the server.
    """
    metrics = Metrics(session)
    session.on_first_token = metrics.first_token.observe

    tokens = Tokens(session, names)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await session.start()
        try:
            yield
        finally:
            await session.stop()

    async def health(request: Request) -> Response:
        status, code = ("ok", 200) if session.alive else ("unhealthy", 503)
        return JSONResponse({"status": status}, code)

    async def models(request: Request) -> Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "kvloom"} for name in names[:1]]
        return JSONResponse({"object": "list", "data": data})

    async def embeddings(request: Request) -> Response:
        return error_reply(
            400, f"the model {names[0]} generates text, and there are no embeddings of it here"
        )

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def show_dashboard(request: Request) -> Response:
        return HTMLResponse(dashboard.page(), headers=dashboard.HEADERS)

    async def show_state(request: Request) -> Response:
        return JSONResponse(dashboard.state_of(session, names[0]), headers={"Cache-Control": "no-store"})

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", Endpoint(session, names, "chat").answer, methods=["POST"]),
            Route("/v1/completions", Endpoint(session, names, "text").answer, methods=["POST"]),
            Route("/v1/responses", Responses(session, names).answer, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", show_metrics),
            Route("/dashboard", show_dashboard),
            Route("/dashboard/state", show_state),
        ],
        exception_handlers={KVError: _refuse, HTTPException: _refuse, 500: _fail},
        lifespan=lifespan,
    )
    guarded = metrics.counted(readable(Guard(app, settings), settings.allowed_origins))
    return logged(guarded) if settings.access_log else guarded


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        reply = error_reply(error.status_code, _what_there_is(request, error))
        reply.headers.update(error.headers or {})
        return reply
    return error_reply(error.status if isinstance(error, Refused) else 400, str(error))


def _what_there_is(request: Request, error: HTTPException) -> str:
    """The paths and methods that exist, for a request to one that does not."""
    path = request.url.path[:100]
    if error.status_code == 405:
        return f"{path} must be asked by {(error.headers or {}).get('Allow')}, got {request.method[:20]}"
    if error.status_code == 404:
        paths = ", ".join(f"{'POST' if 'POST' in x.methods else 'GET'} {x.path}" for x in request.app.routes)
        return f"there is no {path} here, but {paths}"
    return error.detail


async def _fail(request: Request, error: Exception) -> Response:
    return error_reply(500, "the server failed")


class TimelyProtocol(H11Protocol):
    """HTTP as uvicorn speaks it; a connection is closed unless whole headers come in time.

    uvicorn's own timer begins after the first answer, and ends with the next byte.
    """

    def connection_made(self, transport: Any) -> None:
        """The same as uvicorn's, and starts the timer."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """The same as uvicorn's; the timer runs until a request has come."""
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        last = self.cycle
        super().data_received(data)
        if timer is not None and self.cycle is last:
            self.timeout_keep_alive_task = timer
        elif timer is not None:
            timer.cancel()


def listener_of(settings: Settings) -> socket.socket:
    """A socket that listens; raises OSError if the address is taken or none of this machine."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host, settings.port), family=family, backlog=512)


def server_of(app: Any, settings: Settings) -> uvicorn.Server:
    """A server of an application on a listener: ``server.run(sockets=[listener])``."""
    config = uvicorn.Config(
        app,
        http=TimelyProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.header_seconds,  # type: ignore[arg-type]  # any number of seconds will do
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        h11_max_incomplete_event_size=_HEAD_BYTES + _LINE_BYTES * settings.max_header_bytes,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    count_repeats()
    return uvicorn.Server(config)


def run(session: Session, names: tuple[str, ...], settings: Settings) -> int:
    """Serve until Ctrl-C or SIGTERM; answers that have begun are given for ``drain_seconds`` then.

    Returns:
        The exit status: 1 if the session ended by itself, and 0 else.

    Raises:
        OSError: the address is taken.
    """
    with listener_of(settings) as listener:
        sys.stderr.write(f"kvloom: {names[0]} at {settings.url}:{listener.getsockname()[1]}/v1\n")
        sys.stderr.flush()
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has drained
            signal.signal(number, lambda *_: None)
        server = server_of(application(session, names, settings), settings)

        def end() -> None:
            server.should_exit = True

        session.on_failure = end
        try:
            server.run(sockets=[listener])
        except SystemExit:  # uvicorn's, where the session cannot begin
            if session.failure is None:
                raise
    if session.failure is None:
        return 0
    sys.stderr.write(f"kvloom: {session.failure}\n")
    return 1
