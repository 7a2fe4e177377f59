"""Backends of stores, by URL. A new kind of store is one file with the seven methods of ``Backend``."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote, unquote, urlsplit

from kvloom.errors import ArgumentError
from kvloom.store.names import is_folder

SCHEMES = ("file", "memory", "s3", "gs", "az", "redis", "rediss")


class Stored(NamedTuple):
    """An object of a store.

    Attributes:
        name: Path within the store, parts divided by slashes.
        size: Bytes.
        used: Time when it was last written or, if the store records that, used; seconds since 1970.
    """

    name: str
    size: int
    used: float


class Backend(Protocol):
    """Named objects that are written atomically and never changed.

    Every method raises ``OSError`` for any failure, ``FileNotFoundError`` for a missing object. Methods are
    called from several threads.
    """

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        """Bytes of each range ``[start, end)``; fewer if the object ends before.

        Nobody writes this memory, which may be the store's own; then it is read-only.
        """

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        """Write an object, visible only once all of it is durable; ``False`` if the name exists.

        Parts must not be changed afterwards: a store in memory keeps them.
        """

    def touch(self, name: str) -> None:
        """Record that an object was used now, if the store can."""

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""

    def rename(self, name: str, to: str) -> None:
        """Rename an object, which replaces one with the new name; its bytes are not transferred."""

    def list_stored(self, prefix: str = "") -> Iterable[Stored]:
        """Iterate over objects whose names begin with a prefix, which is empty or ends with a slash.

        Each takes less than a millisecond of work, so that the caller can yield to other threads.
        """

    def version(self, prefix: str) -> float | None:
        """Time of the last change of a prefix's objects, in seconds since 1970; ``None`` if unknown."""


def store_url(text: str) -> str:
    """URL of a store or a local folder, from a command line's argument.

    Raises:
        ArgumentError: it is empty, as an unset variable is, which would be the current folder.
    """
    if not text:
        raise ArgumentError("store must be a folder or a URL, got an empty text")
    return text if "://" in text else f"file://{quote(str(Path(text).expanduser().absolute()))}"


def public_url(url: str) -> str:
    """URL without secrets: without its password and its query string.

    Raises:
        ArgumentError: it is no URL.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:  # it may have a password, which is not shown
        raise ArgumentError(f"store must be a URL of {', '.join(SCHEMES)}: {error}") from None
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    netloc = f"{name}{colon and ':***'}{at}{host}"
    shown = f"{parts.scheme}://{netloc}{parts.path}" if "://" in url else url.partition("?")[0]
    return f"{shown}?***" if parts.query else shown


def connect(url: str, timeout: float, mode: int = 0o600, create: bool = True) -> Backend:
    """Open the backend of a URL.

    Args:
        url: Such as ``"file:///var/cache/kvloom"``, ``"s3://bucket/folder"`` or ``"redis://host:6379/0"``.
        timeout: Timeout of one request, in seconds.
        mode: Permissions of files in a local folder.
        create: Whether to make a missing local folder.

        Raises:
            ArgumentError: the URL names no kind of store, or with ``create=False`` a missing folder.
        ModuleNotFoundError: the library of this kind is not installed.
        OSError: the store cannot be opened.
    """
    public_url(url)  # refuses what is no URL
    scheme = urlsplit(url).scheme if "://" in url else ""
    match scheme:
        case "file":
            from kvloom.store.backends.files import Files

            return Files.of_url(url, mode, create)
        case "memory":
            from kvloom.store.backends.memory import MemoryBackend

            return MemoryBackend.of_url(url)
        case "s3" | "gs" | "az":
            from kvloom.store.backends.objects import Objects

            return Objects(url, timeout)
        case "redis" | "rediss":
            from kvloom.store.backends.redis import Redis

            return Redis(url, timeout)
    raise ArgumentError(f"store must be a URL of {', '.join(SCHEMES)}, got {public_url(url)!r}")


def expect_own(url: str) -> None:
    """Check that a local folder, whose objects limits may remove, is a store, empty or missing.

    Raises:
        ArgumentError: it has only files of others.
    """
    parts = urlsplit(url)
    root = Path(unquote(parts.path))
    if parts.scheme != "file" or not root.is_dir():
        return
    try:
        names = {path.name for path in root.iterdir() if not path.name.startswith(".")} - {"lost+found"}
    except OSError:  # nothing is removed from a folder that cannot be listed
        return
    if names and not any(is_folder(name) for name in names):
        raise ArgumentError(
            f"store must be an empty folder or one of kvloom's where limits are set, got {str(root)!r} with "
            f"{min(names)!r}"
        )
