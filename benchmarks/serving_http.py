"""Many clients of one server: ``transformers serve --continuous-batching`` and ``kvloom serve``.

24 clients ask at once for 48 greedy tokens each after prompts that share their first 3,000 characters, of the
bundled model in float32, with pages of 16 tokens and at most 2,048 tokens in a step. Each round has a prefix
of its own. The servers take turns; one answers while the others wait. ``cpu_s`` are seconds of the server's
process between the first request and the last answer, in user and in kernel mode, the median of the rounds;
``same`` counts answers that are those of the first server.

Prediction: five times less than stock, which computes the prefix once for each of those that come together,
and attends to the keys of all requests.

Prints one JSON line. For Linux.
"""

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rounds import in_turn

from kvloom.models import bundled_model_path, corpus_files

STOCK = "transformers serve"
OURS = {"kvloom float": "auto", "kvloom int8": "int8"}
WAYS = (STOCK, *OURS)
PREFIX, OWN, NEW_TOKENS = 3000, 200, 48
MODEL = str(bundled_model_path())


def command(way: str, port: int) -> list[str]:
    """Command that starts a server."""
    if way == STOCK:
        program = "transformers.cli.transformers"
        options = ["--continuous-batching", "--dtype", "float32", "--device", "cpu"]
        options += ["--cb-block-size", "16", "--cb-max-batch-tokens", "2048", "--cb-num-blocks", "4096"]
    else:
        program = "kvloom.cli"
        options = ["--kv", OURS[way], "--page-size", "16", "--max-batch-tokens", "2048", "--pages", "4096"]
    code = f"import sys; from {program} import main; sys.exit(main())"
    return [sys.executable, "-c", code, "serve", MODEL, "--port", str(port), *options]


@dataclass
class Server:
    """A running server, and what it has answered."""

    port: int
    process: subprocess.Popen[bytes]
    texts: list[str] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the server's process until now."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ask(self, prompt: str) -> str:
        """The answer to one request."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer}")
        return str(answer["choices"][0]["text"])

    def answer(self, prompts: list[str]) -> float:
        """CPU seconds for all of them at once."""
        cpu, wall = self.cpu_seconds, time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            self.texts += pool.map(self.ask, prompts)
        self.walls.append(time.perf_counter() - wall)
        return self.cpu_seconds - cpu


@contextmanager
def running(way: str) -> Iterator[Server]:
    """A server that has answered once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "KVLOOM_API_KEY": ""}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(way, port), env=environment, **streams) as process:
        try:
            while process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.1)
            if process.poll() is not None:
                raise RuntimeError(f"{way} ended with status {process.returncode}")
            server = Server(port, process)
            server.ask("import os\n")
            yield server
        finally:
            process.terminate()


def make_prompts(number: int, clients: int) -> list[str]:
    """Prompts of one round: the same beginning, and an end of each."""
    text = max((file.read() for file in corpus_files("heldout")), key=len)
    text = f"# {number}\n{text}"
    ends = range(PREFIX + 1000, PREFIX + 1000 + clients * OWN, OWN)
    return [text[:PREFIX] + "\n" + text[at : at + OWN] for at in ends]


def measure(ways: list[str], clients: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of some ways."""
    with ExitStack() as stack:
        servers = {way: stack.enter_context(running(way)) for way in ways}
        calls = {
            way: lambda s=server: s.answer(make_prompts(len(s.walls), clients))
            for way, server in servers.items()
        }
        cpu = in_turn(calls, rounds, 0)
    first = servers[ways[0]]
    return [
        {
            "way": way,
            "cpu_s": median(cpu[way]),
            "wall_s": median(server.walls),
            "less": median(cpu[ways[0]]) / median(cpu[way]),
            "same": sum(a == b for a, b in zip(server.texts, first.texts, strict=True)),
        }
        for way, server in servers.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two clients, to see that it runs")
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.clients, args.rounds = 2, 1
    rows = measure(args.ways, args.clients, args.rounds)
    result = {"figure": "serving_http", "clients": args.clients, "rounds": args.rounds, "rows": rows}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
