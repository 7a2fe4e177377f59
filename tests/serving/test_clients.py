"""Clients that vanish, and more of them than a server can serve."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from campaign import times
from oracles.serving import PROMPT, Served, served

SECONDS = times(3)
VANISHING = 500


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(max_answers=8) as running:
        yield running


def request(**fields: Any) -> bytes:
    """Bytes of a request that would take long."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2000, "temperature": 2, "seed": 2, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [False, True])
def test_pages_of_a_client_that_went_away_are_free_within_one_step(
    server: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache: Any = server.session.manager._cache
    steps: dict[str, list[tuple[str, int]]] = {"cancel_request": [], "free_blocks": []}

    def note(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def noted(request_id: str, *args: Any, **kwargs: Any) -> Any:
            steps[name].append((request_id, cache.steps.num_steps))
            return call(request_id, *args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(server.session.manager, "cancel_request")
    note(cache, "free_blocks")
    first = cache.steps.num_steps
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request(stream=stream))
        while cache.steps.num_steps < first + 3:
            time.sleep(0.001)
        if stream:
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
    server.until(running=0, active=0)
    request_id, cancelled = steps["cancel_request"][0]
    freed = next(step for name, step in steps["free_blocks"] if name == request_id)  # others end late
    assert 0 < cancelled <= freed <= cancelled + 1
    assert server.session.readers == {}


def test_vanished_clients_leave_nothing_and_change_nobodys_text(server: Served) -> None:
    with server.client() as client:
        options: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "max_tokens": 12}
        text = client.completions.create(**options).choices[0].text
        for number in range(VANISHING):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                data = request(stream=number % 2 == 0, seed=number)
                connection.sendall(data[: len(data) - number % 3 * 20])  # a third of them in their body
                if number % 6 == 0:  # a stream that has begun
                    connection.recv(1)
            if number % 100 == 0:
                assert (
                    client.with_options(max_retries=9).completions.create(**options).choices[0].text == text
                )
        while server.session.readers:  # the last one may not have been read yet
            time.sleep(0.005)
        server.until(running=0, waiting=0, active=0)
        assert client.completions.create(**options).choices[0].text == text


@pytest.mark.campaign
def test_at_twice_the_capacity_what_is_accepted_ends_and_the_rest_is_refused(server: Served) -> None:
    ended: Counter[Any] = Counter()
    until = time.monotonic() + SECONDS

    def ask(number: int) -> None:
        with server.client() as client:
            while time.monotonic() < until:
                try:
                    answer = client.completions.create(
                        model="bundled", prompt=PROMPT, max_tokens=10 + number, stream=number % 2 == 0
                    )
                    reason = [*answer][-1].choices[0].finish_reason if number % 2 == 0 else None
                    ended[reason or answer.choices[0].finish_reason] += 1
                except openai.RateLimitError:
                    ended["refused"] += 1
                    time.sleep(0.01)
                except Exception as error:  # a client that is lost is counted, too
                    ended[repr(error)] += 1

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert ended.keys() == {"length", "refused"}, ended
    report = server.session.report()
    assert (report.running, report.waiting, report.active) == (0, 0, 0)
    assert server.session.readers == {} and server.session.alive
