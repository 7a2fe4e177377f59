"""A session that dies begins again with new pages; one that cannot live ends the server, with status 1."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from oracles.language_models import make_model
from oracles.serving import PROMPT, Served, make_session, serve, served

from kvloom.errors import ArgumentError, StateError
from kvloom.integrations.transformers import continuous_batching
from kvloom.integrations.transformers.session.manager import BatchingManager
from kvloom.serving import server as server_module
from kvloom.serving.answering import session as session_module
from kvloom.serving.settings import Settings

OPTIONS: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "max_tokens": 8}


@pytest.fixture
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def until_restarted(server: Served, count: int) -> None:
    while server.session.num_restarts < count or not server.session.alive:
        time.sleep(0.005)


def break_next_forward(server: Served, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise error

    handle = server.session.model.register_forward_pre_hook(fail)


def test_a_token_without_a_row_in_the_embedding_is_refused_and_ends_nothing(server: Served) -> None:
    assert server.session.tokenizer.add_tokens(["<new>"]) == 1  # as of a model that was not resized
    words = "the prompt must be token ids from 0 to 2047, as the model's embedding has 2048 rows, got 2048"
    with server.client() as client:
        beside = client.completions.create(**{**OPTIONS, "max_tokens": 200}, stream=True)
        next(beside)
        for prompt in ([2048], [5, 2048, 7], "import <new>"):
            with pytest.raises(openai.BadRequestError, match=words):
                client.completions.create(model="bundled", prompt=prompt, max_tokens=1)
        assert [*beside][-1].choices[0].finish_reason == "length"
        assert server.send("GET", "/health")[0] == 200
    assert server.session.num_restarts == 0


@pytest.mark.parametrize("token", [-1, 199, 10**20])
def test_a_session_takes_no_token_without_a_row(token: int) -> None:
    model = continuous_batching(make_model())
    manager = model.init_continuous_batching()
    with pytest.raises(ArgumentError, match=f"input_ids must be token ids from 0 to 198, .* got {token}"):
        manager.add_request([5, token, 7])
    manager.switch_to_cb_friendly_attn(model)
    assert manager.input_queue.empty()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the second one
@pytest.mark.parametrize(("error", "times"), [(RuntimeError("broken"), 4), (SystemExit("broken"), 1)])
def test_a_session_that_dies_begins_again(server: Served, error: BaseException, times: int) -> None:
    server.session.manager.record()
    with server.client() as client:
        text = client.completions.create(**OPTIONS).choices[0].text
        for count in range(1, times + 1):  # however often, if there was a token between
            stream = client.completions.create(**{**OPTIONS, "max_tokens": 1900}, stream=True, n=2)
            next(iter(stream))
            break_next_forward(server, error)
            with pytest.raises(openai.APIError, match=r"the session failed: (.*broken|its thread ended)"):
                list(stream)
            until_restarted(server, count)
            assert client.completions.create(**OPTIONS).choices[0].text == text
        assert server.send("GET", "/health")[0] == 200
        assert (
            b'kvloom_session_restarts_total{model="bundled"} %d.0' % times
            in server.send("GET", "/metrics")[1]
        )
    report = server.session.report()
    assert (report.running, report.waiting, report.active, report.max_pages) == (0, 0, 0, 256)
    assert server.session.readers == {} and server.session.manager.events is not None


def test_an_answer_that_is_not_streamed_is_a_503(server: Served) -> None:
    break_next_forward(server, RuntimeError("broken"))
    with server.client() as client, pytest.raises(openai.InternalServerError, match="broken") as refused:
        client.completions.create(**OPTIONS)
    assert refused.value.status_code == 503
    until_restarted(server, 1)


def test_on_a_device_that_computes_nothing_it_does_not_begin_again(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: Any) -> None:
        raise RuntimeError("the device is lost")

    ended: list[str | None] = []
    server.session.on_failure = lambda: ended.append(server.session.failure)
    monkeypatch.setattr(session_module, "_expect_device", fail)
    break_next_forward(server, RuntimeError("broken"))
    with server.client() as client, pytest.raises(openai.InternalServerError):
        client.completions.create(**OPTIONS)
    while not ended:
        time.sleep(0.005)
    assert ended == ["the session ended: RuntimeError: the device is lost"]
    assert server.send("GET", "/health")[0] == 503


def test_a_session_that_cannot_begin_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(manager: Any) -> None:
        raise MemoryError("no room for a page")

    monkeypatch.setattr(BatchingManager, "_make_cache", fail)
    session = make_session("auto", None, Settings())
    with pytest.raises(StateError, match="the session could not begin: MemoryError: no room for a page"):
        asyncio.run(session.start())
    assert session.failure is not None and not session.alive


def test_a_server_whose_session_dies_again_and_again_exits_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, seen = server_module.serve_until_stopped, set()

    def run_broken(models: Any, settings: Settings) -> int:
        def fail(*_: Any) -> None:
            raise RuntimeError("every forward is broken")

        models[0].session.model.register_forward_pre_hook(fail)
        return run(models, settings)

    def ask(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            while True:
                try:
                    client.completions.create(model="small", prompt=PROMPT, max_tokens=1)
                except openai.APIStatusError as error:
                    seen.add((error.status_code, str(error.body["message"])))  # type: ignore[index]
                except openai.APIConnectionError:
                    return  # it is gone

    monkeypatch.setattr(server_module, "serve_until_stopped", run_broken)
    status, said = serve(ask, "--name", "small", "--record", str(tmp_path / "events.jsonl"))
    assert status == 1
    assert (503, "the session failed: every forward is broken") in seen
    assert {status for status, _ in seen} == {503}
    assert said == (
        "kvloom: the session ended: RuntimeError: every forward is broken, "
        "3 times without a new token between\n"
    )
    assert caplog.text.count("the session died and begins again with new pages") == 2
    assert (tmp_path / "events.jsonl").read_text()
