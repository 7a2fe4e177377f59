"""``kvloom serve`` as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import Any

import openai
import pytest
from oracles.serving import PROMPT

# A process imports for seconds; `make slow` sends the other signal, too.
SIGNALS = [signal.SIGTERM, signal.SIGINT] if "KVLOOM_SIGNALS" in os.environ else [signal.SIGTERM]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_server_that_is_stopped_gives_the_answer_that_has_begun(number: signal.Signals) -> None:
    code = "import sys; from kvloom.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--kv", "int8", "--name", "small", "--port", "0"]
    environment = {**os.environ, "KVLOOM_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.fullmatch(r"kvloom: small at (http://127\.0\.0\.1:\d+/v1)\n", line)
    assert found, line
    client = openai.OpenAI(base_url=found[1], api_key="secret", max_retries=0)
    stream: Any = client.completions.create(model="small", prompt=PROMPT, max_tokens=40, stream=True)
    chunks = [next(stream)]
    process.send_signal(number)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert process.wait() == 0
    assert process.stderr.read() == ""
    process.stderr.close()
    client.close()
