"""The ASGI application of ``kvloom serve``, and the server that runs it."""

import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvloom.errors import KVError
from kvloom.serving import Refused
from kvloom.serving.access_log import logged
from kvloom.serving.answering.session import ServingSession
from kvloom.serving.endpoints import dashboard
from kvloom.serving.endpoints.agents import Agents
from kvloom.serving.endpoints.chats import Endpoint
from kvloom.serving.endpoints.metrics import Metrics
from kvloom.serving.endpoints.models import Answer, Model, answer_of, chosen
from kvloom.serving.endpoints.responses import Responses
from kvloom.serving.endpoints.tokens import TokenEndpoints
from kvloom.serving.guard import Guard
from kvloom.serving.log import count_repeats
from kvloom.serving.origins import readable
from kvloom.serving.refusals import error_reply
from kvloom.serving.settings import Settings

_HEAD_BYTES: Final = 64 << 10
"""Bytes for a request's first line, and for headers that are a little too large, so that 431 is answered."""

_LINE_BYTES: Final = 5
"""Bytes of a header's line for each byte of its name and value, at most: ``a: `` and the line end."""


def application(models: Sequence[Model], settings: Settings) -> Any:
    """The ASGI application of models; their sessions run from its startup to its shutdown.

    Args:
        models: At least one model.
        settings: Settings of the server.
    """
    metrics, agents = Metrics(models), Agents(models)
    for model in models:
        model.session.reading.on_first_token = metrics.first_token.labels(model.name).observe

    def post(path: str, make: Callable[[ServingSession, tuple[str, ...]], Answer]) -> Route:
        return Route(path, answer_of(models, make), methods=["POST"])

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for model in models:
                await model.session.start()
                stack.push_async_callback(model.session.stop)
            yield

    async def health(request: Request) -> Response:
        alive = all(model.session.alive for model in models)
        status, code = ("ok", 200) if alive else ("unhealthy", 503)
        return JSONResponse({"status": status}, code)

    async def list_models(request: Request) -> Response:
        data = [{"id": x.name, "object": "model", "created": 0, "owned_by": "kvloom"} for x in models]
        return JSONResponse({"object": "list", "data": data})

    async def embeddings(request: Request) -> Response:
        return error_reply(400, "models generate text here, and there are no embeddings of it")

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def show_dashboard(request: Request) -> Response:
        return HTMLResponse(dashboard.page(), headers=dashboard.HEADERS)

    async def show_state(request: Request) -> Response:
        model = chosen(request.query_params.get("model", models[0].name), models)
        return JSONResponse(dashboard.state_of(model, models), headers={"Cache-Control": "no-store"})

    app = Starlette(
        routes=[
            post("/v1/chat/completions", lambda session, names: Endpoint(session, names, "chat").answer),
            post("/v1/completions", lambda session, names: Endpoint(session, names, "text").answer),
            post("/v1/responses", lambda session, names: Responses(session, names).answer),
            post("/tokenize", lambda session, names: TokenEndpoints(session, names).tokenize),
            post("/detokenize", lambda session, names: TokenEndpoints(session, names).detokenize),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/sessions", agents.every),
            Route("/v1/sessions/{id}", agents.one, methods=["GET", "DELETE"]),
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
    if isinstance(error, Refused):
        return error_reply(error.status, str(error), error.code)
    return error_reply(400, str(error))


def _what_there_is(request: Request, error: HTTPException) -> str:
    """Message with the paths or methods that exist, for a request to one that does not."""
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
    """uvicorn's HTTP protocol, which also closes a connection if complete headers do not come in time.

    uvicorn's own timer starts after the first response, and ends with the next byte.
    """

    def connection_made(self, transport: Any) -> None:
        """Handle a new connection, and start the timer."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; the timer runs until a request has come."""
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        last = self.cycle
        super().data_received(data)
        if timer is not None and self.cycle is last:
            self.timeout_keep_alive_task = timer
        elif timer is not None:
            timer.cancel()


def listener_of(settings: Settings) -> socket.socket:
    """A listening socket; raises OSError if the address is taken or not one of this machine."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host, settings.port), family=family, backlog=512)


def server_of(app: Any, settings: Settings) -> uvicorn.Server:
    """A server of an application, to be run by ``server.run(sockets=[listener])``."""
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


def serve_until_stopped(models: Sequence[Model], settings: Settings) -> int:
    """Serve until Ctrl-C or SIGTERM; answers that have begun then have ``drain_seconds`` to end.

    Returns:
        The exit status: 1 if a session ended by itself, else 0.

    Raises:
        OSError: the address is taken.
    """
    with listener_of(settings) as listener:
        names = ", ".join(model.name for model in models)
        sys.stderr.write(f"kvloom: {names} at {settings.url}:{listener.getsockname()[1]}/v1\n")
        sys.stderr.flush()
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has drained
            signal.signal(number, lambda *_: None)
        server = server_of(application(models, settings), settings)

        def end() -> None:
            server.should_exit = True

        for model in models:
            model.session.on_failure = end
        try:
            server.run(sockets=[listener])
        except SystemExit:  # raised by uvicorn if a session cannot begin
            if not _failures(models):
                raise
    for failure in _failures(models):
        sys.stderr.write(f"kvloom: {failure}\n")
    return int(bool(_failures(models)))


def _failures(models: Sequence[Model]) -> list[str]:
    """Reasons of sessions that ended by themselves, with the name of the model if there are several."""
    told = [(model.name, model.session.failure) for model in models if model.session.failure is not None]
    return [failure if len(models) == 1 else f"{name}: {failure}" for name, failure in told]
