"""Prompts to tokens: large ones hold up nobody, and what cannot fit is not counted token by token."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any

import oracles.serving
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.serving import PROMPT, Served, served
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import load_model
from kvloom.models import bundled_model_path
from kvloom.serving.answering.prompts import Prompts, most_bytes_per_token
from kvloom.serving.endpoints import asking

TOKENIZER = load_model(bundled_model_path(), progress=False)[1]
LARGE = "word " * 16_000  # 80 kB, and not certainly too long
CHAT = {"messages": [{"role": "user", "content": LARGE}]}


class Held:
    """Large texts whose tokens are made when a test says so."""

    def __init__(self, server: Served, patch: pytest.MonkeyPatch) -> None:
        self.released, self.lock = threading.Event(), threading.Lock()
        self.num_inside = self.most_inside = 0
        self.threads: set[str] = set()
        prompts: Any = server.session.prompts
        patch.setattr(prompts, "_bytes_per_token", None)
        made = prompts.tokens_of

        def held(text: str, *args: Any, **options: Any) -> list[int]:
            if len(text) < 1000:
                tokens: list[int] = made(text, *args, **options)
                return tokens
            with self.lock:
                self.threads.add(threading.current_thread().name)
                self.num_inside += 1
                self.most_inside = max(self.most_inside, self.num_inside)
            self.released.wait()
            try:
                tokens = made(text, *args, **options)
            finally:
                with self.lock:
                    self.num_inside -= 1
            return tokens

        patch.setattr(prompts, "tokens_of", held)

    def close(self) -> None:
        self.released.set()


@pytest.fixture
def server() -> Iterator[Served]:
    with served(max_answers=6, max_tokens=40, api_keys=("one", "two")) as running:
        yield running


@pytest.fixture
def held(server: Served, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(server, monkeypatch)


def post(server: Served, path: str, body: dict[str, Any], key: str = "one") -> tuple[int, str]:
    status, answer = server.send("POST", path, json.dumps(body).encode(), key)
    return status, json.loads(answer).get("error", {}).get("message", "")


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": LARGE}), ("/v1/chat/completions", CHAT)]
)
def test_a_small_request_is_answered_while_large_ones_are_read(
    server: Served, held: Held, path: str, body: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(5) as pool, closing(held):
        large = [pool.submit(post, server, path, body) for _ in range(5)]
        while server.session.num_placed < 5 or not held.num_inside:
            time.sleep(0.005)
        with server.client("two") as client:
            for _ in range(3):
                assert client.completions.create(model="bundled", prompt=PROMPT, max_tokens=2).choices
        assert server.send("GET", "/health")[0] == 200
        assert not any(x.done() for x in large) and server.session.num_placed == 5
        # They have their places already: of six there is one left.
        assert post(server, "/v1/completions", {"prompt": PROMPT, "n": 2}, "two") == (
            429,
            "5 answers are being computed, try again later",
        )
        held.close()
        assert {x.result()[0] for x in large} == {400}
        assert all("the prompt must be at most 2047 tokens, got " in x.result()[1] for x in large)
    assert held.most_inside == 1 and held.threads == {"kvloom-large-prompts_0"}
    assert server.session.num_placed == 0


def test_a_client_that_goes_away_gives_its_place_back(server: Served, held: Held) -> None:
    with ThreadPoolExecutor(1) as pool, closing(held):
        first = pool.submit(post, server, "/v1/completions", {"prompt": LARGE})
        while not held.num_inside:
            time.sleep(0.005)
        body = json.dumps({"prompt": LARGE}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while server.session.num_placed < 2:
                time.sleep(0.005)
        while server.session.num_placed > 1:
            time.sleep(0.005)
        held.close()
        assert first.result()[0] == 400
    assert held.most_inside == 1 and server.session.num_placed == 0


@pytest.mark.parametrize("body", [{"prompt": "a" * 100_000}, {"prompt": [[3] * 20_000]}])
def test_what_certainly_does_not_fit_makes_no_tokens(
    server: Served, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("tokens were made")

    monkeypatch.setattr(server.session.prompts, "_encoded", fail)
    status, message = post(server, "/v1/completions", body)
    assert status == 400 and "the prompt must be at most 2047 tokens, got " in message


def test_a_body_of_many_times_the_room_is_refused_before_it_is_read(server: Served) -> None:
    status, message = post(server, "/v1/completions", {"prompt": "a" * 300_000})
    assert status == 413 and message == (
        "the body must be at most 196608 bytes, as the prompt must be at most 2047 tokens, got 300014"
    )


def test_a_large_request_waits_as_bytes(server: Served, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """What JSON makes of some bytes takes 20 times as much memory."""
    num_read = 0

    def read(data: bytes) -> dict[str, Any]:
        nonlocal num_read
        if len(data) > 1000:
            while server.session.num_placed < 5 and not held.released.is_set():
                time.sleep(0.005)
            num_read += 1
        return made(data)

    made = asking.read_object
    monkeypatch.setattr(asking, "read_object", read)
    with ThreadPoolExecutor(5) as pool, closing(held):
        large = [pool.submit(post, server, "/v1/completions", {"prompt": LARGE}) for _ in range(5)]
        while server.session.num_placed < 5 or not held.num_inside:
            time.sleep(0.005)
        assert post(server, "/v1/completions", {"prompt": PROMPT}, "two")[0] == 200
        assert num_read == 1
        held.close()
        assert {x.result()[0] for x in large} == {400}
    assert num_read == 5


@pytest.mark.parametrize("end", [b"[]]}", b"[]"])
def test_nobody_waits_for_a_search_for_cycles_while_a_request_is_read(end: bytes) -> None:
    """In a million lists it takes ten times as long as they, and all threads wait."""
    started: list[str] = []

    def note(phase: str, info: Any) -> None:
        started.append(phase)

    gc.callbacks.append(note)
    try:
        with nullcontext() if end.endswith(b"}") else pytest.raises(ArgumentError):
            asking.read_object(b'{"prompt": [' + b"[]," * 200_000 + end)
    finally:
        gc.callbacks.remove(note)
    assert started.count("start") < 5 and gc.isenabled()


def test_a_prompt_stays_among_the_positions_of_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of such a model fails a request that does not; the server refuses it, or has it end there."""

    def load(*args: Any, **options: Any) -> Any:
        model, tokenizer = load_model(*args, **options)
        model.config.original_max_position_embeddings = 64
        model.config.rope_parameters = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 32,
            "long_factor": [2.0] * 32,
        }
        return LlamaForCausalLM(model.config).eval(), tokenizer

    monkeypatch.setattr(oracles.serving, "load_model", load)
    with served() as server:
        usual = {"messages": [{"role": "user", "content": "x"}]}
        assert post(server, "/v1/chat/completions", usual) == (200, "")
        assert post(server, "/v1/completions", {"prompt": [3] * 50, "max_tokens": 14}) == (200, "")
        for prompt, num_new in ([3] * 50, 15), ([3] * 64, 1):
            status, message = post(server, "/v1/completions", {"prompt": prompt, "max_tokens": num_new})
            assert status == 400 and message.startswith("the prompt ")


def test_requests_are_read_where_no_thread_can_begin(server: Served) -> None:
    """As where memory is refused, which the session outlives."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}) == (200, "")
        assert post(server, "/v1/completions", {"prompt": LARGE})[0] == 400


def test_what_is_refused_gives_its_place_back(server: Served) -> None:
    for body in ({"nonsense": 1}, {"prompt": ""}, {"prompt": PROMPT, "n": 9}, {"model": "other"}, {}):
        assert post(server, "/v1/completions", body)[0] in (400, 404, 429)
        assert post(server, "/v1/chat/completions", {"messages": [], **body})[0] in (400, 404, 429)
    assert server.session.num_placed == 0


def test_a_request_that_says_nothing_gets_what_openais_gives(server: Served) -> None:
    with server.client("one") as client:
        text = client.completions.create(model="bundled", prompt=PROMPT)
        assert text.usage is not None and text.usage.completion_tokens == 16
        assert text.choices[0].finish_reason == "length"
        asked = client.chat.completions.create(model="bundled", messages=[{"role": "user", "content": "x"}])
        assert asked.usage is not None and asked.usage.completion_tokens == 40  # --max-tokens
        near = client.completions.create(model="bundled", prompt=[3] * 2040)
        assert near.usage is not None and near.usage.total_tokens == 2048


@given(text=st.text("ab \n\t=-ä€😀", max_size=300), times=st.sampled_from([1, 7, 50]))
def test_a_text_has_at_least_the_tokens_that_are_certain(text: str, times: int) -> None:
    most = most_bytes_per_token(TOKENIZER)
    assert most == 38
    assert len(TOKENIZER(text * times).input_ids) * most >= len((text * times).encode())


def tokenizer(**parts: Any) -> PreTrainedTokenizerFast:
    """Of byte pairs: single bytes and a few letters, read as by Llama 2 unless ``parts`` say otherwise."""
    names = [f"<0x{x:02X}>" for x in range(256)] + ["▁", "a", "b", "aaaa"]
    backend = Tokenizer(
        parts.get("model", BPE({x: i for i, x in enumerate(names)}, [], byte_fallback=True, fuse_unk=True))
    )
    backend.normalizer = parts.get(
        "normalizer", normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    )
    backend.pre_tokenizer = parts.get("pre_tokenizer")
    backend.decoder = decoders.ByteFallback()
    backend.add_special_tokens(parts.get("added", []))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_what_is_certain_of_tokenizers_that_fall_back_to_bytes() -> None:
    assert most_bytes_per_token(tokenizer()) == 6
    assert most_bytes_per_token(tokenizer(added=["<|a longer one|>"])) == 16
    composed = tokenizer(normalizer=normalizers.NFC())
    most = most_bytes_per_token(composed)
    text = "\u1100\u1161\u11a8" * 100  # nine bytes each, which become three
    assert most == 24 and len(composed(text).input_ids) * most >= len(text.encode())


@pytest.mark.parametrize(
    "parts",
    [
        {"model": WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")},
        {"model": BPE({"a": 0, "[UNK]": 1}, [], unk_token="[UNK]", fuse_unk=True)},
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace(Regex(" +"), " ")},
        {"normalizer": normalizers.Replace("aa", "a")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
        {"added": [AddedToken("<mask>", lstrip=True)]},
        {"added": [AddedToken("<mask>", rstrip=True)]},
    ],
)
def test_a_tokenizer_that_takes_text_away_makes_nothing_certain(parts: dict[str, Any]) -> None:
    reader = tokenizer(**parts)
    assert most_bytes_per_token(reader) is None
    assert Prompts(reader).tokens_of("a " * 20, 100) == reader("a " * 20).input_ids


class Doubling(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Reads a text in its own way."""

    def _encode_plus(self, text: str, *args: Any, **options: Any) -> Any:
        return super()._encode_plus(text + text, *args, **options)


@pytest.mark.parametrize("text", ["", "a", "import os\n", "<|eos|>ä€😀 x"])
@pytest.mark.parametrize("special", [False, True])
def test_tokens_are_those_of_the_tokenizer(text: str, special: bool) -> None:
    doubling = Doubling(tokenizer_object=TOKENIZER.backend_tokenizer)
    for reader in (TOKENIZER, tokenizer(), doubling):
        made = Prompts(reader).tokens_of(text, 100, add_special_tokens=special)
        assert made == reader(text, add_special_tokens=special).input_ids
    assert len(doubling("a", add_special_tokens=False).input_ids) == 2
