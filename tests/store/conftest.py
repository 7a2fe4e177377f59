"""A URL of each kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store.servers import NO_MOTO, NO_REDIS, redis_server, s3_server

URLS = [
    "file",
    "memory",
    *(pytest.param(x, marks=[y, pytest.mark.process]) for x, y in (("redis", NO_REDIS), ("s3", NO_MOTO))),
]


@pytest.fixture(scope="module", params=URLS)
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kind of a store, or the URL of its server."""
    match request.param:
        case "redis":
            with redis_server() as url:
                yield url
        case "s3":
            with s3_server() as url:
                yield url
        case kind:
            yield kind


@pytest.fixture
def url(server: str, tmp_path: Path) -> str:
    """An empty store of each kind."""
    match server.partition(":")[0]:
        case "redis":
            from redis import Redis

            with Redis.from_url(server) as client:
                client.flushdb()
            return server
        case "s3":
            return f"{server}/{tmp_path.name}"
        case kind:
            return f"{kind}://{tmp_path}"
