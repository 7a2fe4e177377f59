"""``kvloom serve`` as a process."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
from oracles.serving import PROMPT, started

from kvloom.tracing.recording import causes_of, read_lines, requests_of

# A process imports for seconds; `make slow` sends the other signal, too.
SIGNALS = [signal.SIGTERM, signal.SIGINT] if "KVLOOM_SIGNALS" in os.environ else [signal.SIGTERM]


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
        assert "kvloom_batch_invariant 1.0" in metrics
        assert int(float(re.search(r"^kvloom_packed_bytes (\S+)$", metrics, re.MULTILINE)[1])) > 1 << 20  # type: ignore[index]
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
    with started() as (url, _), openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Count the lines of a file"}]
        answer = client.chat.completions.create(model="stdlib-4m", messages=messages, max_tokens=24)
        said = answer.choices[0].message.content
        assert said is not None and re.match(r" \w+\(.*\):\n    ", said)  # the rest of a function's head
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Close it"}]
        usage = client.chat.completions.create(model="stdlib-4m", messages=messages, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (
            usage.prompt_tokens_details.cached_tokens == 32
        )  # the full pages of the first prompt and its answer
