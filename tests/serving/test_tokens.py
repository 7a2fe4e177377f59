"""Tokens of texts and texts of tokens, without an answer; and embeddings, which there are none of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from oracles.serving import PROMPT, Served, served

USER = {"role": "user", "content": "list files"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_keys=("one",)) as running:
        yield running


def post(server: Served, path: str, **body: Any) -> Any:
    status, answer = server.send("POST", path, json.dumps(body).encode(), "one")
    read = json.loads(answer)
    return read if status == 200 else (status, read["error"]["message"])


@pytest.mark.parametrize("text", [PROMPT, "", "ä€😀 <|eos|>\n", "import os\n" * 20_000])
def test_a_text_has_the_tokens_of_the_tokenizer_and_comes_back(server: Served, text: str) -> None:
    """Also one that is longer than the model can read."""
    made = post(server, "/tokenize", model="bundled", prompt=text, add_special_tokens=False)
    tokens = server.session.tokenizer(text, add_special_tokens=False).input_ids
    assert made == {"tokens": tokens, "count": len(tokens), "max_model_len": 2048}
    assert post(server, "/detokenize", model="bundled", tokens=tokens) == {"prompt": text}


def test_a_prompt_has_the_special_tokens_that_a_completion_has(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = post(server, "/tokenize", prompt=PROMPT)
    with server.client("one") as client:
        usage = client.completions.create(model="bundled", prompt=PROMPT, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens == made["count"]
        chat = post(server, "/tokenize", messages=[USER])
        asked = client.chat.completions.create(model="bundled", messages=[USER], max_tokens=1).usage  # type: ignore[list-item]
        assert asked is not None and asked.prompt_tokens == chat["count"]
    decoded = server.session.tokenizer.decode(chat["tokens"])
    assert decoded == "# user: list files\nimport os\n"
    bare = post(server, "/tokenize", messages=[USER], add_generation_prompt=False)
    assert server.session.tokenizer.decode(bare["tokens"]) == "# user: list files\n"
    monkeypatch.setattr(server.session.tokenizer, "chat_template", None)
    assert post(server, "/tokenize", messages=[USER])[0] == 400


def test_tokens_have_their_texts_where_they_are_asked_for(server: Served) -> None:
    made = post(server, "/tokenize", prompt="import os € ", return_token_strs=True, add_special_tokens=False)
    assert len(made["token_strs"]) == made["count"] > 3 and made["token_strs"][0] == "import"
    assert any(text.startswith("bytes:") for text in made["token_strs"])


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"prompt": 3}, "prompt must be a text, got 3"),
        ("/tokenize", {}, "prompt must be a text, got None"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "'prompt' is no field that is supported"),
        ("/tokenize", {"messages": []}, "messages must be a list of at least one message"),
        ("/tokenize", {"messages": [{**USER, "name": "ada"}]}, "messages[0].name must be left out"),
        (
            "/tokenize",
            {"prompt": "x", "add_special_tokens": "no"},
            "add_special_tokens must be true or false",
        ),
        ("/tokenize", {"prompt": "x", "stream": True}, "'stream' is no field that is supported"),
        ("/detokenize", {"tokens": "x"}, "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": [True]}, "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": [2**70]}, "tokens must be token ids from 0 to 2047"),
        ("/detokenize", {"tokens": [-1]}, "tokens must be token ids from 0 to 2047"),
        ("/detokenize", {"tokens": [3], "prompt": "x"}, "'prompt' is no field that is supported"),
    ],
)
def test_what_is_asked_wrongly_is_a_sentence(
    server: Served, path: str, body: dict[str, Any], words: str
) -> None:
    status, message = post(server, path, **body)
    assert status == 400 and words in message


def test_both_need_a_key_and_the_model(server: Served) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [3]})):
        assert server.send("POST", path, json.dumps(body).encode())[0] == 401
        assert post(server, path, model="other", **body) == (404, "model must be 'bundled', got 'other'")
        assert server.send("POST", path, b"{", "one")[0] == 400


def test_there_are_no_embeddings(server: Served) -> None:
    with server.client("one") as client, pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model="bundled", input="x")
    assert error.value.type == "invalid_request_error"
    assert "models generate text here, and there are no embeddings of it" in str(error.value)
