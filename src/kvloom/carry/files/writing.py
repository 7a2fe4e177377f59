"""Files that are written whole, by a thread of their own while the next bytes are made."""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Thread
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

_WRITTEN: Final = 1 << 20
"""Bytes that are written at a time: the system takes longer for larger writes."""
_HELD: Final = 4 << 20
"""Bytes that may wait to be written; more, if they come at once and nothing else waits."""


class Target(Protocol):
    """What takes bytes one after the other."""

    def write(self, data: Any, /) -> object:
        """Take the next bytes, which nobody may change afterwards."""


def bytes_in(x: Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its axes; not copied if they lie so."""
    found: memoryview = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return found


def write_tensor(file: Target, x: Tensor) -> None:
    """Write the bytes of a tensor, in the order of its axes."""
    if x.numel():
        file.write(bytes_in(x))


class _Part(NamedTuple):
    """Bytes that wait: rows of ``width``, each ``stride`` behind the one before, the first at ``at``.

    ``room``: the memory that they are in, if it is the file's own.
    """

    at: int
    data: memoryview
    width: int
    stride: int
    room: Tensor | None


class FileBehind:
    """A file that a thread writes while the caller makes the next bytes, of which few wait.

    Args:
        number: Its descriptor.

    Attributes:
        end: Number of bytes that were given by ``write``.
    """

    def __init__(self, number: int) -> None:
        self._number, self.end = number, 0
        self._parts, self._held = deque[_Part](), 0
        self._rooms: list[Tensor] = []  # memory of what was written, for what is still to be
        self._changed, self._error = Condition(), None  # type: Condition, OSError | None
        self._is_ended = False
        self._thread = Thread(target=self._run, name="kvloom carry", daemon=True)
        self._thread.start()

    def write(self, data: bytes | memoryview) -> None:
        """Write the next bytes; raises OSError if earlier ones could not be written."""
        self._put(_Part(self.end, memoryview(data), len(data), 0, None))
        self.end += len(data)

    def write_rows(self, at: int, x: Tensor, width: int, stride: int) -> None:
        """Write the bytes of a tensor, which nobody may change afterwards, as rows.

        Args:
            at: Where the first row begins.
            x: The tensor, in the order of its axes.
            width: Bytes of a row.
            stride: Bytes from the begin of a row to that of the next.

        Raises:
            OSError: earlier bytes could not be written.
        """
        room = None
        if not x.is_contiguous():
            room = self._room(x.nbytes)
            x = room[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        self._put(_Part(at, bytes_in(x), width, stride, room))

    def _room(self, nbytes: int) -> Tensor:
        """Memory that nothing is in, which need not be taken from the system again."""
        with self._changed:
            while self._rooms:
                if len(room := self._rooms.pop()) >= nbytes:
                    return room
        return torch.empty(nbytes, dtype=torch.uint8)

    def _put(self, part: _Part) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or not self._held or self._held + len(part.data) <= _HELD
            )
            if self._error is not None:
                raise self._error
            self._parts.append(part)
            self._held += len(part.data)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all is written; raises OSError if something could not be."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._parts or self._is_ended)
                if not self._parts:
                    return
                part = self._parts.popleft()
            try:
                for i, first in enumerate(range(0, len(part.data), part.width or 1)):
                    self._write(part.at + i * part.stride, part.data[first : first + part.width])
            except OSError as error:
                self._error = error
            with self._changed:
                self._held -= len(part.data)
                if part.room is not None:
                    self._rooms.append(part.room)
                if self._error is not None:
                    self._parts.clear()
                    self._is_ended = True
                del part
                self._changed.notify_all()

    def _write(self, at: int, data: memoryview) -> None:
        while len(data):
            done = os.pwrite(self._number, data[:_WRITTEN], at)
            at, data = at + done, data[done:]


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[FileBehind]:
    """A file that has its name only when it is complete and on the disk.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.writing")
    try:
        with unfinished.open("wb", buffering=0) as file:
            behind = FileBehind(file.fileno())
            try:
                yield behind
            finally:
                behind.close()
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
