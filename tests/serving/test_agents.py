"""Sessions of agents over HTTP: restored, listed, deleted, apart by key; and said why where they are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from oracles.serving import PROMPT, Served, served

REPLAYED = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
"""A chat template that gives an answer back as it was."""

TASK = [{"role": "user", "content": "write a function that walks a folder and prints the names of its files"}]
MORE = {"role": "user", "content": "now with a limit of depth"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        running.session.tokenizer.chat_template = REPLAYED
        yield running


def chat(client: openai.OpenAI, messages: list[Any], name: str | None = None, **fields: Any) -> Any:
    headers = {} if name is None else {"X-Session-Id": name}
    fields = {"max_tokens": 12, "extra_headers": headers, **fields}
    return client.chat.completions.create(model="bundled", messages=messages, **fields)


def continued(answer: Any) -> list[Any]:
    return [*TASK, {"role": "assistant", "content": answer.choices[0].message.content}, MORE]


def session_of(answer: Any) -> dict[str, Any]:
    """What ``usage`` says of the session."""
    found: dict[str, Any] = answer.usage.session
    return found


def get(server: Served, path: str, key: str | None = None, method: str = "GET") -> tuple[int, Any]:
    status, body = server.send(method, path, key=key)
    return status, json.loads(body)


def test_a_completion_goes_on_behind_the_last_token(client: openai.OpenAI) -> None:
    def complete(prompt: list[int] | str, **fields: Any) -> Any:
        return client.completions.create(model="bundled", prompt=prompt, max_tokens=9, **fields)

    headers = {"extra_headers": {"X-Session-Id": "completions"}}
    first = complete(PROMPT, **headers)
    assert session_of(first) == {
        "id": "completions",
        "restored": False,
        "kept_tokens": 0,
        "restored_tokens": 0,
        "reason": "no session of this id is known",
    }
    known = first.usage.total_tokens - 1
    assert known % 16, "the last page must be full in part"
    prompt = PROMPT + first.choices[0].text + " or"
    expected = complete(prompt, extra_body={"cache_salt": "nobody's"})
    second = complete(prompt, **headers)
    assert second.choices[0].text == expected.choices[0].text
    assert session_of(second) == {
        "id": "completions",
        "restored": True,
        "kept_tokens": known,
        "restored_tokens": known,
        "reason": None,
    }
    assert second.usage.prompt_tokens_details.cached_tokens == known
    again = complete(PROMPT[:40], **headers)
    assert not session_of(again)["restored"]
    assert session_of(again)["reason"].startswith("the prompt has the first ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_restored(client: openai.OpenAI, stream: bool) -> None:
    name = f"chat-{stream}"
    first = chat(client, TASK, name)
    expected = chat(client, continued(first), extra_body={"cache_salt": "nobody's"})
    if stream:
        *chunks, last = chat(
            client, continued(first), name, stream=True, stream_options={"include_usage": True}
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        found = session_of(last)
    else:
        second = chat(client, continued(first), name)
        text, found = second.choices[0].message.content, session_of(second)
    assert text == expected.choices[0].message.content
    assert found["restored"] and found["restored_tokens"] == first.usage.total_tokens - 1


def test_a_response_says_what_was_restored(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "bundled", "max_output_tokens": 8}
    fields["extra_headers"] = {"X-Session-Id": "responses"}
    first = client.responses.create(input=TASK, **fields)
    second = client.responses.create(input=[*TASK, *first.output, MORE], **fields)
    assert second.usage is not None
    assert second.usage.session["restored"]  # type: ignore[attr-defined]


def test_requests_without_a_session_say_nothing_of_it(client: openai.OpenAI) -> None:
    assert not hasattr(chat(client, TASK).usage, "session")


def test_sessions_are_listed_and_deleted(server: Served, client: openai.OpenAI) -> None:
    used = chat(client, TASK, "listed").usage
    status, found = get(server, "/v1/sessions/listed")
    assert status == 200
    assert found["expires_at"] - found["used_at"] == 3600
    assert found["created_at"] <= found["used_at"]
    assert {name: found[name] for name in ("id", "object", "model", "tokens", "held", "reason")} == {
        "id": "listed",
        "object": "session",
        "model": "bundled",
        "tokens": used.total_tokens - 1,
        "held": True,
        "reason": None,
    }
    assert found in get(server, "/v1/sessions")[1]["data"]
    kept = server.session.report().kept
    assert kept > 0
    deleted = {"id": "listed", "object": "session.deleted", "deleted": True}
    assert get(server, "/v1/sessions/listed", method="DELETE") == (200, deleted)
    assert server.session.report().kept < kept
    for method in ("GET", "DELETE"):
        status, body = get(server, "/v1/sessions/listed", method=method)
        assert (status, body["error"]["code"]) == (404, "session_not_found")
    assert all(x["id"] != "listed" for x in get(server, "/v1/sessions")[1]["data"])


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a/b", "é"])
def test_ids_that_are_none(server: Served, name: str) -> None:
    body = json.dumps({"messages": TASK, "max_tokens": 1}).encode()
    status, answer = server.send("POST", "/v1/chat/completions", body, **{"X-Session-Id": name})
    assert status == 400
    assert json.loads(answer)["error"]["message"].startswith("X-Session-Id must be one id of 1 to 128")


def test_a_session_has_one_answer(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match="n and prompt must ask for one answer with X-Session-Id, got 2 answers"
    ):
        chat(client, TASK, "a", n=2)
    with pytest.raises(openai.BadRequestError, match="n and prompt must ask for one answer"):
        client.completions.create(
            model="bundled", prompt=["a", "b"], max_tokens=1, extra_headers={"X-Session-Id": "a"}
        )


def test_keys_have_names_and_budgets_of_their_own() -> None:
    config = {"num_blocks": 48}
    with served(api_keys=("one", "two"), config=config, session_share=0.5) as server:
        server.session.tokenizer.chat_template = REPLAYED
        for key in ("one", "two"):
            with server.client(key) as client:
                answer = chat(client, TASK, "same")
                assert session_of(answer)["reason"] == "no session of this id is known"
                assert answer.usage.prompt_tokens_details.cached_tokens == 0
                assert session_of(chat(client, continued(answer), "same"))["restored"]
        with server.client("one") as client:
            for name in ("b", "c", "d", "e"):
                chat(client, [{"role": "user", "content": f"{name}: " + "words " * 30}], name)
        held = {
            key: [x["held"] for x in get(server, "/v1/sessions", key)[1]["data"]] for key in ("one", "two")
        }
        assert held["two"] == [True]
        assert held["one"][0] is False and held["one"][-1] is True
        assert get(server, "/v1/sessions/b", "two")[0] == 404
        assert get(server, "/v1/sessions/same", "two", "DELETE")[0] == 200
        assert get(server, "/v1/sessions/same", "one")[0] == 200
        assert server.send("GET", "/v1/sessions")[0] == 401
        assert server.session.report().kept <= 12


def test_sessions_expire() -> None:
    with served(session_seconds=0.05) as server, server.client() as client:
        chat(client, TASK, "short")
        while get(server, "/v1/sessions")[1]["data"]:
            pass
        assert session_of(chat(client, TASK, "short"))["reason"] == "no session of this id is known"


def test_a_session_that_began_again_has_lost_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server, server.client() as client:
        answer = chat(client, TASK, "a")
        num_restarts = server.session.num_restarts

        def broken(*args: Any, **options: Any) -> None:
            raise MemoryError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(server.session.manager.batch_processor, "_generation_step", broken)
            patch.setattr(server.session.manager, "_generation_step", broken)
            with pytest.raises(openai.APIStatusError):
                chat(client, [MORE])
        while server.session.num_restarts == num_restarts or not server.session.alive:
            pass
        found = session_of(chat(client, continued(answer), "a"))
        assert found["kept_tokens"] == answer.usage.total_tokens - 1
        assert (found["restored_tokens"], found["reason"]) == (0, "the session of the server began again")
