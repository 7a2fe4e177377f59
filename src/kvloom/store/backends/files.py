"""A local folder: objects are files, written under a temporary name, made durable, then renamed."""

import ctypes
import errno
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import count
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvloom.errors import ArgumentError
from kvloom.store.backends import Stored

_NAME = re.compile(r"[a-z0-9]+(?:/[a-z0-9][a-z0-9.-]*)?")
_TEMPORARY = ".writing-"
_LINE = 64  # bytes of a line of the processor's caches
_uninitialized = ctypes.pythonapi.PyBytes_FromStringAndSize
_uninitialized.argtypes, _uninitialized.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object


class Files:
    """A ``Backend`` in a folder, which is made with mode 0700 if it is missing.

    Whoever writes a temporary file holds a lock on it, which ends with its process; so what a killed process
    left is told apart from what another one is writing, and is removed when the folder is opened.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._numbers = count()
        _make_folder(root)
        self._remove_left_behind()

    @classmethod
    def of_url(cls, url: str) -> "Files":
        """The folder of ``file:///absolute/path``.

        Raises:
            ArgumentError: the URL names a host, or no absolute path.
        """
        parts = urlsplit(url)
        path = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not path.is_absolute() or parts.query or parts.fragment:
            raise ArgumentError(f"store must be file:// and an absolute path, got {url!r}")
        return cls(path)

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> memoryview:
        with _opened(self._path(name), os.O_RDONLY) as file:
            size = os.fstat(file).st_size
            wanted = [(start, min(end, size)) for start, end in _joined(ranges) if start < size]
            data = _memory(sum(end - start for start, end in wanted))
            _read(file, wanted, data, name)
            return data

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        path = self._path(name)
        if path.is_file():
            return False
        _make_folder(path.parent)
        temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with _opened(temporary, flags) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                for part in parts:
                    left = memoryview(part)
                    while left:
                        left = left[os.write(file, left) :]
                os.fsync(file)
                temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)
        return True

    def touch(self, name: str) -> None:
        with suppress(OSError):  # somebody else's file, or gone
            os.utime(self._path(name), follow_symlinks=False)

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def list_stored(self, prefix: str = "") -> list[Stored]:
        found = []
        for path in self._walk():
            name = path.relative_to(self.root).as_posix()
            if name.startswith(prefix) and _NAME.fullmatch(name):
                with suppress(FileNotFoundError):  # another process removed it
                    status = path.stat()
                    found.append(Stored(name, status.st_size, status.st_mtime))
        return found

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise OSError(errno.EINVAL, "no name of this store", name)
        return self.root / name

    def _walk(self) -> Iterator[Path]:
        """Files of the folder and of the folders in it; links are followed nowhere."""
        for entry in os.scandir(self.root):
            if entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    yield from (Path(x) for x in os.scandir(entry) if x.is_file(follow_symlinks=False))
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry)

    def _remove_left_behind(self) -> None:
        for path in self._walk():
            if path.name.startswith(_TEMPORARY):
                with suppress(OSError), _opened(path, os.O_RDONLY) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in the fewest ranges."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def _memory(nbytes: int) -> memoryview:
    """Memory that nobody zeroed, from where the system copies fast: not from odd places of a line."""
    whole = BytesIO(_uninitialized(None, nbytes + _LINE)).getbuffer()  # takes the bytes as they are
    at = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % _LINE
    return whole[at : at + nbytes]


def _read(file: int, ranges: list[tuple[int, int]], data: memoryview, name: str) -> None:
    """Fill ``data`` with bytes of a file."""
    for start, end in ranges:
        while start < end:
            count = os.preadv(file, [data[: end - start]], start)
            if not count:
                raise OSError(errno.EIO, "file ends early", name)
            data, start = data[count:], start + count


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _make_folder(path: Path) -> None:
    if path.is_dir():
        return
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        os.fsync(folder)
