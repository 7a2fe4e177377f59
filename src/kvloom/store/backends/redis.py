"""Backend in Redis or Valkey: each object is a string."""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import redis

from kvloom.store.backends import Stored

_PREFIX: Final = "kvloom:"
_USED: Final = "kvloom-used"
"""Key of a sorted set of names by last use: asking for a length resets Redis' own idle time."""
_AT_ONCE: Final = 200
"""Number of names of one request: the answers are parsed within a millisecond."""


class Redis:
    """``Backend`` in one database, under keys that begin with ``kvloom:``.

    Args:
        url: ``redis://user:password@host:port/database``, or ``rediss`` for TLS.
        timeout: Timeout of one request, in seconds.
    """

    def __init__(self, url: str, timeout: float) -> None:
        with _errors():
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout
            )

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        key = _PREFIX + name
        with _errors(), self._client.pipeline(transaction=True) as calls:
            calls.exists(key)
            for start, end in ranges:
                first, last = (start, end - 1) if start < end else (1, 0)  # -1 would be the last byte
                calls.getrange(key, first, last)
            there, *parts = calls.execute()
        if not there:
            raise FileNotFoundError(name)
        return [memoryview(bytearray(x)) for x in parts]

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

    def rename(self, name: str, to: str) -> None:
        try:
            with _errors():
                self._client.rename(_PREFIX + name, _PREFIX + to)
        except OSError:
            with _errors():
                is_there = self._client.exists(_PREFIX + name)
            if is_there:
                raise
            raise FileNotFoundError(name) from None
        with _errors(), self._client.pipeline(transaction=True) as calls:
            calls.zrem(_USED, name)
            calls.zadd(_USED, {to: time.time()})
            calls.execute()

    def list_stored(self, prefix: str = "") -> Iterator[Stored]:
        with _errors():
            keys, at = set(), 0
            while True:
                at, some = self._client.scan(at, match=f"{_PREFIX}{prefix}*", count=1000)
                keys.update(some)
                if not at:
                    break
            asked = sorted(keys)
            for start in range(0, len(asked), _AT_ONCE):
                names = [key.removeprefix(_PREFIX.encode()) for key in asked[start : start + _AT_ONCE]]
                with self._client.pipeline(transaction=False) as calls:
                    for name in names:
                        calls.strlen(_PREFIX.encode() + name)
                        calls.zscore(_USED, name)
                    answers = calls.execute(raise_on_error=False)  # a key of another type is not ours
                for name, size, used in zip(names, answers[::2], answers[1::2], strict=True):
                    is_string = isinstance(size, int) and not isinstance(used, redis.RedisError)
                    if is_string and (size or used is not None):  # not removed since
                        yield Stored(name.decode("utf-8", "replace"), size, used or 0.0)

    def version(self, prefix: str) -> float | None:
        """``None``: Redis does not record removals."""


@contextmanager
def _errors() -> Iterator[None]:
    """Context that raises Redis' errors as ``OSError``."""
    try:
        yield
    except redis.exceptions.OutOfMemoryError as error:
        raise OSError(errno.ENOSPC, str(error)) from error
    except (redis.RedisError, ValueError) as error:
        raise OSError(str(error)) from error
