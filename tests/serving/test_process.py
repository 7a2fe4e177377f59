"""``kvloom serve`` as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
from oracles.serving import PROMPT

from kvloom.tracing.recording import causes_of, read_lines, requests_of

# A process imports for seconds; `make slow` sends the other signal, too.
SIGNALS = [signal.SIGTERM, signal.SIGINT] if "KVLOOM_SIGNALS" in os.environ else [signal.SIGTERM]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_server_that_is_stopped_gives_the_answer_that_has_begun(
    number: signal.Signals, tmp_path: Path
) -> None:
    code = "import sys; from kvloom.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--kv", "int8", "--name", "small", "--port", "0"]
    command += ["--policy", "ours", "--record", str(tmp_path / "events.jsonl"), "--pack", "both"]
    environment = {**os.environ, "KVLOOM_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.fullmatch(r"kvloom: small at (http://127\.0\.0\.1:\d+/v1)\n", line)
    assert found, line
    client = openai.OpenAI(base_url=found[1], api_key="secret", max_retries=0)
    stream: Any = client.completions.create(model="small", prompt=PROMPT, max_tokens=40, stream=True)
    chunks = [next(stream)]
    asked = Request(f"{found[1][:-3]}/metrics", headers={"Authorization": "Bearer secret"})
    metrics = urlopen(asked).read().decode()
    assert "kvloom_batch_invariant 1.0" in metrics
    assert int(float(re.search(r"^kvloom_packed_bytes (\S+)$", metrics, re.MULTILINE)[1])) > 1 << 20  # type: ignore[index]
    process.send_signal(number)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert process.wait() == 0
    assert process.stderr.read() == ""
    process.stderr.close()
    client.close()
    recorded = read_lines(tmp_path / "events.jsonl")
    assert [x["name"] for x in recorded if x.get("kind") == "name"] == [chunks[0].id]
    (request,) = requests_of(recorded).values()
    assert not request.found and causes_of([request]) == {"never stored": 1, "below": len(request.nodes) - 1}
    assert not any("text" in x or "tokens" in x for x in recorded if "node" in x)
