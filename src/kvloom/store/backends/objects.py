"""Object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure, all through obstore."""

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import from_url

from kvloom.store.backends import Stored

_AT_ONCE: Final = 100
"""Names that become Python's objects within a millisecond."""


class Objects:
    """A ``Backend`` in a bucket; credentials and endpoints come from the environment, as obstore documents.

    Args:
        url: ``s3://bucket/folder``, ``gs://bucket/folder`` or ``az://account/container/folder``.
        timeout: Seconds after which one request gives up.
    """

    def __init__(self, url: str, timeout: float) -> None:
        seconds = datetime.timedelta(seconds=timeout)
        with _errors():
            self._store: Any = from_url(
                url,
                client_options={"timeout": seconds, "connect_timeout": seconds, "allow_http": True},
                retry_config={"max_retries": 1, "retry_timeout": seconds},
            )

    def exists(self, name: str) -> bool:
        try:
            with _errors():
                obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> memoryview:
        try:
            return self._read(name, ranges)
        except (FileNotFoundError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # obstore panics where an object ends within one of several ranges
            with _errors():
                size = obstore.head(self._store, name)["size"]
            within = [(start, min(end, size)) for start, end in ranges if start < min(end, size)]
            if within == ranges:
                raise error if isinstance(error, OSError) else OSError(str(error)) from error
        return self._read(name, within)

    def _read(self, name: str, ranges: list[tuple[int, int]]) -> memoryview:
        """The bytes of ranges that are not empty and lie in the object."""
        data = bytearray()
        if ranges:
            starts, ends = zip(*ranges, strict=True)
            read: Callable[..., Any] = obstore.get_ranges
            with _errors():
                data = data.join(read(self._store, name, starts=starts, ends=ends))
        return memoryview(data)

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        try:
            with _errors():
                obstore.put(self._store, name, b"".join(parts), mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    def touch(self, name: str) -> None:
        """Object stores remember when an object was written alone."""

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
        """Object stores do not say when something was removed."""


@contextmanager
def _errors() -> Iterator[None]:
    """obstore's errors as the system's."""
    try:
        yield
    except NotFoundError as error:
        raise FileNotFoundError(str(error)) from error
    except AlreadyExistsError as error:
        raise FileExistsError(str(error)) from error
    except BaseError as error:
        raise OSError(str(error).splitlines()[0]) from error
