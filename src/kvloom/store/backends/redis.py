"""Redis and Valkey: each object is a string."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import redis

from kvloom.store.backends import Stored

_PREFIX: Final = "kvloom:"
_USED: Final = "kvloom-used"
"""A sorted set of names by when they were used: Redis' own idle time begins anew when a length is asked."""


class Redis:
    """A ``Backend`` in one database, under keys that begin with ``kvloom:``.

    Args:
        url: ``redis://user:password@host:port/database``, or ``rediss`` for TLS.
        timeout: Seconds after which one request gives up.
    """

    def __init__(self, url: str, timeout: float) -> None:
        with _errors():
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout
            )

    def exists(self, name: str) -> bool:
        with _errors():
            return bool(self._client.exists(_PREFIX + name))

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> memoryview:
        key = _PREFIX + name
        with _errors(), self._client.pipeline(transaction=True) as calls:
            calls.exists(key)
            for start, end in ranges:
                calls.getrange(key, start, end - 1)
            there, *parts = calls.execute()
        if not there:
            raise FileNotFoundError(name)
        return memoryview(bytearray().join(parts))

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        with _errors(), self._client.pipeline(transaction=True) as calls:
            calls.set(_PREFIX + name, b"".join(parts), nx=True)
            calls.zadd(_USED, {name: time.time()}, nx=True)
            is_new, _ = calls.execute()
        return bool(is_new)

    def touch(self, name: str) -> None:
        with _errors():
            self._client.zadd(_USED, {name: time.time()}, xx=True)

    def delete(self, name: str) -> None:
        with _errors(), self._client.pipeline(transaction=True) as calls:
            calls.delete(_PREFIX + name)
            calls.zrem(_USED, name)
            calls.execute()

    def list_stored(self, prefix: str = "") -> list[Stored]:
        with _errors():
            keys = list(self._client.scan_iter(match=f"{_PREFIX}{prefix}*", count=1000))
            with self._client.pipeline(transaction=False) as calls:
                for key in keys:
                    calls.strlen(key)
                sizes = calls.execute()
            used = dict(self._client.zrange(_USED, 0, -1, withscores=True))
        names = [key.removeprefix(_PREFIX.encode()) for key in keys]
        return [
            Stored(name.decode(), size, used.get(name, 0.0))
            for name, size in zip(names, sizes, strict=True)
            if name in used or size  # not gone since
        ]


@contextmanager
def _errors() -> Iterator[None]:
    """Redis' errors as the system's."""
    try:
        yield
    except (redis.RedisError, ValueError) as error:
        raise OSError(str(error)) from error
