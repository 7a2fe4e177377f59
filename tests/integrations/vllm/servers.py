"""vLLM's server in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from integrations.vllm.engines import INT8, NEW_TOKENS, prompts

from kvloom.models import bundled_model_path


class Server:
    """A server that may still be starting, on a port of loopback.

    Args:
        log: File that it writes to.
        options: Its arguments, besides the model, int8 pages and their size.
    """

    def __init__(self, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(bundled_model_path()), "--served-model-name", "bundled", "--dtype", "float32"),
            *("--kv-cache-dtype", INT8, "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(64 << 20), "--host", "127.0.0.1"),
            *("--port", self.url.rpartition(":")[2], *options),
        ]
        self.log = log
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def client(self) -> Any:
        """An ``openai`` client, to be closed, when the server answers."""
        import openai

        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                urllib.request.urlopen(f"{self.url}/health").close()
                return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)

    def answers(self) -> tuple[list[list[int]], int]:
        """Greedy tokens behind the prompts, and how many tokens those have."""
        with self.client() as client:
            answer = client.completions.create(
                model="bundled",
                prompt=prompts(),
                temperature=0,
                max_tokens=NEW_TOKENS,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
        return [choice.token_ids for choice in answer.choices], answer.usage.prompt_tokens

    def count(self, name: str) -> int:
        """A counter of its metrics, without ``vllm:`` and ``_total``."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(x.split()[-1]) for x in lines if x.startswith(f"vllm:{name}_total{{")))


@contextmanager
def server(log: Path, *options: str) -> Iterator[Server]:
    """A server that ends with the block."""
    started = Server(log, *options)
    try:
        yield started
    finally:
        started.process.terminate()
        started.process.wait()


def with_store(url: str) -> list[str]:
    """Options of a server that shares a store."""
    transfer = {
        "kv_connector": "KvloomConnector",
        "kv_connector_module_path": "kvloom.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": url},
    }
    return ["--block-size", "32", "--kv-transfer-config", json.dumps(transfer)]
