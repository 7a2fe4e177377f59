"""A line for each request, in which nothing is that somebody said."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator

import pytest
from oracles.serving import PROMPT, Served, served

LOG = logging.getLogger("kvloom.access")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_keys=("secret",), access_log=True) as running:
        yield running


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Messages as they come; a line comes when its request has ended, which may be after its last byte."""
    LOG.addHandler(caplog.handler)
    yield Lines(caplog)
    LOG.removeHandler(caplog.handler)


class Lines(list[str]):
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def first(self, count: int) -> list[str]:
        while len(self._caplog.records) < count:
            time.sleep(0.005)
        assert len(self._caplog.records) == count
        return [record.getMessage() for record in self._caplog.records]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_a_line_with_its_tokens(server: Served, lines: Lines, stream: bool) -> None:
    body = {"prompt": f"# {stream}\n{PROMPT}", "max_tokens": 5, "stream": stream}
    for _ in range(2):
        assert server.send("POST", "/v1/completions", json.dumps(body).encode(), "secret")[0] == 200
    found = [
        re.fullmatch(r"POST /v1/completions 200 [0-9.]+ ms prompt=(\d+) found=(\d+) new=5", line)
        for line in lines.first(2)
    ]
    numbers = [(int(x[1]), int(x[2])) for x in found if x]
    num_prompt = len(server.session.tokenizer(body["prompt"]).input_ids)
    assert numbers == [(num_prompt, 0), (num_prompt, (num_prompt - 1) // 16 * 16)]


@pytest.mark.parametrize(
    ("method", "path", "key", "line"),
    [
        ("GET", "/health", None, "GET /health 200"),
        ("GET", "/v1/models?api_key=secret", "secret", "GET /v1/models 200"),
        ("GET", "/v1/models", "wrong-key", "GET /v1/models 401"),
        ("POST", "/v1/completions", "secret", "POST /v1/completions 400"),
        ("GET", "/a%0AGET%20/forged%20200", "secret", r"GET /a\nGET /forged 200 404"),
        ("GET", "/%1b[2J\u00e9".replace("\u00e9", "%C3%A9"), "secret", r"GET /\x1b[2J\xe9 404"),
        ("GET", "/" + "x" * 1000, "secret", "GET /" + "x" * 99 + " 404"),
    ],
)
def test_what_is_refused_is_a_line_that_nobody_can_forge(
    server: Served, lines: Lines, method: str, path: str, key: str | None, line: str
) -> None:
    server.send(method, path, b"" if method == "GET" else b'{"prompt": 3}', key)
    (told,) = lines.first(1)
    assert re.fullmatch(re.escape(line) + r" [0-9.]+ ms", told)
    assert "secret" not in told and "wrong-key" not in told


def test_a_client_that_goes_away_is_a_line_without_a_status(server: Served, lines: Lines) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1500}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + b"Authorization: Bearer secret\r\n\r\n" + body)
        server.until(running=1)
    (told,) = lines.first(1)
    assert re.fullmatch(r"POST /v1/completions - [0-9.]+ ms prompt=\d+ found=\d+ new=\d+", told)


def test_without_the_option_there_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    LOG.addHandler(caplog.handler)
    try:
        with served() as quiet:
            assert quiet.send("GET", "/v1/models")[0] == 200
    finally:
        LOG.removeHandler(caplog.handler)
    assert not caplog.records
