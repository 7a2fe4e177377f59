"""Files that are written whole, by a thread of their own while the next bytes are made."""

import os
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from math import prod
from pathlib import Path
from threading import Condition, Thread
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

_WRITTEN: Final = 1 << 20
"""Bytes that are written at a time: the system takes longer for larger writes."""
_HELD: Final = 4 << 20
"""Bytes that may wait to be written; more, if they come at once and nothing else waits."""


class RoomFor(Protocol):
    """A function that gives memory for what is written next."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, /) -> Tensor: ...


class Target(Protocol):
    """What takes bytes one after the other."""

    def write(self, data: bytes, /) -> object:
        """Take the next bytes."""

    def write_tensor(self, x: Tensor, /) -> None:
        """Take the bytes of a tensor, in the order of its axes, which nobody may change afterwards."""

    def room(self, shape: Sequence[int], dtype: torch.dtype, /) -> Tensor:
        """Memory for a tensor that is written next, which may have held others that were written."""


def bytes_in(x: Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its axes; not copied if they lie so."""
    found: memoryview = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return found


def new_room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that nothing else uses."""
    return torch.empty(tuple(shape), dtype=dtype)


class InMemory(BytesIO):
    """A target in memory."""

    room = staticmethod(new_room)

    def write_tensor(self, x: Tensor) -> None:
        """Take the bytes of a tensor, in the order of its axes."""
        if x.numel():
            self.write(bytes_in(x))


class _Part(NamedTuple):
    """Bytes that wait: rows of ``width``, each ``stride`` behind the one before, the first at ``at``.

    ``room``: the tensor that they are in, if its memory is the file's own.
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
        # Memory that was given, by address, and that of what was written, by size: taking it from the system
        # anew takes longer than to write it.
        self._given, self._rooms = dict[int, Tensor](), defaultdict[int, list[Tensor]](list)
        self._changed, self._error = Condition(), None  # type: Condition, OSError | None
        self._is_ended = False
        self._thread = Thread(target=self._run, name="kvloom carry", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Write the next bytes; raises OSError if earlier ones could not be written."""
        self._put(_Part(self.end, memoryview(data), len(data), 0, None))
        self.end += len(data)

    def write_tensor(self, x: Tensor) -> None:
        """Write the bytes of a tensor; see ``Target``; errors as of ``write``."""
        self.write_rows(self.end, x, x.nbytes, 0)
        self.end += x.nbytes

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
        if x.numel():
            self._put(_Part(at, bytes_in(x), width, stride, self._given.pop(x.data_ptr(), None)))

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a tensor that is written next, as a whole."""
        nbytes = prod(shape) * dtype.itemsize
        with self._changed:
            free = self._rooms[nbytes]
            room = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8)
        self._given[room.data_ptr()] = room
        return room.view(dtype).view(tuple(shape))

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
                self._held -= len(part.data)
                self._changed.notify_all()
            try:
                for i, first in enumerate(range(0, len(part.data), part.width or 1)):
                    self._write(part.at + i * part.stride, part.data[first : first + part.width])
            except OSError as error:
                self._error = error
            with self._changed:
                if part.room is not None:
                    self._rooms[part.room.nbytes].append(part.room)
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
