"""Keys, tenants, limits, and clients that go away."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import re
import select
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import openai
import pytest
from oracles.serving import PROMPT, Served, paced, served

from kvloom.serving import server as server_module
from kvloom.serving.answering.session import ServingSession
from kvloom.serving.endpoints.shapes import EventStream

PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/sessions",
    "/v1/sessions/{id}",
    "/metrics",
    "/dashboard",
    "/dashboard/state",
    "/",
    "/docs",
    "/health/",
    "//health",
]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
LIMITS: dict[str, Any] = {
    "max_body_bytes": 20_000,
    "max_header_bytes": 2000,
    "max_answers": 4,
    "body_seconds": 0.5,
    "header_seconds": 0.5,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_keys=("one", "two"), **LIMITS) as running:
        yield running


def body(**fields: object) -> bytes:
    return json.dumps({"prompt": PROMPT, "max_tokens": 2, **fields}).encode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", METHODS)
def test_everything_but_health_needs_a_key(server: Served, method: str, path: str) -> None:
    status, _ = server.send(method, path)
    assert status == 401
    assert server.send(method, path, body(), key="three")[0] == 401
    assert server.send(method, path, key="one")[0] != 401


def test_the_paths_above_are_all_there_are() -> None:
    routes = re.findall(r'(?:Route|post)\("([^"]+)"', inspect.getsource(server_module))
    assert len(routes) >= 10 and {*routes} <= {*PATHS, "/health"}


@pytest.mark.parametrize(
    ("path", "status"), [("/dashboard", 200), ("/dashboard/state", 200), ("/metrics", 401)]
)
def test_a_browser_may_give_the_key_as_a_password_for_the_dashboard_alone(
    server: Served, path: str, status: int
) -> None:
    assert server.send("GET", path, Authorization="Basic Om9uZQ==")[0] == status
    assert server.send("GET", path, Authorization="Basic OnRocmVl")[0] == 401
    assert server.send("GET", path, Authorization="Basic %%%")[0] == 401
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("GET", path)
        with connection.getresponse() as response:
            assert response.headers["www-authenticate"].startswith("Basic" if status == 200 else "Bearer")


@pytest.mark.parametrize(
    "value",
    [
        "one",
        "Bearer",
        "Bearer ",
        "Basic one",
        "Bearer one two",
        "Bearer on\u0435".encode(),
        "Bearer one,two",
        "Basic Om9uZQ==",
    ],
)
def test_only_a_bearer_of_a_key_is_let_in(server: Served, value: str | bytes) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("GET", "/v1/models", headers={"authorization": value})
        with connection.getresponse() as response:
            assert response.status == 401 and response.headers["www-authenticate"] == "Bearer"


def test_health_needs_none_and_every_key_serves(server: Served) -> None:
    assert server.send("GET", "/health") == (200, b'{"status":"ok"}')
    for key in ("one", "two"):
        with server.client(key) as client:
            assert client.completions.create(model="bundled", prompt="import", max_tokens=1).choices
    with server.client("three") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_keys_never_find_each_others_pages(server: Served) -> None:
    def found(key: str, salt: str | None = None) -> int:
        with server.client(key) as client:
            answer = client.completions.create(
                model="bundled",
                prompt="# of a tenant\n" + PROMPT,
                max_tokens=1,
                extra_body={} if salt is None else {"cache_salt": salt},
            )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert found("one") == 0 < found("one")
    assert found("two") == 0 < found("two")
    assert found("one", "mine") == 0 < found("one", "mine")
    assert found("two", "mine") == 0
    pages = server.session.manager.page_map().requests
    assert not any(key in page.salt for page in pages for key in ("one", "two"))


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({}, b"x" * 20_001, 413),
        ({"Content-Length": "99999999999"}, b"", 413),
        ({"Content-Length": "20000"}, b"x" * 10, 408),
        ({"X-Long": "x" * 2000}, b"", 431),
        ({"Transfer-Encoding": "chunked"}, b"6000\r\n" + b"x" * 0x6000 + b"\r\n0\r\n\r\n", 413),
    ],
)
def test_what_is_too_large_or_too_slow_is_refused(
    server: Served, headers: dict[str, str], content: bytes, status: int
) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.putrequest("POST", "/v1/completions")
        if not headers.keys() & {"Content-Length", "Transfer-Encoding"}:
            headers = {**headers, "Content-Length": str(len(content))}
        for name, value in {**headers, "Authorization": "Bearer one"}.items():
            connection.putheader(name, value)
        connection.endheaders(content)
        with connection.getresponse() as response:
            assert response.status == status
            assert json.loads(response.read())["error"]["message"]


@pytest.mark.parametrize(
    ("version", "length"), [("1.1", "Content-Length: 5\r\n"), ("1.1", "content-length: 0\r\n"), ("1.0", "")]
)
def test_a_body_that_ends_in_two_places_closes_the_connection(
    server: Served, version: str, length: str
) -> None:
    """RFC 9112, 6.1: what one reader takes for the body, another takes for a request."""
    hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"GET /health HTTP/{version}\r\nHost: localhost\r\n{length}Transfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + b"0\r\n\r\n" + hidden)
        answered = b""
        with suppress(ConnectionError):
            while more := connection.recv(1000):
                answered += more
    assert answered.startswith(b"HTTP/1.1 400") and answered.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answered.lower() and b"Content-Length or by Transfer-Encoding" in answered


@pytest.mark.parametrize("path", ["/v1", "/docs", "/v1/" + "x" * 500, "/v1/audio/speech"])
def test_a_path_that_there_is_not_says_which_there_are(server: Served, path: str) -> None:
    status, answer = server.send("POST", path, body(), "one")
    error = json.loads(answer)["error"]
    assert status == 404 and error["type"] == "not_found_error" and len(error["message"]) < 400
    assert error["message"].startswith(f"there is no {path[:100]} here, but POST /v1/chat/completions, POST ")
    assert "GET /v1/models, GET /v1/sessions" in error["message"]


def test_a_method_that_there_is_not_says_which_there_are(server: Served) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        for method, path, allowed in (
            ("GET", "/v1/completions", {"POST"}),
            ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ):
            connection.request(method, path, headers={"Authorization": "Bearer one"})
            with connection.getresponse() as response:
                assert response.status == 405 and {*response.headers["allow"].split(", ")} == allowed
                message = json.loads(response.read())["error"]["message"]
                assert message == f"{path} must be asked by {response.headers['allow']}, got {method}"


@contextmanager
def only_steps(session: ServingSession, count: int) -> Iterator[None]:
    """Let the session compute so many steps, and others behind the ``with`` block."""
    left = threading.Semaphore(count)
    with paced(session, left.acquire):
        yield
    left.release()  # of the step that waits


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_pages(server: Served, stream: bool) -> None:
    server.until(running=0, waiting=0, active=0)
    session, before = server.session, server.session.report()
    content = body(max_tokens=2000, stream=stream, seed=2, temperature=2)
    request = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with only_steps(session, 3):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request.encode() + content)
            server.until(steps=before.steps + 3)
            if stream:
                assert connection.recv(20).startswith(b"HTTP/1.1 200")
        while session.readers:  # until the server has seen it, however long that takes
            time.sleep(0.005)
        assert session.report().steps == before.steps + 3
    server.until(running=0, active=0)
    after = session.report()
    assert after.finished == before.finished + 1 and after.steps <= before.steps + 4


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_headers_must_come_in_time_however_many_bytes_come(server: Served, first: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(first + b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        answered = b""
        with suppress(ConnectionError):  # it is closed while bytes come
            while True:
                if select.select([connection], [], [], 0.1)[0]:
                    more = connection.recv(1000)
                    if not more:
                        break
                    answered += more
                connection.sendall(b"X: 1\r\n")
        assert answered.count(b"HTTP/1.1 200") == bool(first)


def test_a_stream_that_never_began_is_closed() -> None:
    async def events() -> AsyncGenerator[dict[str, Any], None]:
        yield {}

    async def send(message: Any) -> None:
        raise asyncio.CancelledError

    closed: list[bool] = []
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(EventStream(events(), lambda: closed.append(True))({}, None, send))
    assert closed == [True]


def test_more_answers_than_allowed_are_429_and_no_later_one(server: Served) -> None:
    with server.client("one") as client, ExitStack() as streams:
        options = {"model": "bundled", "prompt": PROMPT, "max_tokens": 2000, "temperature": 2}
        with pytest.raises(openai.BadRequestError, match="must be at most 4, got 5"):  # which never come
            client.completions.create(**options, n=5)
        for _ in range(2):
            stream = streams.enter_context(client.completions.create(**options, n=2, stream=True))
            next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="4 answers are being computed") as refused:
            client.completions.create(model="bundled", prompt="import", max_tokens=1)
        assert refused.value.response.headers["retry-after"]
        assert server.send("GET", "/health")[0] == 200
    server.until(running=0, active=0)
    assert server.send("POST", "/v1/completions", body(), "two")[0] == 200


def test_a_request_has_its_own_id_whatever_it_says(server: Served) -> None:
    def ask(prompt: str) -> bytes:
        content = body(prompt=prompt, max_tokens=8)
        return server.send("POST", "/v1/completions", content, "one", **{"x-request-id": "same"})[1]

    prompts = [f"import os\nimport {name}\n\n\ndef " for name in ("sys", "re", "json")]
    alone = [json.loads(ask(prompt))["choices"] for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        assert [json.loads(x)["choices"] for x in pool.map(ask, prompts)] == alone


def test_time_is_up() -> None:
    with served(max_seconds=0.3) as server, server.client() as client:
        options = {"model": "bundled", "prompt": PROMPT, "max_tokens": 2000, "temperature": 2, "seed": 3}
        with pytest.raises(openai.APIStatusError, match="the answer took too long") as refused:
            client.completions.create(**options)
        assert refused.value.status_code == 408
        with pytest.raises(openai.APIError, match="the answer took too long"):
            list(client.completions.create(**options, stream=True))
        server.until(running=0, active=0)


def test_too_few_pages_for_all_change_no_answer() -> None:
    with served(config={"num_blocks": 8}) as server, server.client() as client:
        options = {"model": "bundled", "prompt": PROMPT, "max_tokens": 60, "temperature": 1.0, "logprobs": 1}
        alone = [client.completions.create(**options, seed=seed).choices[0] for seed in range(3)]
        with ThreadPoolExecutor(3) as pool:
            together = [pool.submit(client.completions.create, **options, seed=seed) for seed in range(3)]
        assert [x.result().choices[0].text for x in together] == [x.text for x in alone]
        assert server.session.report().preemptions > 0
        with pytest.raises(
            openai.BadRequestError, match="the prompt and max_tokens must be at most 128 tokens"
        ):
            client.completions.create(model="bundled", prompt=PROMPT, max_tokens=128)


@pytest.mark.parametrize(("value", "count"), [("x" * 99_999, 1), ("", 100_000)])
def test_headers_may_be_as_large_as_the_limit(value: str, count: int) -> None:
    with served(max_header_bytes=100_100) as running:
        for more, status in ((0, b"200"), (100, b"431")):
            lines = [
                "GET /health HTTP/1.1",
                "Host: localhost",
                *[f"X: {value}"] * count,
                *["Y: "] * more,
                "",
                "",
            ]
            with socket.create_connection(("127.0.0.1", running.port)) as connection:
                connection.sendall("\r\n".join(lines).encode())
                assert connection.recv(12) == b"HTTP/1.1 " + status
