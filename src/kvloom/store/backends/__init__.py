"""Where bytes lie, by URL. A new kind of store is one file with the six methods of ``Backend``."""

from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from kvloom.errors import ArgumentError

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
        """The bytes from each start to each end, one behind the other; fewer if the object ends before.

        They are the caller's, who may write them.
        """

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        """Write an object, visible only when all of it lasts; ``False`` if there is one of this name."""

    def touch(self, name: str) -> None:
        """Let an object count as used now, where the store can remember that."""

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""

    def list_stored(self, prefix: str = "") -> list[Stored]:
        """Objects whose names begin with a prefix, which is empty or ends with a slash."""


def store_url(text: str) -> str:
    """The URL of a store, or of the local folder, that a command line names."""
    return text if "://" in text else f"file://{quote(str(Path(text).expanduser().absolute()))}"


def connect(url: str, timeout: float) -> Backend:
    """The backend of a URL.

    Args:
        url: Such as ``"file:///var/cache/kvloom"``, ``"s3://bucket/folder"`` or ``"redis://host:6379/0"``.
        timeout: Seconds after which one request gives up.

    Raises:
        ArgumentError: the URL names no kind of store.
        ModuleNotFoundError: the library of this kind is not installed.
        OSError: the store does not let itself be opened.
    """
    scheme = urlsplit(url).scheme if "://" in url else ""
    match scheme:
        case "file":
            from kvloom.store.backends.files import Files

            return Files.of_url(url)
        case "memory":
            from kvloom.store.backends.memory import Memory

            return Memory.of_url(url)
        case "s3" | "gs" | "az":
            from kvloom.store.backends.objects import Objects

            return Objects(url, timeout)
        case "redis" | "rediss":
            from kvloom.store.backends.redis import Redis

            return Redis(url, timeout)
    raise ArgumentError(f"store must be a URL of {', '.join(SCHEMES)}, got {url!r}")
