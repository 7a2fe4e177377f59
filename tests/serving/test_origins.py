"""Without a key, only programs of this machine and pages of the server itself may ask."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from browsers import opened
from oracles.serving import PROMPT, Served, served

from kvloom.serving.origins import may_ask

ALLOWED = "http://localhost:3000"
BODY = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """A server with a key and an origin that may ask it."""
    with served(api_keys=("secret",), allowed_origins=(ALLOWED,)) as running:
        yield running


def scope_of(**headers: str | list[str]) -> dict[str, Any]:
    """Of a request to ``http://localhost:8000``."""
    given = {"host": "localhost:8000", **{name.replace("_", "-"): value for name, value in headers.items()}}
    raw = [
        (name.encode(), value.encode())
        for name, values in given.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    return {"type": "http", "scheme": "http", "headers": raw}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("LOCALHOST", 200),
        ("LocalHost:8000", 200),
        ("localhost.", 200),
        ("localhost.:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_the_server_is_asked_by_a_name_of_this_machine(server: Served, host: str, status: int) -> None:
    assert server.send("GET", "/v1/models", Host=host)[0] == status


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ({}, True),
        ({"sec_fetch_site": "none"}, True),
        ({"sec_fetch_site": "same-origin"}, True),
        ({"sec_fetch_site": "same-site"}, False),  # another port of this machine
        ({"sec_fetch_site": "cross-site"}, False),
        ({"sec_fetch_site": ["none", "cross-site"]}, False),
        ({"origin": "http://localhost:8000"}, True),
        ({"origin": "http://localhost:8000", "host": "LOCALHOST:8000"}, True),
        ({"origin": "http://localhost:8000", "sec_fetch_site": "same-origin"}, True),
        ({"origin": "http://localhost:8000", "sec_fetch_site": "cross-site"}, False),
        ({"origin": "http://localhost:8001"}, False),
        ({"origin": "http://127.0.0.1:8000"}, False),
        ({"origin": "https://localhost:8000"}, False),
        ({"origin": "http://localhost"}, False),
        ({"origin": "http://other.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"origin": ["http://localhost:8000", "http://other.example"]}, False),
        ({"origin": ALLOWED}, True),
        ({"origin": ALLOWED, "sec_fetch_site": "cross-site"}, True),
        ({"origin": [ALLOWED, "http://other.example"]}, False),
    ],
)
def test_pages_of_the_server_and_of_allowed_origins_may_ask(headers: dict[str, Any], may: bool) -> None:
    assert may_ask(scope_of(**headers), (ALLOWED,)) is may


@pytest.mark.parametrize("origin", ["http://other.example", "http://127.0.0.1:1", "null"])
def test_a_page_from_elsewhere_computes_nothing(server: Served, origin: str) -> None:
    steps = server.session.report().steps
    status, answer = server.send("POST", "/v1/completions", BODY, Origin=origin)
    assert status == 403 and "--allow-origin" in json.loads(answer)["error"]["message"]
    assert server.send("POST", "/v1/completions", BODY, **{"Sec-Fetch-Site": "same-site"})[0] == 403
    assert server.session.report().steps == steps
    own = f"http://127.0.0.1:{server.port}"
    assert server.send("POST", "/v1/completions", BODY, Origin=own)[0] == 200


def answer_to(server: Served, method: str, **headers: str) -> tuple[int, dict[str, str]]:
    """Status and headers."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request(method, "/v1/completions", BODY if method == "POST" else b"", headers)
        with connection.getresponse() as response:
            response.read()
            return response.status, {name.lower(): value for name, value in response.getheaders()}


def test_an_allowed_page_may_read_the_answer_if_it_has_the_key(shared: Served) -> None:
    question = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    status, headers = answer_to(shared, "OPTIONS", Origin=ALLOWED, **question)
    assert status == 200 and headers["access-control-allow-origin"] == ALLOWED
    assert "Origin" in headers["vary"].split(", ")  # what a cache has for one page is none of another's
    assert "authorization" in headers["access-control-allow-headers"].lower()
    status, headers = answer_to(shared, "POST", Origin=ALLOWED, Authorization="Bearer secret")
    assert status == 200 and headers["access-control-allow-origin"] == ALLOWED
    assert headers["vary"] == "Origin"
    assert answer_to(shared, "POST", Origin=ALLOWED)[0] == 401


def test_no_other_page_may(shared: Served, server: Served) -> None:
    question = {"Access-Control-Request-Method": "POST"}
    for origin in ("http://other.example", "http://localhost:3001"):
        status, headers = answer_to(shared, "OPTIONS", Origin=origin, **question)
        assert status == 401 and "access-control-allow-origin" not in headers
        status, headers = answer_to(shared, "POST", Origin=origin, Authorization="Bearer secret")
        assert "access-control-allow-origin" not in headers
        status, headers = answer_to(server, "OPTIONS", Origin=origin, **question)
        assert status == 403 and "access-control-allow-origin" not in headers


class Page(BaseHTTPRequestHandler):
    """A page without anything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>page</title>")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def pages() -> Iterator[str]:
    """The origin of a server of pages."""
    with HTTPServer(("127.0.0.1", 0), Page) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


FETCH = """
const [url, key, body, done] = arguments;
const named = {"Authorization": `Bearer ${key}`, "Content-Type": "application/json"};
const headers = {...named, "X-Stainless-Lang": "js"};  // as OpenAI's client for browsers sends, too
fetch(url, {method: "POST", headers, body})
    .then(async answer => done([answer.status, await answer.json()]), error => done([0, String(error)]));
"""


@pytest.mark.browser
@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_in_a_browser_the_allowed_page_reads_answers_and_another_none(
    keys: tuple[str, ...], tmp_path: Path
) -> None:
    with (
        pages() as allowed,
        pages() as other,
        served(api_keys=keys, allowed_origins=(allowed,)) as server,
        opened(tmp_path) as browser,
    ):

        def ask(origin: str, key: str) -> Any:
            browser.get(origin)
            url = f"http://127.0.0.1:{server.port}/v1/completions"
            return browser.execute_async_script(FETCH, url, key, BODY.decode())

        status, answer = ask(allowed, "secret")
        assert status == 200 and answer["usage"]["completion_tokens"] == 1
        if keys:
            status, answer = ask(allowed, "wrong")
            assert status == 401 and "Authorization" in answer["error"]["message"]
        steps = server.session.report().steps
        status, answer = ask(other, "secret")
        assert status == 0 and "TypeError" in answer
        assert server.session.report().steps == steps
