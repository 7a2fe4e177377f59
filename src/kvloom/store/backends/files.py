"""Backend in a local folder: files are written under a temporary name, made durable, then renamed."""

import ctypes
import errno
import fcntl
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import accumulate, count, pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvloom.errors import ArgumentError
from kvloom.store.backends import Stored, public_url

_NAME = re.compile(r"[a-z0-9]+(?:/[a-z0-9][a-z0-9.-]*)?")
_TEMPORARY = ".writing-"
_LEFT = re.compile(r"\.writing-\d+-\d+-\d+")  # process, thread and a number
_LOG = logging.getLogger("kvloom.store")
_LINE = 64  # bytes of a cache line
_uninitialized = ctypes.pythonapi.PyBytes_FromStringAndSize
_uninitialized.argtypes, _uninitialized.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object


class Files:
    """``Backend`` in a folder, which is made with its parents if it is missing.

    The writer of a temporary file holds a lock on it, which ends with its process. So temporary files of
    killed processes can be recognized; they are removed when the folder is opened.

    Args:
        root: The folder, or a link to it.
        mode: Permissions of files. New folders can be entered by those who may read the files.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, root: Path, mode: int = 0o600) -> None:
        self.root = root.resolve()
        self._mode, self._folder_mode = mode, mode | (mode & 0o444) >> 2 | 0o700
        self._numbers = count()
        self._make_folder(self.root)
        if self.root.stat().st_mode & stat.S_IWOTH:
            _LOG.warning("%s can be written by all users of this machine, who may put there anything", root)
        self._remove_left_behind()

    @classmethod
    def of_url(cls, url: str, mode: int = 0o600, create: bool = True) -> "Files":
        """Backend of ``file:///absolute/path``.

        Args:
            url: URL of the folder.
            mode: As of the class.
            create: Whether to make a missing folder.

        Raises:
            ArgumentError: the URL names a host, no absolute path, or with ``create=False`` no folder.
        """
        parts = urlsplit(url)
        path = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not path.is_absolute() or parts.query or parts.fragment:
            raise ArgumentError(f"store must be file:// and an absolute path, got {public_url(url)!r}")
        if not create and not path.is_dir():
            raise ArgumentError(f"store must be a folder that is there, got {str(path)!r}")
        return cls(path, mode)

    def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        with _opened(self._path(name), os.O_RDONLY) as file:
            size = os.fstat(file).st_size
            wanted = [(min(start, size), min(end, size)) for start, end in ranges]
            ends = [0, *accumulate(end - start for start, end in wanted)]
            data = _memory(ends[-1])
            _read(file, _joined(wanted), data, name)
            return [data[start:end] for start, end in pairwise(ends)]

    def put_if_absent(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool:
        path = self._path(name)
        if path.is_file():
            return False
        self._make_folder(path.parent)
        temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}")
        try:
            while not self._write(temporary, path, parts):
                pass
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)
        return True

    def rename(self, name: str, to: str) -> None:
        target = self._path(to)
        self._make_folder(target.parent)
        self._path(name).rename(target)

    def touch(self, name: str) -> None:
        with suppress(OSError):  # file of another user, or removed
            os.utime(self._path(name), follow_symlinks=False)

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def list_stored(self, prefix: str = "") -> Iterator[Stored]:
        for name, entry in self._walk(prefix):
            if _NAME.fullmatch(name):
                with suppress(FileNotFoundError, PermissionError):  # another process removed it, or has it
                    status = entry.stat(follow_symlinks=False)
                    yield Stored(name, status.st_size, status.st_mtime)

    def version(self, prefix: str) -> float | None:
        try:
            return self._path(prefix.rstrip("/")).stat().st_mtime if prefix else None
        except FileNotFoundError:
            return 0.0

    def _write(self, temporary: Path, path: Path, parts: list[bytes | bytearray | memoryview]) -> bool:
        """Whether the file was written; else its temporary file was removed, and the caller tries again."""
        with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file).st_nlink:  # another process opened the folder and removed it as abandoned
                return False
            os.fchmod(file, self._mode)  # despite the process's umask
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[os.write(file, left) :]
            os.fsync(file)
            temporary.rename(path)
            return True

    def _make_folder(self, path: Path) -> None:
        """Make a folder and its parents."""
        if path.is_dir():
            return
        self._make_folder(path.parent)
        try:
            path.mkdir(mode=0o700)
            path.chmod(self._folder_mode)
        except FileExistsError:
            if not path.is_dir():
                raise
            return  # another process was faster
        _sync_folder(path.parent)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise OSError(errno.EINVAL, "no name of this store", name)
        return self.root / name

    def _walk(self, prefix: str = "") -> Iterator[tuple[str, "os.DirEntry[str]"]]:
        """Names and entries of files in the folder and its subfolders, without links and unreadable ones."""
        for entry in _entries(self.root / prefix):
            if entry.is_file(follow_symlinks=False):
                yield f"{prefix}{entry.name}", entry
            elif not prefix and entry.is_dir(follow_symlinks=False):
                yield from self._walk(f"{entry.name}/")

    def _remove_left_behind(self) -> None:
        for _, entry in self._walk():
            if _LEFT.fullmatch(entry.name):
                with suppress(OSError), _opened(Path(entry), os.O_RDONLY) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    Path(entry).unlink()


def _entries(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """Entries of a folder; none if it is missing or unreadable."""
    with suppress(FileNotFoundError, PermissionError, NotADirectoryError), os.scandir(folder) as entries:
        yield from entries


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ranges."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def _memory(nbytes: int) -> memoryview:
    """Uninitialized memory, aligned to a cache line, to which the system copies fast."""
    whole = BytesIO(_uninitialized(None, nbytes + _LINE)).getbuffer()  # uses the bytes without a copy
    at = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % _LINE
    return whole[at : at + nbytes]


def _read(file: int, ranges: list[tuple[int, int]], data: memoryview, name: str) -> None:
    """Fill ``data`` with ranges of a file."""
    for start, end in ranges:
        while start < end:
            count = os.preadv(file, [data[: end - start]], start)
            if not count:
                raise OSError(errno.EIO, "file ends early", name)
            data, start = data[count:], start + count


@contextmanager
def _opened(path: Path, flags: int, mode: int = 0o600) -> Iterator[int]:
    """Open a file or folder; anything else, such as a pipe or a link, counts as missing."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FileNotFoundError(errno.ENOENT, "no regular file", str(path)) from None
        raise
    try:
        if not flags & os.O_DIRECTORY and not stat.S_ISREG(os.fstat(file).st_mode):
            raise FileNotFoundError(errno.ENOENT, "no regular file", str(path))
        yield file
    finally:
        os.close(file)


def _sync_folder(path: Path) -> None:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        os.fsync(folder)
