"""Backends in object stores by obstore: S3 and compatible ones, Google Cloud Storage, Azure."""

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import from_url

from kvloom.store.backends import Stored

_AT_ONCE: Final = 100
"""Number of names that are converted to Python objects within a millisecond."""


class Objects:
    """``Backend`` in a bucket; obstore reads credentials and endpoints from the environment.

    Args:
        url: ``s3://bucket/folder``, ``gs://bucket/folder`` or ``az://account/container/folder``.
        timeout: Timeout of one request, in seconds.
    """

    def __init__(self, url: str, timeout: float) -> None:
        seconds = datetime.timedelta(seconds=timeout)
        with _errors():
            self._store: Any = from_url(
                url,
                client_options={"timeout": seconds, "connect_timeout": seconds, "allow_http": True},
                retry_config={"max_retries": 1, "retry_timeout": seconds},
            )

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        try:
            return self._read(name, ranges)
        except (FileNotFoundError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # obstore panics if an object ends within one of several ranges
            with _errors():
                size = obstore.head(self._store, name)["size"]
            within = [(min(start, size), min(end, size)) for start, end in ranges]
            if within == ranges:
                raise error if isinstance(error, OSError) else OSError(str(error)) from error
        return self._read(name, within)

    def _read(self, name: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        """Read ranges that are inside the object."""
        found: dict[tuple[int, int], bytearray] = {}
        wanted = list(dict.fromkeys(x for x in ranges if x[0] < x[1]))  # obstore takes no empty ones
        if wanted:
            starts, ends = zip(*wanted, strict=True)
            read: Callable[..., Any] = obstore.get_ranges
            with _errors():
                parts = map(bytearray, read(self._store, name, starts=starts, ends=ends))
            found = dict(zip(wanted, parts, strict=True))
        return [memoryview(found.get(x, b"")) for x in ranges]

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        try:
            with _errors():
                obstore.put(self._store, name, b"".join(parts), mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    def touch(self, name: str) -> None:
        """Nothing: object stores record only when an object was written."""

    def delete(self, name: str) -> None:
        try:
            with _errors():
                obstore.delete(self._store, name)
        except FileNotFoundError:
            pass

    def rename(self, name: str, to: str) -> None:
        with _errors():
            obstore.rename(self._store, name, to, overwrite=True)

    def list_stored(self, prefix: str = "") -> Iterator[Stored]:
        with _errors():
            for chunk in obstore.list(self._store, prefix=prefix or None, chunk_size=_AT_ONCE):
                for x in chunk:
                    yield Stored(x["path"], x["size"], x["last_modified"].timestamp())

    def version(self, prefix: str) -> float | None:
        """``None``: object stores do not record removals."""


@contextmanager
def _errors() -> Iterator[None]:
    """Context that raises obstore's errors as ``OSError``."""
    try:
        yield
    except NotFoundError as error:
        raise FileNotFoundError(str(error)) from error
    except AlreadyExistsError as error:
        raise FileExistsError(str(error)) from error
    except BaseError as error:
        raise OSError(str(error).splitlines()[0]) from error
