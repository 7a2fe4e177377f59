"""Two hundred requests that nobody should send: each is refused, and nothing of it stays."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracles.serving import PROMPT, Served, served

from kvloom.errors import ArgumentError
from kvloom.serving.protocol.wanted import Wanted

VALUES: list[Any] = [
    -1,
    2**70,
    1e400,
    float("nan"),
    "",
    "\x00",
    "x" * 5000,
    [],
    [[]],
    {},
    {"a": {"a": {}}},
    True,
    [None],
    ["a", 1],
]
FIELDS = [
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "n",
    "max_tokens",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "logit_bias",
    "presence_penalty",
    "repetition_penalty",
    "min_p",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "echo",
    "response_format",
    "prompt",
]
LINES = [
    b"BREW /v1/models HTTP/1.1",
    b"GET  HTTP/1.1",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: gzip",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nHost: b",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1",
    b"GET /v1/models HTTP/1.1\r\nX: " + b"x" * 20_000,
    b"GET /v1/\xff HTTP/1.1",
    b"GET /v1/models HTTP/1.1\r\n X: folded",
    b"PRI * HTTP/2.0",
]
BODIES = [
    b"{" * 50_000,
    b'{"prompt": "' + b"\\ud800" * 3 + b'"}',
    b'{"prompt": "\xff"}',
    json.dumps({"prompt": [3] * 100_000}).encode(),
    b'{"prompt": [3, 99999999]}',
    b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
]
CHATS: list[Any] = [
    [],
    [{}],
    [{"role": 3, "content": "x"}],
    [{"role": {}, "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    "hello",
]


def hostile() -> Iterator[tuple[str, bytes]]:
    """A name of each request, and its bytes."""
    for line in LINES:
        yield repr(line[:40]), line + b"\r\n\r\n"
    for body in BODIES:
        yield repr(body[:40]), request("/v1/completions", body)
    for messages in CHATS:
        yield f"messages={messages!r}", request("/v1/chat/completions", to_json({"messages": messages}))
    choose = random.Random(3)
    while True:
        name, value = choose.choice(FIELDS), choose.choice(VALUES)
        # One more field that nobody serves, as some of the values are good ones.
        fields = {"prompt": PROMPT, "max_tokens": 1, "penalty_of_nobody": 1, name: value}
        yield f"{name}={value!r:.40}", request("/v1/completions", to_json(fields))


def to_json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def request(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def status_of(server: Served, data: bytes) -> int:
    """Status of the answer to some bytes."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        try:
            connection.sendall(data)
        except ConnectionError:
            pass  # refused before all of it was read
        return int(connection.recv(1000).split()[1])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_hostile_requests_are_refused_and_leave_nothing() -> None:
    memory = []
    with served() as server:
        for _ in range(3):
            for (name, data), _ in zip(hostile(), range(200), strict=False):
                assert 400 <= status_of(server, data) < 500, name
            report = server.session.report()
            assert server.session.alive and server.session.readers == {}
            assert (report.active, report.running, report.waiting, report.steps) == (0, 0, 0, 0), name
            memory.append(resident_bytes() if Path("/proc/self/statm").exists() else 0)
        with server.client() as client:
            assert client.completions.create(model="bundled", prompt=PROMPT, max_tokens=2).choices
    assert memory[2] - memory[1] < 8 << 20, memory


@pytest.mark.parametrize("field", ["penalty_of_nobody", "best_of", "suffix"])
def test_a_field_that_is_not_served_is_named(field: str) -> None:
    """What the test above adds to each request is what refuses it, and nothing else of the request."""
    with pytest.raises(ArgumentError, match=field):
        Wanted.of({"prompt": "x", field: 2}, "text", None)


def test_what_nests_too_deep_to_be_shown_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(
        ArgumentError, match=r"temperature must be a number .* got a list that nests too deep"
    ):
        Wanted.of({"temperature": value}, "text", None)
