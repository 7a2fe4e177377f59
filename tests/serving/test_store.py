"""A server with a store: prompts begin with what was computed before it began, for whoever may find that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oracles.serving import PROMPT, Served, served
from serving.test_metrics import read

from kvloom.store import KVStore

LONG = "\n".join([PROMPT] * 8)


def answer(server: Served, key: str = "none", **fields: str) -> tuple[str, int]:
    """The text, and the tokens of the prompt that were found."""
    with server.client(key) as client:
        done = client.completions.create(
            model="bundled", prompt=LONG, max_tokens=12, temperature=0, extra_body=fields
        )
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    return done.choices[0].text, done.usage.prompt_tokens_details.cached_tokens or 0


def opened(folder: Path) -> KVStore:
    return KVStore(f"file://{folder}/store", read="always")


def test_a_server_that_begins_again_finds_what_it_computed(tmp_path: Path) -> None:
    with served(store=opened(tmp_path)) as server:
        text, found = answer(server)
        assert found == 0
    with served(store=opened(tmp_path)) as server:
        again = answer(server)
        assert again[0] == text and again == answer(server)
        metrics = read(server)
    assert metrics["kvloom_store_tokens_read_total", ""] == again[1] > 300


def test_a_server_that_begins_again_restores_sessions_of_agents(tmp_path: Path) -> None:
    def ask(server: Served, prompt: str) -> Any:
        with server.client() as client:
            headers = {"X-Session-Id": "agent"}
            return client.completions.create(
                model="bundled", prompt=prompt, max_tokens=12, extra_headers=headers
            )

    with served(store=opened(tmp_path)) as server:
        first = ask(server, LONG)
    prompt = LONG + first.choices[0].text + "\n"
    with served() as server:
        expected = ask(server, prompt).choices[0].text
    with served(store=opened(tmp_path)) as server:
        second = ask(server, prompt)
    known = first.usage.total_tokens - 1
    assert known % 16
    assert second.choices[0].text == expected
    assert second.usage.session == {
        "id": "agent",
        "restored": True,
        "kept_tokens": known,
        "restored_tokens": known,
        "reason": None,
    }


def test_keys_and_salts_keep_their_pages_apart(tmp_path: Path) -> None:
    keys = ("first", "second")
    with served(store=opened(tmp_path), api_keys=keys) as server:
        answer(server, "first", cache_salt="a")
    with served(store=opened(tmp_path), api_keys=keys) as server:
        found = [answer(server, key, cache_salt=salt)[1] for key in keys for salt in ("a", "b")]
    assert found[0] > 0 and found[1:] == [0, 0, 0]
