"""Nobody can fill the log of a server."""

from __future__ import annotations

import logging
import socket
from typing import Any

import openai
import pytest
from oracles.serving import PROMPT, served

from kvloom.serving.log import SECONDS, Counted


def record(line: int, seconds: float, text: str = "bad request") -> logging.LogRecord:
    made = logging.LogRecord("uvicorn.error", logging.WARNING, "h11.py", line, "%s", (text,), None)
    made.created = seconds
    return made


def test_what_repeats_is_counted_and_told_with_the_next_line() -> None:
    counted = Counted()
    first, other, later = record(1, 1000.0), record(2, 1000.0), record(1, 1000.0 + SECONDS)
    assert counted.filter(first) and first.getMessage() == "bad request"
    assert not any(counted.filter(record(1, 1000.0 + i / 100, f"bad request {i}")) for i in range(1234))
    assert counted.filter(other) and other.getMessage() == "bad request"
    assert counted.filter(later)
    assert later.getMessage() == "bad request (1,234 more since the last line like this)"
    again = record(1, 1000.0 + 2 * SECONDS)
    assert counted.filter(again) and again.getMessage() == "bad request"


def test_what_a_session_logs_of_requests_is_counted_too(caplog: Any) -> None:
    logger = logging.getLogger("ContinuousBatchingLogger")  # transformers' own
    with served() as server:
        processor = server.session.manager.batch_processor
        logger.addHandler(caplog.handler)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(processor.scheduler, "most_positions", 8)
                with server.client() as client:
                    for _ in range(50):
                        with pytest.raises(openai.InternalServerError, match="at most 9 tokens together"):
                            client.completions.create(model="bundled", prompt=PROMPT, max_tokens=1)
        finally:
            logger.removeHandler(caplog.handler)
        assert len(caplog.records) <= 1


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ],
)
def test_bad_requests_without_a_key_are_a_line_and_no_more(data: bytes, caplog: Any) -> None:
    logger = logging.getLogger("uvicorn.error")
    with served(api_keys=("secret",)) as server:
        logger.addHandler(caplog.handler)
        try:
            for _ in range(50):
                with socket.create_connection(("127.0.0.1", server.port)) as connection:
                    connection.sendall(data)
                    assert connection.recv(1000).startswith(b"HTTP/1.1 4")
        finally:
            logger.removeHandler(caplog.handler)
        assert len(caplog.records) <= 2
        with server.client("secret") as client:
            assert client.completions.create(model="bundled", prompt=PROMPT, max_tokens=1).choices
