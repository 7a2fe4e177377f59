"""Backends of stores, by URL. A new kind of store is one file with the eight methods of ``Backend``."""

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
        used: Seconds since 1970 when it was last written or, where the store remembers that, used.
    """

    name: str
    size: int
    used: float


class Backend(Protocol):
    """Named objects that are written whole and never changed.

    Every method raises ``OSError`` for whatever goes wrong, ``FileNotFoundError`` for an object that is not
    there. Methods are called from several threads.
    """

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> memoryview:
        """The bytes from each start to each end, one after the other; fewer if the object ends before.

        They are the caller's, who may write them.
        """

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        """Write an object, visible only when all of it lasts; ``False`` if there is one of this name."""

    def touch(self, name: str) -> None:
        """Let an object count as used now, where the store can remember that."""

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""

    def rename(self, name: str, to: str) -> None:
        """Give an object another name, in place of what has it; its bytes pass through nobody's memory."""

    def list_stored(self, prefix: str = "") -> Iterable[Stored]:
        """Objects whose names begin with a prefix, which is empty or ends with a slash.

        Each in less than a millisecond of work, so that whoever iterates may let others go first.
        """

    def version(self, prefix: str) -> float | None:
        """Seconds since 1970 when an object of a prefix last came or went; ``None`` if nobody knows."""


def store_url(text: str) -> str:
    """The URL of a store, or of the local folder, that a command line names."""
    return text if "://" in text else f"file://{quote(str(Path(text).expanduser().absolute()))}"


def public_url(url: str) -> str:
    """A URL as others may see it: without its password and what follows a question mark."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    netloc = f"{name}{colon and ':***'}{at}{host}"
    shown = f"{parts.scheme}://{netloc}{parts.path}" if "://" in url else url.partition("?")[0]
    return f"{shown}?***" if parts.query else shown


def connect(url: str, timeout: float, mode: int = 0o600, create: bool = True) -> Backend:
    """The backend of a URL.

    Args:
        url: Such as ``"file:///var/cache/kvloom"``, ``"s3://bucket/folder"`` or ``"redis://host:6379/0"``.
        timeout: Seconds after which one request gives up.
        mode: Permissions of files in a local folder.
        create: Whether a local folder is made if it is missing.

    Raises:
        ArgumentError: the URL names no kind of store, or with ``create=False`` a folder that is missing.
        ModuleNotFoundError: the library of this kind is not installed.
        OSError: the store does not let itself be opened.
    """
    scheme = urlsplit(url).scheme if "://" in url else ""
    match scheme:
        case "file":
            from kvloom.store.backends.files import Files

            return Files.of_url(url, mode, create)
        case "memory":
            from kvloom.store.backends.memory import Memory

            return Memory.of_url(url)
        case "s3" | "gs" | "az":
            from kvloom.store.backends.objects import Objects

            return Objects(url, timeout)
        case "redis" | "rediss":
            from kvloom.store.backends.redis import Redis

            return Redis(url, timeout)
    raise ArgumentError(f"store must be a URL of {', '.join(SCHEMES)}, got {public_url(url)!r}")


def expect_own(url: str) -> None:
    """Expect that a local folder, whose objects limits may remove, is a store, or empty or missing.

    Raises:
        ArgumentError: it holds things of others alone.
    """
    parts = urlsplit(url)
    root = Path(unquote(parts.path))
    if parts.scheme != "file" or not root.is_dir():
        return
    try:
        names = {path.name for path in root.iterdir() if not path.name.startswith(".")} - {"lost+found"}
    except OSError:  # from what cannot be listed nothing is removed
        return
    if names and not any(is_folder(name) for name in names):
        raise ArgumentError(
            f"store must be an empty folder or one of kvloom's where limits are set, got {str(root)!r} with "
            f"{min(names)!r}"
        )
