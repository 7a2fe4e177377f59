"""Real servers on loopback, started by the tests that need them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

NO_REDIS = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs Debian's redis-server")
NO_MOTO = pytest.mark.skipif(find_spec("moto") is None, reason="needs moto[server]")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(*command: str, port: int) -> Iterator[None]:
    """A process that listens on a port of loopback."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(6000):
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None, f"{command[0]} ended"
                time.sleep(0.05)
            yield
        finally:
            process.kill()


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of an empty Redis."""
    port = free_port()
    options = (
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        "/tmp",
    )
    with serving("redis-server", *options, port=port):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of an empty bucket, whose endpoint is in the environment."""
    port = free_port()
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), port=port),
    ):
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ALLOW_HTTP", "true")
        make_bucket(port)
        yield "s3://bucket/folder"


def make_bucket(port: int) -> None:
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", port)
    try:
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
    finally:
        connection.close()
