"""``kvloom serve`` as a command, and as a process."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
from campaign import is_whole
from oracles.serving import PROMPT, serve, started

from kvloom.tracing.recording import causes_of, read_lines, requests_of

pytestmark = pytest.mark.process

# A process imports for seconds; ``--campaign`` sends the other signal, too.
NUMBERS = 2 * 16 * 5 * 2 * 64
"""In a page: keys and values of 16 tokens in 5 layers with 2 heads of 64."""
SIGNALS = [signal.SIGTERM, signal.SIGINT] if is_whole() else [signal.SIGTERM]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_server_that_is_stopped_gives_the_answer_that_has_begun(
    number: signal.Signals, tmp_path: Path
) -> None:
    options = ["--kv", "int8", "--name", "small", "--policy", "ours", "--pack", "both"]
    options += ["--record", str(tmp_path / "events.jsonl")]
    with started(*options, KVLOOM_API_KEY="secret") as (url, process):
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        stream: Any = client.completions.create(model="small", prompt=PROMPT, max_tokens=40, stream=True)
        chunks = [next(stream)]
        asked = Request(f"{url[:-3]}/metrics", headers={"Authorization": "Bearer secret"})
        metrics = urlopen(asked).read().decode()
        assert 'kvloom_batch_invariant{model="small"} 1.0' in metrics
        assert int(float(re.search(r"^kvloom_packed_bytes\{.*\} (\S+)$", metrics, re.MULTILINE)[1])) > 1 << 20  # type: ignore[index]
        process.send_signal(number)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert process.wait() == 0
        assert process.stderr is not None and process.stderr.read() == ""
        client.close()
    recorded = read_lines(tmp_path / "events.jsonl")
    assert [x["name"] for x in recorded if x.get("kind") == "name"] == [chunks[0].id]
    (request,) = requests_of(recorded).values()
    assert not request.found and causes_of([request]) == {"never stored": 1, "below": len(request.nodes) - 1}
    assert not any("text" in x or "tokens" in x for x in recorded if "node" in x)


def test_a_server_of_the_bundled_model_answers_a_chat() -> None:
    def ask(url: str) -> None:
        messages: Any = [{"role": "user", "content": "Count the lines of a file"}]
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="stdlib-4m", messages=messages, max_tokens=24)
            said = answer.choices[0].message.content
            assert said is not None and re.match(r" \w+\(.*\):\n    ", said)  # the rest of a function's head
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Close it"}]
            usage = client.chat.completions.create(model="stdlib-4m", messages=messages, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (
            usage.prompt_tokens_details.cached_tokens == 32
        )  # the full pages of the first prompt and its answer
        assert kept(url) == ("auto", 4 * NUMBERS)

    assert serve(ask) == (0, "")


def kept(url: str) -> tuple[str, int]:
    """The kind of a server's pages, and the bytes of one."""
    state = json.load(urlopen(f"{url[:-3]}/dashboard/state"))
    return state["kv"], state["report"]["page_bytes"]


def test_a_server_computes_and_keeps_as_its_options_say() -> None:
    def ask(url: str) -> None:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
        answer = json.load(urlopen(Request(f"{url}/completions", body)))
        assert answer["usage"]["completion_tokens"] == 2
        scales = NUMBERS // 64  # of 2 bytes
        assert kept(url) == ("int8:g64/int4:g64", NUMBERS * 3 // 4 + 2 * scales)

    assert serve(ask, "--dtype", "float16", "--kv", "int8", "--values", "int4")[0] == 0


def test_limits_are_as_the_options_say_and_layers_and_requests_are_lines() -> None:
    options = ["--max-body-bytes", "1000", "--max-header-bytes", "900", "--max-tokens", "3", "--access-log"]
    options += ["--dtype", "bfloat16", "--pack", "both", "--no-batch-invariant"]
    seconds = [
        "--header-seconds",
        "0.3",
        "--body-seconds",
        "0.4",
        "--max-seconds",
        "9",
        "--drain-seconds",
        "2",
    ]
    with started(*options, *seconds, ONEDNN_MAX_CPU_ISA="AVX2") as (url, process):
        assert kept(url) == ("auto", 2 * NUMBERS)
        metrics = urlopen(f"{url[:-3]}/metrics").read().decode()
        for name in ("kvloom_batch_invariant", "kvloom_packed_bytes"):
            assert f'{name}{{model="stdlib-4m"}} 0.0' in metrics

        def status(body: bytes, **headers: str) -> int:
            with closing(http.client.HTTPConnection(url.split("/")[2])) as connection:
                connection.request("POST", "/v1/completions?key=value", body, headers)
                return connection.getresponse().status

        prompt = {"prompt": "import os", "max_tokens": 3}
        assert status(json.dumps(prompt).encode()) == 200
        assert status(json.dumps({**prompt, "max_tokens": 4}).encode()) == 400
        assert status(b" " * 1001) == 413
        assert status(b"", X=900 * "x") == 431
        assert status(b"", **{"Content-Length": "9"}) == 408
        host, port = url.split("/")[2].split(":")
        with socket.create_connection((host, int(port))) as connection:
            assert connection.recv(1) == b""  # closed without a byte
        process.terminate()
        assert process.wait() == 0
        assert process.stderr is not None
        layers, first, second, *lines = process.stderr.read().splitlines()
    assert layers == "linear layers that are not packed: 35, bfloat16 without its instructions; 1, tied"
    assert " GET /dashboard/state 200 " in first and " GET /metrics 200 " in second
    told = [re.fullmatch(r"[-\d]+ [\d:,]+ POST /v1/completions (\d+) [\d.]+ ms(.*)", line) for line in lines]
    assert [x[1] for x in told if x] == ["200", "400", "413", "431", "408"] and len(told) == 5
    assert told[0] is not None and told[0][2] == " prompt=2 found=0 new=3"
