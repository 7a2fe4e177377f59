"""A server in a thread of its own, and what it must answer."""

from __future__ import annotations

import http.client
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any
from unittest import mock

import openai
from transformers import ContinuousBatchingConfig

from kvloom.cli import main
from kvloom.integrations.transformers import load_model
from kvloom.models import bundled_model_path
from kvloom.serving.answering.session import ServingSession
from kvloom.serving.endpoints.models import Model
from kvloom.serving.server import application, listener_of, server_of
from kvloom.serving.settings import Settings

TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}import os\n{% endif %}"
)
PROMPT = (
    "import os\nimport sys\n\n\ndef walk(path, name, *, follow=False):\n"
    "    for root, dirs, files in os.walk(path):\n        if"
)


@dataclass
class Served:
    """A running server."""

    session: ServingSession
    port: int
    settings: Settings

    def client(self, key: str = "none") -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0)

    def send(
        self, method: str, path: str, body: bytes = b"", key: str | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """Status and body of a plain request."""
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        with closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            connection.request(method, path, body, headers)
            with connection.getresponse() as response:
                return response.status, response.read()

    def until(self, **expected: int) -> None:
        """Wait for fields of the report."""
        while any(getattr(self.session.report(), name) != value for name, value in expected.items()):
            time.sleep(0.005)


def make_session(
    kv: str, config: dict[str, Any] | None, settings: Settings, model: Any = None, **options: Any
) -> ServingSession:
    """A session that has not begun, of the bundled model or of another with its tokens.

    ``options`` are ``batch_invariant``, ``pack``, ``store`` and ``drafts``.
    """
    bundled, tokenizer = load_model(bundled_model_path(), progress=False)
    tokenizer.chat_template = TEMPLATE
    cb_config = ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 256, **(config or {})})
    model = bundled.float() if model is None else model
    return ServingSession(model, tokenizer, settings, cb_config, kv=kv, **options)


@contextmanager
def served(
    kv: str = "int8",
    config: dict[str, Any] | None = None,
    batch_invariant: bool | None = None,
    pack: bool | str = False,
    model: Any = None,
    store: Any = None,
    drafts: str | None = None,
    **options: Any,
) -> Iterator[Served]:
    """A server of the bundled model, or of another with its tokens; ``options`` are of ``Settings``."""
    settings = Settings(port=0, **options)
    how = {"batch_invariant": batch_invariant, "pack": pack, "store": store, "drafts": drafts}
    session = make_session(kv, config, settings, model, **how)
    with running([Model(("bundled",), session)], settings) as port:
        yield Served(session, port, settings)


@contextmanager
def running(models: list[Model], settings: Settings) -> Iterator[int]:
    """The port of a server of these models, in a thread."""
    with listener_of(settings) as listener:
        server = server_of(application(models, settings), settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def paced(session: ServingSession, wait: Callable[[], object]) -> Iterator[None]:
    """Each step of a session first calls ``wait``; a step may still wait when the ``with`` block is left."""
    step = session.manager._generation_step

    def compute() -> None:
        wait()
        step()

    with mock.patch.object(session.manager, "_generation_step", compute):
        yield


SAYS = r"kvloom: .+ at (https?://127\.0\.0\.1:\d+/v1)\n"
"""The line of a server that has begun."""


def serve(ask: Callable[[str], object], *options: str) -> tuple[int, str]:
    """``kvloom serve`` in this process, until ``ask`` returns, which is called with its URL in a thread.

    The server has the main thread, as it needs to be told by a signal.

    Returns:
        Its exit status, and what it has said on standard error behind its URL.
    """
    said, ended = io.StringIO(), threading.Event()

    def ask_and_stop() -> None:
        try:
            while (found := re.match(SAYS, said.getvalue())) is None:
                assert not ended.wait(0.005), said.getvalue()
            ask(found[1])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        with ThreadPoolExecutor(1) as pool, mock.patch.dict(os.environ), redirect_stderr(said):
            asked = pool.submit(ask_and_stop)
            try:
                status = main(["serve", "--port", "0", *options])
            finally:
                ended.set()
            asked.result()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    return status, re.sub(SAYS, "", said.getvalue())


@contextmanager
def started(*options: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``kvloom serve`` as a process, and the URL that it says; it is killed unless it has ended."""
    code = "import sys; from kvloom.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--port", "0", *options]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.fullmatch(SAYS, line)
            assert found, line
            yield found[1], process
        finally:
            process.kill()
